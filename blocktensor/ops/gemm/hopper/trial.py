"""A trial of the Hopper GEMM, for a Triton that it was not tested with."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ...formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from ...runtime.triton_compat.versions import tried
from .tiles import TILES

TOLERANCE = 4e-3
"""The largest relative error against the reference, in bf16: sums of fp32 in another order."""


@tried
def gemms_fail(device: torch.device) -> str | None:
    """Return which tile of the Hopper GEMM is wrong, stored or added; None if all are right."""
    from .launch import for_tma, gemm, plan_gemm

    x = torch.linspace(-3, 3, 304 * 512).view(304, 512).bfloat16()
    w = torch.linspace(2, -1, 400 * 512).view(400, 512).bfloat16()
    a = reference.quantize_rowwise(x, BLOCKS_1X128)
    for format in (BLOCKS_128X128, BLOCKS_1X128):
        b = reference.quantize_rowwise(w, format)
        wanted = reference.gemm(a, b, None, torch.float32)
        operands = for_tma(on(device, a)), for_tma(on(device, b))
        for name, tile in TILES.items():
            if tile.b_block != format.rows:
                continue
            for add in (False, True):
                out = torch.ones(304, 400, dtype=torch.float32, device=device)
                plan_gemm(*operands, None, out, add, tile)()
                if differ(out, wanted + 1 if add else wanted):
                    return f"GEMMs by the tile {name!r} differ from the reference"
        if differ(gemm(*operands, None, torch.bfloat16), wanted):
            return f"GEMMs of {format.name} blocks differ from the reference"
    return None


def on(device: torch.device, x: Quantized) -> Quantized:
    """Copy a cast to a device."""
    return Quantized(x.data.to(device), x.scale.to(device), x.format)


def differ(made: Tensor, wanted: Tensor) -> bool:
    """Return True if a product is NaN, or farther from the reference than another order."""
    error = (made.cpu().float() - wanted.float()).norm() / wanted.float().norm()
    return not error.item() <= TOLERANCE
