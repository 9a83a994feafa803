"""The benchmark of tensor parallel blocks, on ranks of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip("rich")

from benchmarks import profiled, tensor_parallel
from blocktensor import BlockwiseFP8Weight
from tests.support.benchmark_workers import calls_of
from tests.support.ranks import on_ranks, shared_mesh


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def casts_of(block: nn.Module) -> list[int]:
    weights = map(local, block.parameters())
    return [w.cache.casts for w in weights if isinstance(w, BlockwiseFP8Weight)]


@on_ranks(2, gpus=())
def test_variants_compute_alike(world: int, device: str) -> None:
    mesh = shared_mesh(device, world, names=("tensor",))
    worker, blocks, found = calls_of("tensor_parallel_worker", 256, mesh)
    assert tuple(found) == worker.VARIANTS
    assert len(found) == tensor_parallel.total()
    gradients = []
    for block, call in zip(blocks, found.values(), strict=True):
        call()
        call()
        assert casts_of(block) in ([], [2] * 7)
        gradients.append(torch.cat([local(p.grad).flatten() for p in block.parameters()]))
    bf16, ours, fp8, square = gradients
    assert torch.equal(bf16, ours)
    assert not torch.equal(fp8, square)
    for gradient in (fp8, square):
        assert 0 < (gradient - bf16).norm() < 0.1 * bf16.norm()


def test_time_beside_other_kernels() -> None:
    others = [(0.0, 10.0), (5.0, 12.0), (20.0, 30.0)]
    assert profiled.covered((8.0, 25.0), others) == 9.0
    assert profiled.covered((12.0, 20.0), others) == 0.0
    assert profiled.covered((-5.0, 40.0), others) == 22.0
