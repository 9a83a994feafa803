"""A trial of the Hopper GEMM, for a Triton that it was not tested with."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ...formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from ...runtime.triton_compat.versions import tried
from .launch import gemm

TOLERANCE = 4e-3
"""The largest relative error against the reference, in bf16: sums of fp32 in another order."""


@tried
def gemms_fail(device: torch.device) -> str | None:
    """Return how the Hopper GEMM is wrong, with B in blocks of either kind; None if it is right."""
    x = torch.linspace(-3, 3, 304 * 400).view(304, 400).bfloat16()
    w = torch.linspace(2, -1, 272 * 400).view(272, 400).bfloat16()
    a = reference.quantize_rowwise(x, BLOCKS_1X128)
    for format in (BLOCKS_128X128, BLOCKS_1X128):
        b = reference.quantize_rowwise(w, format)
        made = gemm(on(device, a), on(device, b), None, torch.bfloat16)
        if differ(made, reference.gemm(a, b, None, torch.bfloat16)):
            return f"GEMMs of {format.name} blocks differ from the reference"
    return None


def on(device: torch.device, x: Quantized) -> Quantized:
    """A cast on another device."""
    return Quantized(x.data.to(device), x.scale.to(device), x.format)


def differ(made: Tensor, wanted: Tensor) -> bool:
    """True if a product is NaN, or farther from the reference than the order of sums explains."""
    error = (made.cpu().float() - wanted.float()).norm() / wanted.float().norm()
    return not error.item() <= TOLERANCE
