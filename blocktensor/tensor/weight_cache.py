"""The FP8 form of a trainable weight: when it is cast, how long it is kept."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..ops.cast.ops import quantize_rowwise, transpose
from ..ops.formats import Quantized
from ..ops.runtime.specialize import PLAIN
from ..recipe import Recipe
from .base import MasterBase
from .operand import Operand

_GRAD: Any = Tensor.grad  # the descriptor: half of the time of FP8Base.grad


class FP8Cache:
    """The FP8 form of one master, kept for as long as it is needed and no longer.

    Valid for one version of the master. Released by the version's last backward: there will be as
    many as the previous version saw; in the first version, the last is the one after which no
    forward waits for its backward. So one backward a step leaves no FP8 bytes between steps, and N
    microbatches share one cast, but for the first step, which learns their number. A wrong guess
    costs a cast, never a bit.

    Attributes:
        master: the high-precision weight.
        recipe, format: of its casts.
        casts: how many were made so far.
        main_grad: the buffer that weight gradients are added to, if any.
    """

    __slots__ = (
        "_backwards",
        "_expected",
        "_held",
        "_key",
        "_pending",
        "casts",
        "format",
        "main_grad",
        "master",
        "recipe",
    )

    def __init__(self, master: Tensor, recipe: Recipe) -> None:
        self.master = master
        self.recipe, self.format = recipe, recipe.weight_format
        self.casts = 0
        self.main_grad: Tensor | None = None
        self._held: Operand | None = None
        self._key: tuple[int, ...] | None = None
        self._pending = 0  # forwards of this version that wait for their backward
        self._backwards = 0  # backwards of this version
        self._expected: float | None = None  # how many there will be; None: not known yet

    def __getstate__(self) -> tuple[Tensor, Recipe]:  # copies and checkpoints cast for themselves
        return self.master, self.recipe

    def __setstate__(self, state: tuple[Tensor, Recipe]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def get(self, user: MasterBase, before_backward: bool = False) -> Operand:
        """The FP8 form of the master as it is now.

        Args:
            user: the weight, or a view of it.
            before_backward: whether a forward is recorded whose backward will read the FP8 form.
        """
        self._pending += before_backward
        master = self.master
        # A fake tensor has no memory, and its cast belongs to the graph that is traced.
        if not self.recipe.cache_weight or master.is_inference() or type(master) not in PLAIN:
            return self._cast()
        version = 0 if user.is_inference() else user._version
        key = version, master._version, master.data_ptr()
        if key != self._key:
            self._expected = self._backwards or self._expected
            self._backwards, self._pending = 0, int(before_backward)
            self._key, self._held = key, None
        elif self._held is None and user.is_leaf and _GRAD.__get__(user) is not None:
            # Used after its expected last backward, and it holds a gradient: this is one more
            # microbatch, and more may follow.
            self._expected = math.inf
        held = self._held  # read once: a backward pass in another thread may release it
        if held is None:
            held = self._held = self._cast()
        return held

    def columnwise(self, user: MasterBase, before_backward: bool = False) -> Quantized:
        """The columnwise form of :meth:`get`, kept if the recipe says so."""
        operand = self.get(user, before_backward)
        if operand.columnwise is not None:
            return operand.columnwise
        assert operand.rowwise is not None
        form = transpose(operand.rowwise)
        if self.recipe.columnwise == "keep" and self._held is operand:
            self._held = Operand(operand.rowwise, form)
        return form

    def after_backward(self) -> None:
        """A backward has read the FP8 form; release it if that was the last one expected."""
        self._pending -= 1
        self._backwards += 1
        expected = self._expected
        if self._pending <= 0 if expected is None else self._backwards >= expected:
            self._held = None

    def invalidate(self) -> None:
        """Forget the FP8 form: the next use casts again."""
        self._key = self._held = None

    def held(self) -> Operand:
        """The forms held right now; casts nothing."""
        return self._held or Operand(None, None)

    def nbytes(self) -> int:
        """Bytes of the FP8 form held right now."""
        return self.held().nbytes()

    def _cast(self) -> Operand:
        self.casts += 1
        return Operand(quantize_rowwise(self.master, self.format), None)
