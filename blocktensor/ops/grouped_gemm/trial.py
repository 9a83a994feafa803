"""A trial of the grouped Hopper GEMM, for a Triton that it was not tested with."""

from __future__ import annotations

import torch

from .. import reference
from ..formats import BLOCKS_1X128, BLOCKS_128X128
from ..gemm.hopper.trial import differ, on
from ..runtime.triton_compat.versions import tried
from .hopper_launch import grouped_gemm, grouped_gemm_wgrad


@tried
def grouped_gemms_fail(device: torch.device) -> str | None:
    """Return how the grouped Hopper GEMM is wrong, forward or wgrad; None if it is right."""
    x = torch.linspace(-3, 3, 304 * 400).view(304, 400).bfloat16()
    w = torch.linspace(2, -1, 3 * 272 * 400).view(3, 272, 400).bfloat16()
    ends = torch.tensor([100, 100, 290], dtype=torch.int32)
    offs, dtype = ends.to(device), torch.bfloat16
    a = reference.quantize_rowwise(x, BLOCKS_1X128)
    b = reference.quantize_rowwise(w, BLOCKS_128X128)
    made = grouped_gemm(on(device, a), on(device, b), offs, None, dtype)
    if differ(made, reference.grouped_gemm(a, b, ends, None, dtype)):
        return "grouped GEMMs differ from the reference"
    c = reference.quantize_grouped_columnwise(x, ends, None, BLOCKS_1X128)
    made = grouped_gemm_wgrad(on(device, c), on(device, c), offs, len(x), dtype)
    if differ(made, reference.grouped_gemm_wgrad(c, c, ends, len(x), dtype)):
        return "grouped weight gradients differ from the reference"
    return None
