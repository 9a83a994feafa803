"""A trial of the grouped Hopper GEMM, for a Triton that it was not tested with."""

from __future__ import annotations

import torch

from .. import reference
from ..formats import BLOCKS_1X128, BLOCKS_128X128
from ..gemm.hopper.trial import differ, on
from ..runtime.triton_compat.versions import tried


@tried
def grouped_gemms_fail(device: torch.device) -> str | None:
    """Return how the grouped Hopper GEMM is wrong, forward or wgrad; None if it is right."""
    from . import hopper_launch

    x = torch.linspace(-3, 3, 304 * 400).view(304, 400).bfloat16()
    w = torch.linspace(2, -1, 3 * 272 * 400).view(3, 272, 400).bfloat16()
    ends = torch.tensor([100, 100, 290], dtype=torch.int32)
    offs, dtype = ends.to(device), torch.bfloat16
    a = reference.quantize_rowwise(x, BLOCKS_1X128)
    b = reference.quantize_rowwise(w, BLOCKS_128X128)
    made = hopper_launch.grouped_gemm(on(device, a), on(device, b), offs, None, dtype)
    if differ(made, reference.grouped_gemm(a, b, ends, None, dtype)):
        return "grouped GEMMs differ from the reference"
    for format in (BLOCKS_1X128, BLOCKS_128X128):
        g = reference.quantize_grouped_columnwise(x, ends, BLOCKS_1X128)
        c = reference.quantize_grouped_columnwise(x, ends, format)
        wanted = reference.grouped_gemm_wgrad(g, c, ends, len(x), torch.float32)
        operands = on(device, g), on(device, c), offs, len(x)
        made = hopper_launch.grouped_gemm_wgrad(*operands, dtype)
        added = torch.ones(wanted.shape, device=device)
        hopper_launch.grouped_gemm_wgrad_add_(added, *operands)
        if differ(made, wanted) or differ(added, wanted + 1):
            return "grouped weight gradients differ from the reference"
    return None
