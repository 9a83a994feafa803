"""Call a pair of functions around every forward of a module that no compiler traces."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle


class AroundForward:
    """Hooks on a module, which call :meth:`begin` and :meth:`end` of a subclass.

    The hooks hold no reference to the module, which would delay the freeing of a model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def begin(self, forward: FrameType | None) -> None:
        """Run before a forward.

        ``forward``: the frame that calls it, for :func:`still_runs`.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Run after a forward, also if it raised an Exception; not after a KeyboardInterrupt."""
        raise NotImplementedError

    def is_traced(self) -> None:
        """Run before a forward that a compiler traces, in place of the others: do nothing."""

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            self.is_traced()
        else:
            self.begin(sys._getframe(1))

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not is_compiling():
            self.end()


def still_runs(forward: FrameType | None) -> bool:
    """Return True if a frame is on the stack of this thread, or None is given.

    torch calls no hook after a forward that a KeyboardInterrupt has ended.
    """
    frame = None if forward is None else sys._getframe(1)
    while frame is not forward and frame is not None:
        frame = frame.f_back
    return frame is forward
