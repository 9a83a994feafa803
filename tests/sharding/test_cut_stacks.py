"""Stacks that ranks share, by experts or inside them: FP8 as in one process, whenever converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, MinSizes, convert, functional
from blocktensor.conversion.freeze import freeze
from blocktensor.sharding.fsdp.shards import FP8Shard, FrozenShard
from tests.support.expert_parallel import (
    Dispatched,
    assert_steps_as_one,
    converted,
    cut,
    cut_in_fp8,
    experts_of,
    local_values,
    step_of,
)
from tests.support.models import complaint, randn
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import assert_equal, gradients, local_kinds, step, whole

K = 192
FLOAT = torch.float32


def two_dims(device: str = "cpu") -> DeviceMesh:
    return shared_mesh(device, 2, 2, names=("data", "expert"))


def sizes_of(experts: int, world: int) -> list[list[int]]:
    """How many rows each rank has for each expert; one expert has none."""
    rng = torch.Generator().manual_seed(experts)
    sizes = torch.randint(0, 40, (world, experts), generator=rng)
    sizes[:, -1] = 0
    return sizes.tolist()


@on_ranks(2, 4)
def test_experts_train_as_in_one_process(mesh: DeviceMesh, device: str) -> None:
    for experts, dtype, before in (
        (4, FLOAT, True),
        (4, torch.bfloat16, False),
        (3, FLOAT, False),
        (6, FLOAT, True),
        (1, FLOAT, True),
    ):
        single = experts_of(experts, device=device, dtype=dtype)
        assert local_kinds(cut(copy.deepcopy(single), mesh)) == {Tensor}
        model = cut_in_fp8(single, mesh, before)
        converted(single)
        assert local_kinds(model) == {BlockwiseFP8Weight}
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        sizes = sizes_of(experts, mesh.size())
        assert_steps_as_one(single, Dispatched(model, mesh.get_group()), sizes, device)


@on_ranks(2)
def test_frozen_experts_load_a_whole_state(mesh: DeviceMesh, device: str) -> None:
    single, other = (converted(experts_of(4, device=device)) for _ in range(2))
    nn.init.ones_(other.w1_EFD)
    freeze(single), freeze(other)
    model, rows = cut(other, mesh), slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
    set_model_state_dict(model, single.state_dict(), options=StateDictOptions(full_state_dict=True))
    for got, want in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(local_values(got), want.dequantize()[rows])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(4)
def test_fsdp_over_experts_that_are_cut(device: str, dim: int) -> None:
    mesh = two_dims(device)
    for before in (True, False):
        single = experts_of(4, device=device)
        model = cut(copy.deepcopy(converted(single) if before else single), mesh["expert"])
        fully_shard(model, mesh=mesh["data"], shard_placement_fn=lambda p: Shard(dim))
        converted(single), converted(model)
        assert local_kinds(model) == {FP8Shard}
        dispatched = Dispatched(model, mesh["expert"].get_group())
        # both rows of the mesh run the same batches: FSDP averages two equal gradients
        assert_steps_as_one(single, dispatched, sizes_of(4, 2), device)


@on_ranks(4)
def test_sharded_stacks_that_are_no_whole_experts_are_not_converted(device: str) -> None:
    mesh = two_dims(device)
    remedy = "convert stacks that are cut inside experts before fully_shard"
    for inside, dim in ((1, 0), (2, 1), (1, 1)):
        model = cut(experts_of(4, device=device), mesh["expert"], inside)
        fully_shard(model, mesh=mesh["data"], shard_placement_fn=lambda p, d=dim: Shard(d))
        before = [p._local_tensor for p in model.parameters()]
        with pytest.raises(NotImplementedError, match=f"FSDP2 alone did not make: {remedy}"):
            convert(model, skip_small=False)
        after = [p._local_tensor for p in model.parameters()]
        assert all(p is q for p, q in zip(before, after, strict=True))


@on_ranks(4, gpus=())
def test_frozen_experts_that_are_cut_and_sharded() -> None:
    mesh = two_dims()
    plain = experts_of(4).requires_grad_(False)
    single = experts_of(2).requires_grad_(False)
    for p, q in zip(single.parameters(), plain.parameters(), strict=True):
        p.copy_(q.chunk(2)[mesh["expert"].get_local_rank()])
    converted(single)
    for before in (True, False):
        model = fully_shard(cut_in_fp8(plain, mesh["expert"], before), mesh=mesh["data"])
        assert local_kinds(model) == {FrozenShard}
        made = []
        for each in (model, single):
            x = randn(40, K, grad=True)
            y = each(x, torch.tensor([13, 27]))
            y.backward(randn(40, K, seed=1))
            made.append([y, x.grad])
        assert_equal(*made)


@pytest.mark.parametrize("dim", [1, 2])
@on_ranks(2, gpus=())
def test_a_rank_that_gets_nothing_of_a_matrix_has_all_experts(mesh: DeviceMesh, dim: int) -> None:
    shape = [2, 256, 256]
    shape[dim] = 1
    part: Any = distribute_tensor(BlockwiseFP8Weight(randn(*shape)), mesh, [Shard(dim)])
    shape[dim] -= mesh.get_local_rank()
    assert list(part.to_local().shape) == shape


@pytest.mark.parametrize("kind", [BlockwiseFP8Weight, BlockwiseFP8Tensor])
@on_ranks(2, gpus=())
def test_every_way_to_cut_a_stack(mesh: DeviceMesh, kind: type) -> None:
    """By experts, rows, columns; the values are those of rank 0, or each rank's own."""

    def in_fp8(values: Tensor) -> Any:
        if kind is BlockwiseFP8Weight:
            return BlockwiseFP8Weight(values)
        return BlockwiseFP8Tensor.from_values(values, (128, 128))

    rank = mesh.get_local_rank()
    for experts, dim, source in (
        (4, 0, 0),
        (4, 0, None),
        (3, 0, 0),
        (1, 0, 0),
        (1, 0, None),
        (2, 1, 0),
        (2, 1, None),
        (2, 2, 0),
        (2, -1, None),
    ):
        values = randn(experts, 512, 256, seed=1, dtype=FLOAT)
        parts = local_values(in_fp8(values)).chunk(2, dim)
        mine = parts[rank] if rank < len(parts) else parts[0][:0]
        if rank and source == 0:
            values = torch.ones_like(values)
        part = distribute_tensor(in_fp8(values), mesh, [Shard(dim)], src_data_rank=source)
        assert type(part.to_local()) is kind
        assert torch.equal(local_values(part), mine), (experts, dim, source)
    # each rank's own values, of which those of rank 0 are copied
    own, first = (in_fp8(randn(2, 130, 128, seed=r, dtype=FLOAT)) for r in (rank, 0))
    copies = distribute_tensor(own, mesh, [Replicate()])
    assert type(copies.to_local()) is kind
    assert torch.equal(local_values(copies), local_values(first))


