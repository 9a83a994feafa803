"""The FP8 form of a trainable weight: when it is cast, how long it is kept."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from ..ops.cast.ops import (
    quantize_rowwise,
    quantize_transpose,
    quantize_with_transpose,
    transpose,
)
from ..ops.formats import Quantized
from ..ops.runtime.specialize import PLAIN
from ..recipe import Recipe
from .base import MasterBase
from .operand import Operand
from .step_reuse import StepReuse

ONE_READ_BYTES = 64 << 20
"""Most bytes of a form that a forward casts with its transpose: both are there during fprop. The
forms of larger weights are made one by one, the second in backward, so that the peak of a single
layer does not grow."""


class WaitingForm:
    """The FP8 form of a weight's latest forward, for all backwards that wait.

    Autograd graphs hold it: a graph that is freed, by its backward or unused, frees it too.

    Attributes:
        operand: in the orientation of the master; None until it is cast.
    """

    __slots__ = ("__weakref__", "operand")

    def __init__(self) -> None:
        self.operand: Operand | None = None


class ForwardCast:
    """What one graph holds of its forward's cast.

    Attributes:
        cache: that made it.
        version: of the master then.
        waiting: the form; None where backward casts again, or finds the form of ``StepReuse``, and
            once a backward has read it.
    """

    __slots__ = ("cache", "version", "waiting")

    def __init__(self, cache: FP8Cache, version: int, waiting: WaitingForm | None) -> None:
        self.cache, self.version, self.waiting = cache, version, waiting


class FP8Cache:
    """The casts of one master, and the FP8 form that waits for a backward.

    PyTorch does not count every write to a master: not those through ``.data`` of a view, and not
    those of a collective on one. So every forward casts, unless the recipe asks for reuse
    (``step_reuse.py``). Forwards that wait for their backwards share one form, of the latest: a
    counted write between the two raises in backward, as in plain PyTorch, and after an uncounted
    one plain PyTorch would use the new values as well.

    Attributes:
        master: the high-precision weight.
        counted: the tensor whose version counter counts writes to the master: the master itself, or
            that of the weight of which this is a part.
        recipe, format: of its casts.
        casts: how many were made so far.
        main_grad: the buffer that weight gradients are added to, if any.
        in_whole: the cache of casts with the scales of a whole of which the master is a part
            (``distributed/tensor_parallel/weight_part.py``); None until it is asked for.
    """

    __slots__ = ("_copies", "_parts", "_reuse", "_waiting", "casts", "counted", "format",
                 "in_whole", "main_grad", "master", "recipe")  # fmt: skip

    def __init__(self, master: Tensor, recipe: Recipe, counted: Tensor | None = None) -> None:
        self.master = master
        self.counted = master if counted is None else counted
        self.recipe, self.format = recipe, recipe.weight_format
        self.casts = 0
        self.main_grad: Tensor | None = None
        self.in_whole: FP8Cache | None = None
        self._waiting: weakref.ref[WaitingForm] | None = None
        self._reuse = StepReuse() if recipe.cache_weight == "step" else None
        self._parts: dict[int, FP8Cache] = {}
        self._copies: weakref.WeakSet[FP8Cache] | None = None

    def __getstate__(self) -> tuple[Any, ...]:  # copies and checkpoints cast for themselves
        return self.master, self.recipe, None, self.main_grad

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state[:3])  # type: ignore[misc]
        self.main_grad = state[3] if len(state) > 3 else None

    @property
    def cast_from(self) -> Tensor:
        """The tensor that casts read."""
        return self.master

    def part(self, index: int) -> FP8Cache:
        """The cache of one matrix of a stack, which all views of that matrix share.

        It casts that matrix alone: a loop over experts casts those that get tokens, once each.
        """
        found = self._parts.get(index)
        if found is None:
            found = FP8Cache(self.master[index], self.recipe, counted=self.counted)
            self._parts[index] = found
        return found

    def own(self) -> FP8Cache:
        """The cache of memory that belongs to the weight: this one."""
        return self

    def values(self) -> Tensor:
        """The master, for ops that only read it."""
        return self.master

    def remember(self, copy: FP8Cache) -> None:
        """Let ``copy`` be made before the next write to the weight."""
        if self._copies is None:
            self._copies = weakref.WeakSet()
        self._copies.add(copy)

    def before_write(self) -> None:
        """A write through the weight follows."""
        if self._copies:
            for copy in tuple(self._copies):
                copy.values()
            self._copies = None

    def get(self, user: MasterBase, before_backward: bool = False) -> Operand:
        """The FP8 form of the master as it is now.

        Args:
            user: the weight, or a view of it.
            before_backward: whether a forward asks that is recorded for a backward.
        """
        reuse = self._reuse
        if reuse is None or not self.reuses():
            return self._cast()
        held = reuse.find(user, self.master, before_backward)
        if held is None:
            held = self._cast()
            reuse.keep(held)
        return held

    def reuses(self) -> bool:
        """Whether casts are found again for the rest of a step.

        A fake tensor has no memory, and its cast belongs to the graph that is traced.
        """
        master = self.master
        return self._reuse is not None and not master.is_inference() and type(master) in PLAIN

    def cast_both(self) -> Operand:
        """Both FP8 forms of the master as it is now, from one read; neither is held.

        Of a part of a whole, whose ranks cast it together, the columnwise form may be absent.
        """
        return self._cast(columnwise=True)

    def get_for_backward(self, user: MasterBase) -> tuple[Operand, ForwardCast]:
        """:meth:`get` for a forward whose dgrad reads the weight too, and what its graph holds.

        The cast makes both forms, unless the weight is large (``ONE_READ_BYTES``) or the form of a
        whole step is kept; the graph holds the one that dgrad reads.
        """
        version, policy = self.version(), self.recipe.cache_weight
        if policy != "backward":
            return self.get(user, before_backward=True), ForwardCast(self, version, None)
        waiting = None if self._waiting is None else self._waiting()
        if waiting is None:
            waiting = WaitingForm()
            self._waiting = weakref.ref(waiting)
        cast = ForwardCast(self, version, waiting)
        operand = self._cast(columnwise=self.master.numel() <= ONE_READ_BYTES)
        waiting.operand = operand
        if self.recipe.columnwise != "keep" and operand.columnwise is not None:
            row, col = operand
            waiting.operand = Operand(row, None) if user.transposed else Operand(None, col)
        return operand, cast

    def get_in_backward(self, user: MasterBase, cast: ForwardCast | None) -> Operand:
        """The FP8 form that dgrad reads: of its forward where it waits, or cast again.

        Raises:
            RuntimeError: the master was written to since the forward. Autograd compares the counter
                of the weight; this compares the master's, which counts writes to a tensor of
                ``state_dict()``, for example.
        """
        if cast is None:
            return self.get(user)
        if cast.cache is not self:
            # after weight.data = … or .half(); F.linear of plain PyTorch has saved old values too
            return cast.cache.get_in_backward(user, cast)
        now = self.version()
        if now != cast.version:
            raise RuntimeError(
                f"the FP8 weight {list(self.master.shape)} was modified by an in-place operation "
                f"between a forward and its backward, whose data gradient needs it: it is at "
                f"version {now}; expected version {cast.version}. Run backward before the weight "
                f"changes, or forward again after"
            )
        waiting = cast.waiting and cast.waiting.operand
        if waiting:
            return waiting
        if self._reuse is None:
            return self._cast(rowwise=user.transposed, columnwise=not user.transposed)
        return self.get(user)

    def columnwise(self, operand: Operand, cast: ForwardCast | None = None) -> Quantized:
        """The columnwise form of a cast, kept with the rowwise one if the recipe says so."""
        if operand.columnwise is not None:
            return operand.columnwise
        assert operand.rowwise is not None
        form = transpose(operand.rowwise)
        if self.recipe.columnwise == "keep":
            both = Operand(operand.rowwise, form)
            if cast is not None and cast.waiting is not None:
                cast.waiting.operand = both
            elif self._reuse is not None:
                self._reuse.extend(operand, both)
        return form

    def after_backward(self) -> None:
        """A backward has read the FP8 form."""
        if self._reuse is not None:
            self._reuse.after_backward()

    def invalidate(self) -> None:
        """Cast again at the next use."""
        if self._reuse is not None:
            self._reuse.forget()
        for part in self.parts():
            part.invalidate()

    def held(self) -> Operand:
        """The forms held right now, without those of its parts; casts nothing."""
        waiting = None if self._waiting is None else self._waiting()
        held = self._reuse.held if self._reuse is not None else waiting and waiting.operand
        return held or Operand(None, None)

    def nbytes(self) -> int:
        """Bytes of the FP8 forms held right now, those of its parts included."""
        return sum(cache.held().nbytes() for cache in (self, *self.parts()))

    def parts(self) -> tuple[FP8Cache, ...]:
        """The caches of casts of its parts, or with other scales, that were asked for."""
        others = () if self.in_whole is None else (self.in_whole,)
        return (*self._parts.values(), *others)

    def version(self) -> int:
        """The count of writes to the master; inference tensors have none."""
        return 0 if self.counted.is_inference() else self.counted._version

    def _cast(self, rowwise: bool = True, columnwise: bool = False) -> Operand:
        self.casts += 1
        if not columnwise:
            return Operand(quantize_rowwise(self.master, self.format), None)
        if not rowwise:
            return Operand(None, quantize_transpose(self.master, self.format))
        return Operand(*quantize_with_transpose(self.master, self.format))
