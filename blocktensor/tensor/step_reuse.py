"""Reuse of a weight's FP8 form across microbatches: ``Recipe(cache_weight="step")``."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .base import MasterBase
from .operand import Operand

_GRAD: Any = Tensor.grad  # the descriptor: half of the time of FP8Base.grad

_optimizer_steps = 0


def optimizer_steps() -> int:
    """How many steps all ``torch.optim.Optimizer`` have made since this was first called."""
    _count_optimizer_steps()
    return _optimizer_steps


@functools.cache
def _count_optimizer_steps() -> None:
    def count(*_: Any) -> None:
        global _optimizer_steps
        _optimizer_steps += 1

    register_optimizer_step_post_hook(count)


class StepReuse:
    """The FP8 form of one version of a master, kept for as long as it is needed and no longer.

    A version ends at a write that PyTorch counts and at any optimizer's step. The form is released
    by the version's last backward: there will be as many as the previous version saw; in the first
    version, the last is the one after which no forward waits for its backward. So one backward a
    step leaves no FP8 bytes between steps, and N microbatches share one cast, but for the first
    step, which learns their number. A wrong guess costs a cast, never a bit.

    Attributes:
        held: the forms, or None.
    """

    __slots__ = ("_backwards", "_expected", "_key", "_pending", "held")

    def __init__(self) -> None:
        _count_optimizer_steps()
        self.held: Operand | None = None
        self._key: tuple[int, ...] | None = None
        self._pending = 0  # forwards of this version that wait for their backward
        self._backwards = 0  # backwards of this version
        self._expected: float | None = None  # how many there will be; None: not known yet

    def find(self, user: MasterBase, master: Tensor, before_backward: bool) -> Operand | None:
        """The form of the master's present version, if it is held.

        Args:
            user: the weight, or a view of it.
            master: a plain tensor whose writes are counted.
            before_backward: whether a forward asks that is recorded for a backward.
        """
        self._pending += before_backward
        version = 0 if user.is_inference() else user._version
        key = version, user.counted._version, master.data_ptr(), _optimizer_steps
        if key != self._key:
            self._expected = self._backwards or self._expected
            self._backwards, self._pending = 0, int(before_backward)
            self._key, self.held = key, None
        elif self.held is None and user.is_leaf and _GRAD.__get__(user) is not None:
            # Used after its expected last backward, and it holds a gradient: this is one more
            # microbatch, and more may follow.
            self._expected = math.inf
        return self.held

    def keep(self, held: Operand) -> None:
        """Hold the cast of the version that :meth:`find` has seen."""
        self.held = held

    def extend(self, held: Operand, both: Operand) -> None:
        """Hold ``both`` in place of ``held``, unless that is gone."""
        if self.held is held:
            self.held = both

    def after_backward(self) -> None:
        """A backward has read the form; release it if that was the last one expected."""
        self._pending -= 1
        self._backwards += 1
        expected = self._expected
        if self._pending <= 0 if expected is None else self._backwards >= expected:
            self.held = None

    def forget(self) -> None:
        """Find nothing until the next :meth:`keep`."""
        self._key = self.held = None
