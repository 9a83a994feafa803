"""Between forward and backward: gate and up of a gated MLP, as they are or cast to FP8."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.formats import Quantized
from .gated_plan import GatedPlan


def save(plan: GatedPlan, sources: list[Tensor | None]) -> Iterator[Tensor | None]:
    """What backward needs to know of gate and up, ``[T, I]``: data and scales of each.

    No scales in high precision; None for what does not exist or will not be read. ``sources`` are
    gate and up; each is removed before the next is cast.
    """
    while sources:
        x = sources.pop(0)
        if x is None or not plan.needs_dh:
            yield from (None, None)
        elif not plan.store_fp8:
            yield from (x, None)
        else:
            cast = quantize_rowwise(x, plan.gate.format)
            del x
            yield from cast[:2]


def read(plan: GatedPlan, data: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """One of both in high precision, of what :func:`save` made of it."""
    if not plan.store_fp8 or data is None:
        return data
    assert scale is not None
    return dequantize(Quantized(data, scale, plan.gate.format), plan.gate.out_dtype)
