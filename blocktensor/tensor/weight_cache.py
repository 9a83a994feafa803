"""Decide when a trainable weight is cast to FP8, and how long its FP8 form is kept.

PyTorch does not count writes to a master through ``.data`` of a view, or by a collective on a view.
So every forward casts, and its graph holds the form that dgrad reads (:class:`ForwardCast`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops.cast.ops import quantize_rowwise, quantize_transpose, quantize_with_transpose
from ..recipe import Recipe
from .base import MasterBase, interned
from .operand import Operand

ONE_READ_BYTES = 64 << 20
"""Most bytes of a form that a forward casts with its transpose: both exist during fprop. Larger
weights make the second form in backward, so that the peak memory of a single layer does not
grow."""


@dataclass(eq=False)
class WaitingForm:
    """The FP8 form of a weight's latest forward, for all backwards that need it.

    Autograd graphs hold it: it is freed with the last graph, used or not.

    Attributes:
        operand: the forms in the orientation of the master; None until they are cast.
    """

    operand: Operand | None = None


@dataclass(eq=False)
class ForwardCast:
    """The part of a forward's cast that its graph holds.

    Attributes:
        cache: that made it.
        version: the version of the master at the cast.
        waiting: the form; None if backward casts again, and after a backward has read it.
    """

    cache: FP8Cache
    version: int
    waiting: WaitingForm | None


class FP8Cache:
    """The casts of one master, and the FP8 form that waits for a backward.

    Forwards whose backwards have not run share the form of the latest one. After a counted write
    between two forwards, backward raises, as in plain PyTorch. After an uncounted write, plain
    PyTorch would use the new values as well.

    Attributes:
        master: the high-precision weight.
        counted: the tensor whose version counter counts writes to the master: the master itself, or
            the master of the weight that this is a part of.
        recipe, format: the recipe and format of its casts.
        kinds: the ``kind`` of a weight with this cache, and of its transpose.
        casts: the number of casts so far.
    """

    __slots__ = (
        "_copies",
        "_parts",
        "_waiting",
        "casts",
        "counted",
        "format",
        "kinds",
        "master",
        "recipe",
    )

    def __init__(self, master: Tensor, recipe: Recipe, counted: Tensor | None = None) -> None:
        self.master = master
        self.counted = master if counted is None else counted
        self.recipe, self.format = recipe, recipe.weight_format
        self.kinds = interned(type(self), recipe), interned(type(self), recipe, "transposed")
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

        It casts only that matrix: a loop over experts casts each expert that gets tokens, once.
        """
        return self.derived(
            index, lambda: FP8Cache(self.master[index], self.recipe, counted=self.counted)
        )

    def derived(self, key: object, make: Callable[[], FP8Cache]) -> FP8Cache:
        """Return the cache for a part of the master or for other scales; create it if needed."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def parts(self) -> tuple[FP8Cache, ...]:
        """Return the derived caches that exist."""
        return tuple(self._parts.values())

    def remember(self, copy: Any) -> None:
        """Register a ``LateCopy`` to be made before the next write to the weight."""
        if self._copies is None:
            self._copies = weakref.WeakSet()
        self._copies.add(copy)

    def _before_write(self) -> None:
        """Make all late copies of the values, which a write through the weight will change."""
        for copy in tuple(self._copies or ()):
            copy.values()
        self._copies = None

    def get_for_backward(self, user: MasterBase) -> tuple[Operand, ForwardCast]:
        """Cast for a forward whose backward needs dgrad; return also what its graph holds.

        The cast makes both forms, unless the weight is large (``ONE_READ_BYTES``); the graph holds
        the form that dgrad reads.
        """
        if not self.recipe.cache_weight:
            return self.cast(), ForwardCast(self, self.version(), None)
        cast, waiting = self.begin_cast()
        row, col = self.cast(columnwise=self.master.numel() <= ONE_READ_BYTES)
        in_rows = col is None or user.transposed
        waiting.operand = Operand(row, None) if in_rows else Operand(None, col)
        return Operand(row, col), cast

    def begin_cast(self) -> tuple[ForwardCast, WaitingForm]:
        """Return the object for a graph to hold, which the forward fills with its cast."""
        waiting = None if self._waiting is None else self._waiting()
        if waiting is None:
            waiting = WaitingForm()
            self._waiting = weakref.ref(waiting)
        return ForwardCast(self, self.version(), waiting), waiting

    def get_in_backward(self, user: MasterBase, cast: ForwardCast | None) -> Operand:
        """Return the FP8 form that dgrad reads: the form of its forward, or a new cast.

        Raises:
            RuntimeError: the master was written to since the forward. Autograd compares the counter
                of the weight. This compares the counter of the master, which also counts writes to
                a tensor of ``state_dict()``, for example.
        """
        if cast is not None and cast.cache is not self:
            # after weight.data = … or .half(); plain F.linear would also have saved the old values
            return cast.cache.get_in_backward(user, cast)
        if cast is not None:
            self._check_version(cast)
            if cast.waiting and cast.waiting.operand:
                return cast.waiting.operand
        return self.cast(rowwise=user.transposed, columnwise=not user.transposed)

    def master_in_backward(self, cast: ForwardCast) -> Tensor:
        """Return the master that a forward has cast, for a dgrad in high precision.

        Raises:
            RuntimeError: as :meth:`get_in_backward`.
        """
        cast.cache._check_version(cast)
        return cast.cache.master

    def _check_version(self, cast: ForwardCast) -> None:
        now = self.version()
        if now != cast.version:
            raise RuntimeError(
                f"the FP8 weight {list(self.master.shape)} was modified by an in-place operation "
                f"between a forward and its backward, whose data gradient needs it: it is at "
                f"version {now}; expected version {cast.version}. Run backward before the weight "
                f"changes, or forward again after"
            )

    def held(self) -> Operand:
        """Return the forms held right now, without the forms of its parts; cast nothing."""
        waiting = None if self._waiting is None else self._waiting()
        return (waiting and waiting.operand) or Operand(None, None)

    def nbytes(self) -> int:
        """Return the bytes of the FP8 forms held right now, including its parts."""
        return sum(cache.held().nbytes() for cache in (self, *self.parts()))

    def version(self) -> int:
        """Return the count of writes to the master; inference tensors have none."""
        return 0 if self.counted.is_inference() else self.counted._version

    def cast(self, rowwise: bool = True, columnwise: bool = False) -> Operand:
        """Cast the current master, with ``columnwise`` to both forms in one read; hold neither.

        The columnwise form may be absent for a part of a weight that ranks cast together.
        """
        self.casts += 1
        if not columnwise:
            return Operand(quantize_rowwise(self.master, self.format), None)
        if not rowwise:
            return Operand(None, quantize_transpose(self.master, self.format))
        return Operand(*quantize_with_transpose(self.master, self.format))
