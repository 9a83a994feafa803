"""ColwiseParallel and RowwiseParallel compute what one process does, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from tests.support.numeric import assert_same
from tests.support.parallel_linears import (
    converted,
    drawn,
    step,
    summed_dbias,
    summed_dgrad,
    summed_fprop,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of

N, K = 512, 256

SHAPES = [(256, 0), (300, 0), (2, 256, 1), (2, 150, 1), (256, 2, 0), (3, 2, 128, 1)]
"""Leading dimensions of the tokens, and the one that is cut."""

CASES = list(itertools.product([torch.float32, torch.bfloat16], [False, True], [False, True]))
"""dtype, bias, sequence parallel"""


def mine(x: Tensor, world: int, dim: int) -> Tensor:
    """This rank's part."""
    return x.chunk(world, dim=dim)[dist.get_rank()].contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks(2)
def test_outputs_are_cut(world: int, device: str, shape: tuple[int, ...]) -> None:
    *lead, dim = shape
    for dtype, bias, sequence in CASES:
        x, grad = drawn((*lead, K), dtype, 1), drawn((*lead, N), dtype, 2)
        want = step(converted(N, K, bias, dtype), x, grad)
        style = ColwiseParallel(
            input_layouts=Shard(dim) if sequence else Replicate(), in_rank_order=True
        )
        module = parallelize_module(converted(N, K, bias, dtype), mesh_of(world, device), style)
        got = step(module, mine(x, world, dim) if sequence else x, mine(grad, world, -1))
        assert got.y.any(), (dtype, bias, sequence)
        assert_same(got.y, mine(want.y, world, -1))
        assert_same(got.dw, mine(want.dw, world, 0))
        dx = summed_dgrad(converted(N, K, bias, dtype), grad, world)
        assert_same(got.dx, mine(dx, world, dim) if sequence else dx)
        if bias:
            assert got.dbias is not None and want.dbias is not None
            assert_same(got.dbias, mine(want.dbias, world, 0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks(2)
def test_inputs_are_cut(world: int, device: str, shape: tuple[int, ...]) -> None:
    *lead, dim = shape
    for dtype, bias, sequence in CASES:
        x, grad = drawn((*lead, N), dtype, 1), drawn((*lead, K), dtype, 2)
        want = step(converted(K, N, bias, dtype), x, grad)
        style = RowwiseParallel(
            output_layouts=Shard(dim) if sequence else Replicate(), in_rank_order=True
        )
        module = parallelize_module(converted(K, N, bias, dtype), mesh_of(world, device), style)
        got = step(module, mine(x, world, -1), mine(grad, world, dim) if sequence else grad)
        y = summed_fprop(converted(K, N, bias, dtype), x, world)
        assert_same(got.y, mine(y, world, dim) if sequence else y)
        assert_same(got.dx, mine(want.dx, world, -1))
        assert_same(got.dw, mine(want.dw, world, 1))
        if bias:
            assert got.dbias is not None and want.dbias is not None
            assert_same(got.dbias, summed_dbias(grad, dim, world) if sequence else want.dbias)
