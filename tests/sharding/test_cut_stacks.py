"""Stacks that ranks share, by experts or inside them: FP8 as in one process, whenever converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, MinSizes, convert, functional
from blocktensor.distributed import FP8Shard, FrozenShard
from tests.support.expert_parallel import (
    Dispatched,
    assert_steps_as_one,
    converted,
    cut,
    cut_in_fp8,
    experts_of,
    local_kinds,
    local_values,
    step_of,
)
from tests.support.models import complaint, randn
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import mesh_of, whole

K, N = 192, 256
FLOAT = torch.float32


def sizes_of(experts: int, world: int) -> list[list[int]]:
    """How many rows each rank has for each expert; one expert has none."""
    rng = torch.Generator().manual_seed(experts)
    sizes = torch.randint(0, 40, (world, experts), generator=rng)
    sizes[:, -1] = 0
    return sizes.tolist()


@on_ranks(2, 4)
def test_experts_train_as_in_one_process(world: int, device: str) -> None:
    """Ranks with fewer experts, or none; converted before and after the stacks are cut."""
    mesh = mesh_of(world, device)
    for experts, dtype, before in (
        (4, FLOAT, True),
        (4, torch.bfloat16, False),
        (3, FLOAT, False),
        (6, FLOAT, True),
        (1, FLOAT, True),
    ):
        single = experts_of(experts, K, N, device, dtype)
        assert local_kinds(cut(copy.deepcopy(single), mesh)) == {Tensor}
        model = cut_in_fp8(single, mesh, before)
        converted(single)
        assert local_kinds(model) == {BlockwiseFP8Weight}
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        sizes = sizes_of(experts, world)
        assert_steps_as_one(single, Dispatched(model, mesh.get_group()), sizes, device)


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(4, gpus=())
def test_fsdp_over_experts_that_are_cut(world: int, device: str) -> None:
    mesh = shared_mesh(device, 2, 2, names=("data", "expert"))
    for before in (True, False):
        single = experts_of(4, K, N, device, FLOAT)
        model = cut(converted(copy.deepcopy(single)) if before else single, mesh["expert"])
        fully_shard(model, mesh=mesh["data"])
        model = converted(model)
        single = converted(experts_of(4, K, N, device, FLOAT))
        assert local_kinds(model) == {FP8Shard}
        dispatched = Dispatched(model, mesh["expert"].get_group())
        # both rows of the mesh run the same batches: FSDP averages two equal gradients
        assert_steps_as_one(single, dispatched, sizes_of(4, 2), device)


@on_ranks(4, gpus=())
def test_frozen_experts_that_are_cut_and_sharded(world: int, device: str) -> None:
    mesh = shared_mesh(device, 2, 2, names=("data", "expert"))
    mine = slice(2 * mesh["expert"].get_local_rank(), 2 * mesh["expert"].get_local_rank() + 2)
    whole_model = experts_of(4, K, N, device, FLOAT).requires_grad_(False)
    single = experts_of(2, K, N, device, FLOAT).requires_grad_(False)
    for p, q in zip(single.parameters(), whole_model.parameters(), strict=True):
        p.copy_(q[mine])
    converted(single)
    for before in (True, False):
        model = fully_shard(cut_in_fp8(whole_model, mesh["expert"], before), mesh=mesh["data"])
        assert local_kinds(model) == {FrozenShard}
        made = []
        for each in (model, single):
            x = randn(40, K, device=device, grad=True)
            y = each(x, torch.tensor([13, 27], device=device))
            y.backward(randn(40, K, seed=1, device=device))
            made.append((y, x.grad))
        assert all(map(torch.equal, *made))


@on_ranks(2, gpus=())
def test_every_way_to_cut_a_stack(world: int, device: str) -> None:
    """By experts, rows, columns; the values are those of rank 0, or each rank's own."""
    mesh = mesh_of(world, device)
    rank = dist.get_rank()
    for frozen in (False, True):
        kind = BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight
        for experts, dim, source in (
            *((4, 0, 0), (4, 0, None), (3, 0, 0), (1, 0, 0), (1, 0, None), (2, 1, 0), (2, 1, None)),
            *((2, 2, 0), (2, -1, None)),
        ):
            plain = randn(experts, 512, 256, seed=1, dtype=FLOAT)
            wanted = plain
            if frozen:
                wanted = BlockwiseFP8Tensor.from_values(plain, (128, 128)).dequantize()
            if rank and source == 0:
                plain = torch.ones_like(plain)
            made = BlockwiseFP8Tensor.from_values(plain, (128, 128)) if frozen else None
            stack = BlockwiseFP8Weight(plain) if made is None else made
            part = distribute_tensor(stack, mesh, [Shard(dim)], src_data_rank=source)
            parts = wanted.chunk(world, dim)
            mine = parts[rank] if rank < len(parts) else wanted.narrow(dim, 0, 0)
            assert type(part.to_local()) is kind
            assert torch.equal(local_values(part), mine), (experts, dim, source, frozen)
        # each rank's own values, of which those of rank 0 are copied
        own, first = (randn(2, 130, 128, seed=r, dtype=FLOAT, device=device) for r in (rank, 0))
        if frozen:
            own, first = (BlockwiseFP8Tensor.from_values(x, (128, 128)) for x in (own, first))
        else:
            own, first = BlockwiseFP8Weight(own), BlockwiseFP8Weight(first)
        copies = distribute_tensor(own, mesh, [Replicate()])
        assert type(copies.to_local()) is kind
        assert torch.equal(local_values(copies), local_values(first))