@on_ranks(2, gpus=())
def test_cuts_inside_blocks_are_refused_and_change_nothing(mesh: DeviceMesh) -> None:
    model = experts_of(2, 192, 320)
    late = cut(copy.deepcopy(model), mesh, 1)
    before = late.w1_EFD._local_tensor
    assert_expected_inline(
        complaint(NotImplementedError, lambda: converted(late)),
        """\
the weight of 'w1_EFD' [2, 320, 192] with the placements [Shard(dim=1)], which cut
128x128 blocks: expected cuts at multiples of 128 (fewer ranks), cuts between
experts (Shard(0)), or the stack unconverted (skip=[...])""",
    )
    assert late.w1_EFD._local_tensor is before
    converted(model)
    for dim in (1, 2):
        text = complaint(NotImplementedError, lambda d=dim: cut(model, mesh, d))
        assert "a stack of FP8 experts [2, 320, 192] with the placements [Shard(dim=" in text
        assert type(model.w1_EFD) is BlockwiseFP8Weight


@on_ranks(2, gpus=())
def test_meta_stacks_are_initialised_as_fp8(mesh: DeviceMesh) -> None:
    for before in (True, False):
        model = cut_in_fp8(experts_of(4, device="meta"), mesh, before)
        model.to_empty(device="cpu")
        assert local_kinds(model) == {BlockwiseFP8Weight}
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.5)
        step_of(model)
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())


# Experts whose matrices are cut: gate and up by rows, down by columns

E, WIDE = 3, 512
SIZES = torch.tensor([20, 0, 33])
DIMS = {"w1_EFD": 1, "w3_EFD": 1, "w2_EDF": 2}


