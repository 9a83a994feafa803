"""The FP8 form of a trainable weight: when it is cast, how long it is kept.

PyTorch does not count every write to a master: not those through ``.data`` of a view, and not those
of a collective on one. So every forward casts, and its graph holds the form that dgrad reads
(:class:`ForwardCast`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops.cast.ops import quantize_rowwise, quantize_transpose, quantize_with_transpose
from ..recipe import Recipe
from .base import MasterBase
from .operand import Operand

ONE_READ_BYTES = 64 << 20
"""Most bytes of a form that a forward casts with its transpose: both are there during fprop. The
forms of larger weights are made one by one, the second in backward, so that the peak of a single
layer does not grow."""


@dataclass(eq=False)
class WaitingForm:
    """The FP8 form of a weight's latest forward, for all backwards that wait.

    Autograd graphs hold it: a graph that is freed, by its backward or unused, frees it too.

    Attributes:
        operand: in the orientation of the master; None until it is cast.
    """

    operand: Operand | None = None


@dataclass(eq=False)
class ForwardCast:
    """The part of a forward's cast that its graph holds.

    Attributes:
        cache: that made it.
        version: of the master then.
        waiting: the form; None where backward casts again, and once a backward has read it.
    """

    cache: FP8Cache
    version: int
    waiting: WaitingForm | None


class FP8Cache:
    """The casts of one master, and the FP8 form that waits for a backward.

    Forwards that wait for their backwards share one form, of the latest: a counted write between
    the two raises in backward, as in plain PyTorch, and after an uncounted one plain PyTorch would
    use the new values as well.

    Attributes:
        master: the high-precision weight.
        counted: the tensor whose version counter counts writes to the master: the master itself, or
            that of the weight of which this is a part.
        recipe, format: of its casts.
        casts: how many were made so far.
    """

    __slots__ = ("_copies", "_parts", "_waiting", "casts", "counted", "format", "master", "recipe")

    def __init__(self, master: Tensor, recipe: Recipe, counted: Tensor | None = None) -> None:
        self.master = master
        self.counted = master if counted is None else counted
        self.recipe, self.format = recipe, recipe.weight_format
        self.casts = 0
        self._waiting: weakref.ref[WaitingForm] | None = None
        self._parts: dict[object, FP8Cache] = {}
        self._copies: weakref.WeakSet[Any] | None = None

    def __getstate__(self) -> tuple[Any, ...]:  # copies and checkpoints cast for themselves
        return self.master, self.recipe

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def part(self, index: int) -> FP8Cache:
        """Return the cache of one matrix of a stack, which all views of that matrix share.

        It casts that matrix alone: a loop over experts casts those that get tokens, once each.
        """
        return self.derived(
            index, lambda: FP8Cache(self.master[index], self.recipe, counted=self.counted)
        )

    def derived(self, key: object, make: Callable[[], FP8Cache]) -> FP8Cache:
        """Return the cache for a part of the master or for other scales, made where it is new."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def parts(self) -> tuple[FP8Cache, ...]:
        """Return the derived caches that were asked for."""
        return tuple(self._parts.values())

    def remember(self, copy: Any) -> None:
        """Let a ``LateCopy`` be made before the next write to the weight."""
        if self._copies is None:
            self._copies = weakref.WeakSet()
        self._copies.add(copy)

    def _before_write(self) -> None:
        """Make the copies of the values that a write through the weight will change."""
        for copy in tuple(self._copies or ()):
            copy.values()
        self._copies = None

    def get_for_backward(self, user: MasterBase) -> tuple[Operand, ForwardCast]:
        """Cast for a forward whose dgrad reads the weight; return also what its graph holds.

        The cast makes both forms, unless the weight is large (``ONE_READ_BYTES``); the graph holds
        the one that dgrad reads.
        """
        if not self.recipe.cache_weight:
            return self.cast(), ForwardCast(self, self.version(), None)
        cast, waiting = self.begin_cast()
        row, col = self.cast(columnwise=self.master.numel() <= ONE_READ_BYTES)
        in_rows = col is None or user.transposed
        waiting.operand = Operand(row, None) if in_rows else Operand(None, col)
        return Operand(row, col), cast

    def begin_cast(self) -> tuple[ForwardCast, WaitingForm]:
        """Return what a graph holds of a cast that its forward makes now, to be filled with it."""
        waiting = None if self._waiting is None else self._waiting()
        if waiting is None:
            waiting = WaitingForm()
            self._waiting = weakref.ref(waiting)
        return ForwardCast(self, self.version(), waiting), waiting

    def get_in_backward(self, user: MasterBase, cast: ForwardCast | None) -> Operand:
        """Return the FP8 form that dgrad reads: of its forward where it waits, or cast again.

        Raises:
            RuntimeError: the master was written to since the forward. Autograd compares the counter
                of the weight; this compares the master's, which counts writes to a tensor of
                ``state_dict()``, for example.
        """
        if cast is not None and cast.cache is not self:
            # after weight.data = … or .half(); F.linear of plain PyTorch has saved old values too
            return cast.cache.get_in_backward(user, cast)
        if cast is not None:
            now = self.version()
            if now != cast.version:
                raise RuntimeError(
                    f"the FP8 weight {list(self.master.shape)} was modified by an in-place "
                    f"operation between a forward and its backward, whose data gradient needs it: "
                    f"it is at version {now}; expected version {cast.version}. Run backward before "
                    f"the weight changes, or forward again after"
                )
            if cast.waiting and cast.waiting.operand:
                return cast.waiting.operand
        return self.cast(rowwise=user.transposed, columnwise=not user.transposed)

    def held(self) -> Operand:
        """Return the forms held right now, without those of its parts; cast nothing."""
        waiting = None if self._waiting is None else self._waiting()
        return (waiting and waiting.operand) or Operand(None, None)

    def nbytes(self) -> int:
        """Return the bytes of the FP8 forms held right now, those of its parts included."""
        return sum(cache.held().nbytes() for cache in (self, *self.parts()))

    def version(self) -> int:
        """Return the count of writes to the master; inference tensors have none."""
        return 0 if self.counted.is_inference() else self.counted._version

    def cast(self, rowwise: bool = True, columnwise: bool = False) -> Operand:
        """Cast the master as it is now, to both forms in one read; neither is held.

        Of a part of a whole, whose ranks cast it together, the columnwise form may be absent.
        """
        self.casts += 1
        if not columnwise:
            return Operand(quantize_rowwise(self.master, self.format), None)
        if not rowwise:
            return Operand(None, quantize_transpose(self.master, self.format))
        return Operand(*quantize_with_transpose(self.master, self.format))