@on_ranks(2, gpus=())
def test_cuts_inside_blocks_are_refused_and_change_nothing(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    model = experts_of(2, 192, 320, device, FLOAT)
    late = cut(copy.deepcopy(model), mesh, 1)
    before = late.w1_EFD._local_tensor
    text = complaint(NotImplementedError, lambda: converted(late))
    assert_expected_inline(
        text,
        """\
the weight of 'w1_EFD' [2, 320, 192] is cut along dimension 1 into parts of 160,
inside blocks of 128 that two ranks would share: cut between experts (Shard(0)) or
over fewer ranks, or leave the stack unconverted (skip=[...])""",
    )
    assert late.w1_EFD._local_tensor is before
    converted(model)
    for dim in (1, 2):
        text = complaint(NotImplementedError, lambda d=dim: cut(model, mesh, d))
        assert "a stack of FP8 experts [2, 320, 192] is cut along dimension" in text
        assert type(model.w1_EFD) is BlockwiseFP8Weight


@on_ranks(2, gpus=())
def test_meta_stacks_are_initialised_as_fp8(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    for before in (True, False):
        model = cut_in_fp8(experts_of(4, K, N, "meta", FLOAT), mesh, before)
        model.to_empty(device=device)
        assert local_kinds(model) == {BlockwiseFP8Weight}
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        step_of(model)
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())


# Experts whose matrices are cut: gate and up by rows, down by columns


E, WIDE = 3, 512
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
    part = experts_of(E, K, WIDE // world, "cpu", FLOAT)
    for name, parameter in part.named_parameters():
        values = getattr(model, name).detach().chunk(world, DIMS[name])[rank].contiguous()
        parameter.data = values.clone()
    return converted(part)


@on_ranks(2, 4)
def test_parts_of_experts_compute_as_in_one_process(world: int, device: str) -> None:
    """And the gradients of the stacks are those of whole experts."""
    mesh, rank = mesh_of(world, device), dist.get_rank()
    plain = experts_of(E, K, WIDE, device, FLOAT)
    _, _, wanted = step(converted(copy.deepcopy(plain)), device)
    part = part_of(plain, rank, world).to(device)
    report = str(convert(cut(copy.deepcopy(plain), mesh, **DIMS), skip_small=False))
    assert f"E=3, N=512, K=192; on this rank 3 x {WIDE // world} x 192" in report
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
    model = cut(experts_of(E, K, WIDE, device, FLOAT), mesh_of(world, device), **DIMS)
    small = MinSizes(expert_n=192, expert_k=192, expert_size=0)
    if world == 2:
        assert len(convert(model, skip_small=small).converted) == 3
        return
    with pytest.warns(UserWarning, match="no weight of this GroupedExperts is in FP8"):
        report = convert(model, skip_small=small)
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert reasons["w1_EFD"].startswith("small: N")
    assert reasons["w2_EDF"].startswith("small: K")


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(4, gpus=())
def test_fsdp_over_parts_of_experts(world: int, device: str) -> None:
    mesh = shared_mesh(device, 2, 2, names=("data", "tensor"))
    plain = experts_of(E, K, WIDE, device, FLOAT)
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
    values = randn(E, 512, K, dtype=FLOAT, device=device)
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
