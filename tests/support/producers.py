"""What tests of producers share."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from blocktensor.ops import formats
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128, BlockFormat
from tests.support.numeric import values

Formats = tuple[BlockFormat | None, BlockFormat | None]
FORMATS: tuple[Formats, ...] = (
    (BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_128X128),
    (None, BLOCKS_1X128),
    (None, BLOCKS_128X128),
    (BLOCKS_1X128, None),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2),
    (BLOCKS_1X128_POW2, formats.BLOCKS_128X128_POW2),
)
SIZES = (0, 1, 127, 128, 129, 130, 136, 256, 300, 512, 576, 1096, 10944)


def three(
    rows: int,
    cols: int,
    dtype: torch.dtype = torch.bfloat16,
    kinds: tuple[str, str, str] = ("normal", "normal", "normal"),
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, gate and up; which of them has values of the first kind, seeds decide."""
    rng, turn = Generator().manual_seed(seed), seed % 3
    made = [values(kind, rows, cols, dtype, rng).to(device) for kind in kinds]
    grad, gate, up = made[turn:] + made[:turn]
    return grad, gate, up
