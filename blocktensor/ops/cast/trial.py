"""A trial of the casts in Gluon, for a Triton that they were not tested with."""

from __future__ import annotations

import torch

from .. import reference
from ..formats import BLOCKS_1X128, BLOCKS_128X128
from ..runtime.triton_compat.versions import tried


@tried
def casts_fail(device: torch.device) -> str | None:
    """Return how casts in Gluon differ from the reference; None if not a byte does."""
    from . import gluon_128x128, gluon_columnwise

    x = torch.linspace(-3, 3, 304 * 384).view(304, 384).bfloat16()
    on_gpu = x.to(device)
    made = (
        *gluon_columnwise.quantize_both(on_gpu, BLOCKS_1X128),
        *gluon_columnwise.quantize_both(on_gpu, BLOCKS_1X128, BLOCKS_128X128),
        *gluon_128x128.quantize_with_transpose(on_gpu, BLOCKS_128X128),
        gluon_128x128.quantize_rowwise(on_gpu, BLOCKS_128X128),
    )
    wanted = (
        *reference.quantize_both(x, BLOCKS_1X128),
        *reference.quantize_both(x, BLOCKS_1X128, BLOCKS_128X128),
        *reference.quantize_with_transpose(x, BLOCKS_128X128),
        reference.quantize_rowwise(x, BLOCKS_128X128),
    )
    same = all(
        torch.equal(a.data.view(torch.uint8).cpu(), b.data.view(torch.uint8))
        and torch.equal(a.scale.cpu(), b.scale)
        for a, b in zip(made, wanted, strict=True)
    )
    return None if same else "casts differ from the reference"
