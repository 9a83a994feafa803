"""``weight.to(dtype)``: products read the FP8 form of the weight, other ops a copy made late.

Training code with fp32 masters calls ``F.linear(x, w.bfloat16())``. A copy in 16 bits would be
written and read for nothing, and its cast to FP8 would round a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.runtime.specialize import PLAIN
from .base import MasterBase
from .operand import Operand
from .weight_cache import ForwardCast, FP8Cache

Cut = Callable[[Tensor], Tensor]
"""Takes a view of a master."""


class LateCopy(FP8Cache):
    """The cache of a weight's values in another dtype.

    It has the values of the moment at which it was asked for. They are copied when an op that is
    no product reads them, and before a write through the weight. Products read the weight's FP8
    form until either is written to, or the copy's memory is handed out, so that writes to it might
    not be seen; from then on, they cast the copy.

    Attributes:
        source: the cache of the weight.
        dtype: of the copy.
    """

    __slots__ = ("__weakref__", "_copy", "_cut", "_own", "_version", "_whole", "dtype", "source")

    def __init__(
        self,
        source: FP8Cache,
        dtype: torch.dtype,
        whole: LateCopy | None = None,
        cut: Cut | None = None,
    ) -> None:
        """A copy of ``source``; ``whole``, ``cut``: of which copy it is a part, and which."""
        self.source, self.dtype = source, dtype
        self.recipe, self.format = source.recipe, source.format
        self.casts, self.main_grad = 0, source.main_grad if whole is None else None
        self._parts, self._copies, self.in_whole = {}, None, None
        self._version = source.version()
        self._copy: Tensor | None = None
        self._own: FP8Cache | None = None
        self._whole, self._cut = whole, cut
        if type(source.master) not in PLAIN:
            self.values()  # in the graph that a compiler traces; it drops what nothing reads
        elif whole is None:
            source.remember(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FP8Cache, (self.own().master, self.recipe)

    def values(self) -> Tensor:
        """The copy, for ops that only read it.

        Raises:
            RuntimeError: the weight has changed, in a way that did not copy the values before.
        """
        if self._copy is None:
            if self._whole is not None and self._cut is not None:
                self._copy = self._cut(self._whole.values())
            else:
                self._check_version()
                master = self.source.master
                with torch.inference_mode(master.is_inference()), torch.no_grad():
                    self._copy = master.to(self.dtype)
        return self._copy

    def _check_version(self) -> None:
        now = self.source.version()
        if now != self._version:
            raise RuntimeError(
                f"the FP8 weight {list(self.source.master.shape)} was changed (it is at version "
                f"{now}) after .to({self.dtype}) at version {self._version} and before the values "
                f"of that were read: call .to({self.dtype}).detach(), which copies them at once"
            )

    def own(self) -> FP8Cache:
        """The cache of the copy, whose memory is handed out; products cast it from now on."""
        if self._own is None:
            counted = None if self._whole is None else self._whole.own().counted
            self._own = FP8Cache(self.values(), self.recipe, counted=counted)
        return self._own

    def _read(self) -> FP8Cache:
        """The cache that products read."""
        is_handed_out = self._own is not None
        if self._whole is not None:
            is_handed_out |= self._whole._read() is not self._whole.source
        if is_handed_out or self.source.version() != self._version:
            return self.own()
        return self.source

    # What FP8Cache keeps in memory of its own:

    @property
    def master(self) -> Tensor:  # type: ignore[override]
        """The copy."""
        return self.own().master

    @property
    def counted(self) -> Tensor:  # type: ignore[override]
        """The tensor that counts writes to what products read."""
        return self._read().counted

    @property
    def cast_from(self) -> Tensor:
        """The tensor that casts read."""
        return self._read().cast_from

    def version(self) -> int:
        """The count of writes to what products read."""
        return self._read().version()

    def part(self, index: int) -> FP8Cache:
        """The copy of one matrix of a stack, which reads the FP8 form of that matrix."""
        found = self._parts.get(index)
        if found is None:
            found = LateCopy(self.source.part(index), self.dtype, self, lambda copy: copy[index])
            self._parts[index] = found
        return found

    def before_write(self) -> None:
        """A write to the copy follows."""
        self.own().before_write()

    def get(self, user: MasterBase, before_backward: bool = False) -> Operand:
        """As of the weight."""
        return self._read().get(user, before_backward)

    def reuses(self) -> bool:
        """As of the weight."""
        return self._read().reuses()

    def cast_both(self) -> Operand:
        """As of the weight."""
        return self._read().cast_both()

    def get_for_backward(self, user: MasterBase) -> tuple[Operand, ForwardCast]:
        """As of the weight."""
        return self._read().get_for_backward(user)

    def get_in_backward(self, user: MasterBase, cast: ForwardCast | None) -> Operand:
        """The FP8 form that dgrad reads, of the cache that forward has read."""
        cache = self._read() if cast is None else cast.cache
        return cache.get_in_backward(user, cast)

    def columnwise(self, operand: Operand, cast: ForwardCast | None = None) -> Any:
        """As of the weight."""
        return self._read().columnwise(operand, cast)

    def after_backward(self) -> None:
        """As of the weight."""
        self._read().after_backward()

    def invalidate(self) -> None:
        """As of the weight."""
        self._read().invalidate()

    def held(self) -> Operand:
        """Those of the weight belong to it; those of the copy."""
        return Operand(None, None) if self._own is None else self._own.held()
