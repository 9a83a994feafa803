"""Experts whose matrices are cut between ranks: gate and up by rows, down by columns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor import BlockwiseFP8Weight, SmallKN, convert, functional
from blocktensor.distributed import FP8Shard
from tests.support.expert_parallel import converted, cut, cut_in_fp8, experts_of
from tests.support.models import complaint, randn
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import mesh_of, whole

E, K, N = 3, 192, 512
SIZES = torch.tensor([20, 0, 33])
DIMS = {"w1_EFD": 1, "w3_EFD": 1, "w2_EDF": 2}


def step(model: nn.Module, device: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, and the gradients of the input and of the stacks; ranks have parts of sums."""
    x = randn(53, K, seed=5, device=device, grad=True)
    y = model(x, SIZES.to(device))
    y.backward(randn(53, K, seed=6, device=device))
    assert x.grad is not None
    return y.detach(), x.grad, [p.grad for p in model.parameters()]


def part_of(model: nn.Module, rank: int, world: int) -> nn.Module:
    """What one process computes with the part of a rank."""
    part = experts_of(E, K, N // world, "cpu", torch.float32)
    for name, parameter in part.named_parameters():
        values = getattr(model, name).detach().chunk(world, DIMS[name])[rank].contiguous()
        parameter.data = values.clone()
    return converted(part)


@on_ranks(2, 4)
def test_parts_of_experts_compute_as_in_one_process(world: int, device: str) -> None:
    """And the gradients of the stacks are those of whole experts."""
    mesh, rank = mesh_of(world, device), dist.get_rank()
    plain = experts_of(E, K, N, device, torch.float32)
    _, _, wanted = step(converted(copy.deepcopy(plain)), device)
    part = part_of(plain, rank, world).to(device)
    report = str(convert(cut(copy.deepcopy(plain), mesh, **DIMS), auto_filter_small_kn=False))
    assert f"E=3, N=512, K=192; on this rank 3 x {N // world} x 192" in report
    for before in (True, False):
        model = cut_in_fp8(plain, mesh, before, **DIMS)
        assert {type(p._local_tensor) for p in model.parameters()} == {BlockwiseFP8Weight}
        part.zero_grad()
        y, dx, grads = step(model, device)
        part_y, part_dx, part_grads = step(part, device)
        assert torch.equal(y, part_y)
        assert torch.equal(dx, part_dx)
        for got, of_part, want in zip(grads, part_grads, wanted, strict=True):
            assert isinstance(got, DTensor)
            assert torch.equal(got.to_local(), of_part)
            assert torch.equal(got.full_tensor(), want)


@on_ranks(2, 4, gpus=())
def test_parts_that_are_small_are_left_alone(world: int, device: str) -> None:
    model = cut(experts_of(E, K, N, device, torch.float32), mesh_of(world, device), **DIMS)
    small = SmallKN(expert_n=192, expert_k=192, expert_size=0)
    if world == 2:
        assert len(convert(model, auto_filter_small_kn=small).converted) == 3
        return
    with pytest.warns(UserWarning, match="no weight of this GroupedExperts is in FP8"):
        report = convert(model, auto_filter_small_kn=small)
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert reasons["w1_EFD"].startswith("small: N")
    assert reasons["w2_EDF"].startswith("small: K")


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(4, gpus=())
def test_fsdp_over_parts_of_experts(world: int, device: str) -> None:
    mesh = shared_mesh(device, 2, 2, names=("data", "tensor"))
    plain = experts_of(E, K, N, device, torch.float32)
    part = part_of(plain, mesh["tensor"].get_local_rank(), 2)
    model = fully_shard(cut_in_fp8(plain, mesh["tensor"], True, **DIMS), mesh=mesh["data"])
    assert {type(p._local_tensor) for p in model.parameters()} == {FP8Shard}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, part)]
    for _ in range(2):
        for got, want in zip(step(model, device)[:2], step(part, device)[:2], strict=True):
            assert torch.equal(got, want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        mine = whole(parameter).chunk(2, DIMS[name])[mesh["tensor"].get_local_rank()]
        assert torch.equal(mine, getattr(part, name).master)


@on_ranks(2, gpus=())
def test_gate_and_up_in_one_stack(world: int, device: str) -> None:
    """As the ``gate_up_proj`` of transformers: every rank gets a part of each half of its rows."""
    mesh, rank = mesh_of(world, device), dist.get_rank()
    values = randn(E, 512, K, dtype=torch.float32, device=device)
    cut: Any = _StridedShard(1, split_factor=2)
    stack = distribute_tensor(BlockwiseFP8Weight(values), mesh, [cut], src_data_rank=None)
    local = stack.to_local()
    mine = torch.cat([half.chunk(2, 1)[rank] for half in values.chunk(2, 1)], 1)
    assert type(local) is BlockwiseFP8Weight
    assert torch.equal(local.master, mine)
    offs = SIZES.cumsum(0, dtype=torch.int32).to(device)
    x = randn(53, K, device=device)
    halves = functional.grouped_linear(x.float(), values, offs).chunk(2, 1)
    wanted = torch.cat([half.chunk(2, 1)[rank] for half in halves], 1)
    assert torch.equal(functional.grouped_linear(x.float(), local, offs), wanted)
    unaligned = BlockwiseFP8Weight(values[:, :384])
    text = complaint(NotImplementedError, lambda: distribute_tensor(unaligned, mesh, [cut]))
    assert "along dimension 1 into parts of 96, inside blocks of 128" in text.replace("\n", " ")
