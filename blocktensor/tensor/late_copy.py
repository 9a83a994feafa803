"""Delay the copy of ``weight.to(dtype)``: matmuls read the weight's FP8 form, other ops the copy.

Training code with fp32 masters calls ``F.linear(x, w.bfloat16())``. A 16-bit copy would be written
and read in vain, and its cast to FP8 would round a second time. Copies outside of layers that no
graph records are made at once: they may be kept as snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.runtime.specialize import PLAIN
from .torch_internals.callers import layer_runs
from .weight_cache import FP8Cache

Cut = Callable[[Tensor], Tensor]
"""A function that takes a view of a master."""


def is_read_at_once(weight: Tensor) -> bool:
    """Return True if a copy in another dtype, outside of traced graphs, may share the FP8 form.

    Matmuls of a layer, or of a recorded graph, read the copy before the weight changes. Any other
    copy may be kept, as a snapshot, and must not see writes to the weight, of which PyTorch counts
    only some.
    """
    return (torch.is_grad_enabled() and weight.requires_grad) or layer_runs()


class LateCopy:
    """A weight's values in another dtype, in place of its cache.

    It has the values at the time of ``weight.to``. They are copied when an op other than a matmul
    reads them, and before a write through the weight. Matmuls read the weight's FP8 form until one
    of both is written to, or until the copy's memory is handed out, so that writes to it might not
    be seen; from then on, they cast the copy.

    Attributes:
        source: the cache of the weight.
        dtype: the dtype of the copy.
        offset: where the copy begins in its memory, which is laid out as the weight's.
    """

    def __init__(
        self,
        source: FP8Cache,
        dtype: torch.dtype,
        whole: LateCopy | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Prepare a copy of ``source``, or the part that ``cut`` takes of the copy ``whole``."""
        self.source, self.dtype = source, dtype
        place: Any = source.master.storage_offset()
        self._begin: Any = place if whole is None else whole._begin
        self.offset: Any = place - self._begin
        self._version = source.version()
        self._copy: Tensor | None = None
        self._own: FP8Cache | None = None
        self._whole, self._cut = whole, cut
        self._parts: dict[int, LateCopy] = {}
        if type(source.master) not in PLAIN:
            self.values()  # in a traced graph; the compiler drops it if nothing reads it
        elif whole is None:
            source.remember(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FP8Cache, (self.own().master, self.source.recipe)

    def values(self) -> Tensor:
        """Return the copy, for ops that only read it.

        Raises:
            RuntimeError: the weight has changed in a way that did not trigger the copy.
        """
        if self._copy is None:
            if self._whole is not None and self._cut is not None:
                self._copy = self._cut(self._whole.values())
            else:
                master, now = self.source.master, self.source.version()
                if now != self._version:
                    raise RuntimeError(
                        f"the FP8 weight {list(master.shape)} was changed (it is at version {now}) "
                        f"after .to({self.dtype}) at version {self._version} and before the values "
                        f"of that were read: call .to({self.dtype}).detach(), which copies them at "
                        f"once"
                    )
                with torch.inference_mode(master.is_inference()), torch.no_grad():
                    self._copy = master.to(self.dtype)
        return self._copy

    def own(self) -> FP8Cache:
        """Return the cache of the copy, whose memory is handed out; matmuls cast it from now on."""
        if self._own is None:
            counted = None if self._whole is None else self._whole.own().counted
            self._own = FP8Cache(self.values(), self.source.recipe, counted=counted)
        return self._own

    def read(self) -> FP8Cache:
        """Return the cache that matmuls read."""
        is_handed_out = self._own is not None
        if self._whole is not None:
            is_handed_out |= self._whole.read() is not self._whole.source
        if is_handed_out or self.source.version() != self._version:
            return self.own()
        return self.source

    def part(self, index: int) -> LateCopy:
        """Return the late copy of one matrix of a stack."""
        if index not in self._parts:
            source = self.source.part(index)
            self._parts[index] = LateCopy(source, self.dtype, self, lambda copy: copy[index])
        return self._parts[index]
