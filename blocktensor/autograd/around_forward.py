"""Call a pair of functions around every forward of a module that no compiler traces."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from ..tensor.torch_internals.callers import Caller, caller


class AroundForward:
    """Hooks on a module, which call :meth:`begin` and :meth:`end` of a subclass.

    The hooks hold no reference to the module, which would delay the freeing of a model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def begin(self, forward: Caller | None) -> None:
        """Run before a forward.

        ``forward``: the function that runs it, whose end tells if :meth:`end` was left out.
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
            self.begin(caller())

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not is_compiling():
            self.end()


def was_interrupted(forward: Caller | None) -> bool:
    """Return True if the function that runs a forward has ended; False without one.

    After a KeyboardInterrupt, torch calls no hook that says so.
    """
    return forward is not None and forward.has_ended()
