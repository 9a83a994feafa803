"""Between forward and backward: gate and up of a gated MLP, as they are or cast to FP8."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.formats import Quantized
from .gated_plan import GatedPlan

Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Data and scales of gate and of up: no scales in high precision, None of what does not exist."""


def save(plan: GatedPlan, gate: Tensor, up: Tensor | None) -> Saved:
    """What backward needs to know of gate and up, ``[T, I]``."""
    if not plan.needs_dh:
        return None, None, None, None
    if not plan.store_fp8:
        return gate, None, up, None
    of_gate = quantize_rowwise(gate, plan.gate.format)
    of_up = (None, None) if up is None else quantize_rowwise(up, plan.gate.format)[:2]
    return of_gate.data, of_gate.scale, of_up[0], of_up[1]


def read(plan: GatedPlan, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Gate and up of what :func:`save` returned, in high precision."""
    return _read(plan, *saved[:2]), _read(plan, *saved[2:])


def _read(plan: GatedPlan, data: Tensor | None, scale: Tensor | None) -> Tensor | None:
    if data is None or scale is None:
        return data
    return dequantize(Quantized(data, scale, plan.gate.format), plan.gate.out_dtype)