def run(model: nn.Module, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Run forward and backward; the output and the gradient of the input, both parts of sums."""
    x = randn(53, K, seed=5, device=device, grad=True)
    y = model(x, SIZES.to(device))
    y.backward(randn(53, K, seed=6, device=device))
    assert x.grad is not None
    return y, x.grad


def part_of(model: nn.Module, rank: int, world: int) -> nn.Module:
    """What one process computes with the part of a rank."""
    part = experts_of(E, K, WIDE // world)
    for name, parameter in part.named_parameters():
        values = getattr(model, name).detach().chunk(world, DIMS[name])[rank].contiguous()
        parameter.data = values.clone()
    return converted(part)


@on_ranks(2, 4)
def test_parts_of_experts_compute_as_in_one_process(mesh: DeviceMesh, device: str) -> None:
    plain = experts_of(E, K, WIDE, device)
    single = converted(copy.deepcopy(plain))
    run(single, device)
    part = part_of(plain, mesh.get_local_rank(), mesh.size()).to(device)
    report = str(convert(cut(copy.deepcopy(plain), mesh, **DIMS), skip_small=False))
    assert f"E=3, N=512, K=192; on this rank 3 x {WIDE // mesh.size()} x 192" in report
    for before in (True, False):
        model = cut_in_fp8(plain, mesh, before, **DIMS)
        assert local_kinds(model) == {BlockwiseFP8Weight}
        part.zero_grad()
        assert_equal(run(model, device), run(part, device))
        assert all(isinstance(grad, DTensor) for grad in gradients(model))
        assert_equal([grad.to_local() for grad in gradients(model)], gradients(part))
        assert_equal(gradients(model), gradients(single))


@on_ranks(2, 4, gpus=())
def test_parts_that_are_small_are_left_alone(mesh: DeviceMesh) -> None:
    model = cut(experts_of(E, K, WIDE), mesh, **DIMS)
    small = MinSizes(expert_n=192, expert_k=192, expert_size=0)
    if mesh.size() == 2:
        assert len(convert(model, skip_small=small).converted) == 3
        return
    with pytest.warns(UserWarning, match="no weight of this GroupedExperts is in FP8"):
        report = convert(model, skip_small=small)
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert reasons["w1_EFD"].startswith("small: N")
    assert reasons["w2_EDF"].startswith("small: K")


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(4, gpus=())
def test_fsdp_over_parts_of_experts() -> None:
    mesh = two_dims()
    rank = mesh["expert"].get_local_rank()
    plain = experts_of(E, K, WIDE)
    part = part_of(plain, rank, 2)
    model = fully_shard(cut_in_fp8(plain, mesh["expert"], True, **DIMS), mesh=mesh["data"])
    assert local_kinds(model) == {FP8Shard}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, part)]
    for _ in range(2):
        assert_equal(run(model), run(part))
        step(*optimizers)
    mine = [whole(p).chunk(2, DIMS[name])[rank] for name, p in model.named_parameters()]
    assert_equal(mine, part.parameters())


@on_ranks(2, gpus=())
def test_gate_and_up_in_one_stack(mesh: DeviceMesh) -> None:
    """As the ``gate_up_proj`` of transformers: every rank gets a part of each half of its rows."""
    rank = mesh.get_local_rank()
    values = randn(E, 512, K, dtype=FLOAT)
    cut: Any = _StridedShard(1, split_factor=2)
    stack = distribute_tensor(BlockwiseFP8Weight(values), mesh, [cut], src_data_rank=None)
    local = stack.to_local()
    assert type(local) is BlockwiseFP8Weight
    halves = [half.chunk(2, 1)[rank] for half in values.chunk(2, 1)]
    assert torch.equal(local.master, torch.cat(halves, 1))
    offs = SIZES.cumsum(0, dtype=torch.int32)
    x = randn(53, K, dtype=FLOAT)
    halves = functional.grouped_linear(x, values, offs).chunk(2, 1)
    wanted = torch.cat([half.chunk(2, 1)[rank] for half in halves], 1)
    assert torch.equal(functional.grouped_linear(x, local, offs), wanted)
    unaligned = BlockwiseFP8Weight(values[:, :384])
    text = complaint(NotImplementedError, lambda: distribute_tensor(unaligned, mesh, [cut]))
    assert "which cut 128x128 blocks" in text.replace("\n", " ")
