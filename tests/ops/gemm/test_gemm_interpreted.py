"""The portable GEMM, interpreted on the CPU, agrees with the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from tests.support import gemms
from tests.support.gemms import Blocks, Shape
from tests.support.interpreter import interpreted
from tests.support.numeric import DTYPES

BLOCKS = [(1, 128), (1, 1), (128, 1), (128, 128)]
every_blocks = pytest.mark.parametrize("blocks", BLOCKS, ids=str)
# ragged in each of M, N and K; a small M, with tiles of its own; several groups of tiles in L2
SHAPES = [(130, 129, 300), (3, 1, 5), (64, 272, 128), (1160, 130, 16), (5, 3, 0)]


@every_blocks
@interpreted
def test_shapes(blocks: Blocks) -> None:
    from blocktensor.ops.gemm import triton_gemm

    rng = Generator().manual_seed(0)
    for i, shape in enumerate(SHAPES):
        dtype, bias = DTYPES[i % 3], (None, torch.float32, torch.bfloat16)[i % 3]
        gemms.check_shape(triton_gemm, Shape(*shape), blocks, rng, dtype, bias)


CHECKS = (
    gemms.check_promotion,
    gemms.check_scales_per_block,
    gemms.check_bad_blocks,
    gemms.check_views,
)


@pytest.mark.parametrize("check", CHECKS)
@every_blocks
@interpreted
def test_contract(blocks: Blocks, check: gemms.Check) -> None:
    from blocktensor.ops.gemm import triton_gemm

    check(triton_gemm, blocks, Generator().manual_seed(0))
