"""Stacks of experts under FSDP2: however they are sharded, they train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, MinSizes, Recipe, convert
from blocktensor.sharding.fsdp.shards import FP8Shard, FrozenShard
from tests.support.models import SQUARE, randn
from tests.support.moe_models import BatchedMoE, TitanMoE
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import (
    K,
    Wire,
    assert_trains_as,
    batch,
    gradients,
    local_kinds,
    loss_of,
    nbytes,
    reductions,
    step,
    whole,
)
from tests.support.sharded_checkpoints import assert_read_by

N = 156  # 1.2 blocks; 2 and 4 ranks cut blocks


def converted(
    model: nn.Module, recipe: Recipe | None = None, skip: Sequence[str] = ("gate",)
) -> nn.Module:
    experts = {"experts": ["up", "down"]} if isinstance(model, BatchedMoE) else None
    convert(model, recipe, skip=skip, skip_small=False, stacks=experts)
    return model


def shard(
    model: nn.Module, mesh: DeviceMesh, dim: int = 0, own: DeviceMesh | None = None, **options: Any
) -> nn.Module:
    """Shard the experts over the mesh ``own``, which is ``mesh`` by default, then the rest."""
    place = lambda p: Shard(dim if p.ndim == 3 else 0)  # noqa: E731
    fully_shard(model.experts, mesh=own or mesh, shard_placement_fn=place, **options)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return model


def two_dims(device: str) -> DeviceMesh:
    return shared_mesh(device, 2, 2, names=("outer", "inner"))


def in_fp32(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model, x[:, : model.gate.in_features].float())


def titan() -> nn.Module:
    return TitanMoE(3, K, N)


def assert_trains_as_one_process(
    sharded: Callable[[nn.Module], Any],
    device: str,
    make: Callable[[], nn.Module] = titan,
    recipe: Recipe | None = None,
    skip: Sequence[str] = ("gate",),
    wanted: int | None = None,
    **steps: Any,
) -> None:
    """Two steps of a model that ``sharded`` has sharded are those of a whole one, bit for bit.

    ``wanted``: how many reductions of amaxes the steps make; ``steps``: for ``assert_trains_as``.
    """
    single = converted(make().to(device), recipe, skip)
    model = copy.deepcopy(single)
    sharded(model)
    assert local_kinds(model.experts) == {FP8Shard}
    assert_trains_as(single, model, device, steps=2, run=in_fp32, **steps)
    assert wanted in (None, reductions(model))


@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(2, 4)
def test_experts_train_as_in_one_process(mesh: DeviceMesh, device: str, dim: int) -> None:
    """Whole experts, fewer of them than ranks and unevenly; rows and columns inside blocks."""
    for make in (titan, lambda: BatchedMoE(3, K, N)):
        assert_trains_as_one_process(lambda m: shard(m, mesh, dim), device, make)


@on_ranks(2)
def test_converted_after_they_were_sharded(mesh: DeviceMesh, device: str) -> None:
    """Whole stacks are gathered: the sizes that count, and are reported, are those of a whole."""
    sizes = MinSizes(expert_n=128, expert_k=128, expert_size=512 * 128)
    for dim in (0, 1):
        model, single = TitanMoE(2, 128, 512).to(device), TitanMoE(2, 128, 512).to(device)
        shard(model, mesh, dim)
        reports = [convert(each, skip=["gate"], skip_small=sizes) for each in (model, single)]
        found, wanted = ({e.name: e.reason for e in report.converted} for report in reports)
        assert len(found) == 3
        assert {name: why.replace(", gathered in FP8", "") for name, why in found.items()} == wanted
        assert_trains_as(single, model, device, steps=2, run=in_fp32)


@on_ranks(4)
def test_ranks_beyond_the_last_expert(mesh: DeviceMesh, device: str) -> None:
    """With 2 experts the fourth rank begins behind the end; with 5 so does the last of them."""
    for experts in (2, 5):
        assert_trains_as_one_process(
            lambda m: shard(m, mesh), device, lambda e=experts: TitanMoE(e, K, N)
        )


MICROBATCHES = {"microbatches": 2, "exact_gradients": False}


@pytest.mark.parametrize(
    ("options", "recipe", "steps"),
    [
        ({"reshard_after_forward": False}, Recipe(), {}),
        ({}, Recipe(scale="power_of_two"), {}),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, Recipe(), {}),
        ({}, Recipe(), {"wanted": 4, **MICROBATCHES}),
    ],
)
@on_ranks(2)
def test_ways_to_gather_experts(
    mesh: DeviceMesh, device: str, options: dict[str, Any], recipe: Recipe, steps: dict[str, Any]
) -> None:
    """In blocks that no rank shares, and in others."""
    for make in (lambda: TitanMoE(2, 128, 512), lambda: TitanMoE(2, K, N)):
        assert_trains_as_one_process(
            lambda m: shard(m, mesh, 1, **options), device, make, recipe, **steps
        )


@on_ranks(4)
def test_experts_on_a_mesh_of_their_own(mesh: DeviceMesh, device: str) -> None:
    """The rest over all ranks; also with replicas, and given for each parameter (torch 2.13)."""
    both = two_dims(device)
    for own, dim in ((both["inner"], 0), (both["outer"], 1), (both, 0)):
        assert_trains_as_one_process(
            lambda m, own=own, dim=dim: shard(m, mesh, dim, own),
            device,
            skip=[],  # the router in FP8, too
            wanted=2 * 2,  # steps, and groups of ranks
        )
    # and everything over half the ranks, replicated
    assert_trains_as_one_process(lambda m: shard(m, both, 1), device)
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        return

    infos = [common.FSDPMeshInfo(m, shard_mesh_dim=0) for m in (mesh, both["inner"])]

    def place(p: Tensor) -> Any:
        dim = int(p.ndim == 3)
        return common.ShardPlacementResult(Shard(dim), infos[dim])

    assert_trains_as_one_process(
        lambda m: fully_shard(m, mesh=mesh, shard_placement_fn=place), device
    )


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2, gpus=())
def test_a_byte_a_parameter_and_one_small_reduction(mesh: DeviceMesh, dim: int) -> None:
    steps = []
    for model in (TitanMoE(4, 128, 256), converted(TitanMoE(4, 128, 256))):
        shard(model.bfloat16(), mesh, dim)
        with Wire() as wire:
            model(randn(30, 128)).float().sum().backward()
        steps.append(wire)
    was, found = steps
    gate, stacks = 4 * 128, 3 * 4 * 128 * 256
    sent = 2 * stacks // 2  # for forward, and again for backward
    assert nbytes(was.gathered) == 2 * sent + 2 * gate // 2 and not was.reduced
    assert nbytes(found.gathered) == sent + 2 * gate // 2
    assert {x.dtype for x in found.gathered} == {torch.bfloat16, torch.uint8}
    assert len(found.gathered) == len(was.gathered)
    # rows of 4 scales: w1 and w3 have 2 of them, w2 has one
    assert [x.nbytes for x in found.reduced] == [4 * 4 * 4 * (2 + 2 + 1)]


@on_ranks(2, 4)
def test_frozen_experts_are_sharded_as_bytes(mesh: DeviceMesh, device: str) -> None:
    for make in (TitanMoE, BatchedMoE):
        for dim in (0, 1):
            model = make(3, K, N).to(device)
            model.experts.requires_grad_(False)
            single = copy.deepcopy(converted(model))
            shard(model, mesh, dim)
            assert local_kinds(model.experts) == {FrozenShard}
            rank, size = mesh.get_local_rank(), (3, N)[dim]
            each = -(-size // mesh.size())
            mine = max(min(size - rank * each, each), 0)
            held = [p._local_tensor.data_rows.shape[dim] for p in model.experts.parameters()]
            assert mine in held
            assert_trains_as(single, model, device, steps=2, run=in_fp32)


@on_ranks(4)
def test_clipping(mesh: DeviceMesh, device: str) -> None:
    single = converted(TitanMoE(3, K, N).to(device))
    models = [shard(copy.deepcopy(single), mesh, 1, x) for x in (None, two_dims(device)["inner"])]
    for model in (single, *models):
        in_fp32(model, batch(0, device)).backward()
    wanted = nn.utils.clip_grad_norm_(single.parameters(), 1e-3)
    norm = nn.utils.clip_grad_norm_(models[0].parameters(), 1e-3).full_tensor()
    torch.testing.assert_close(norm, wanted)
    # torch has no norm of gradients on several meshes
    parts = models[1].gate, models[1].experts
    norms = [nn.utils.get_total_norm(gradients(part)).full_tensor() for part in parts]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for part in parts:
        nn.utils.clip_grads_with_norm_(part.parameters(), 1e-3, norm)
    torch.testing.assert_close(norm, wanted)
    for model in models:
        torch.testing.assert_close([*map(whole, gradients(model))], gradients(single))


@on_ranks(4, gpus=())
def test_who_reads_a_checkpoint(mesh: DeviceMesh, device: str, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        in_fp32(model, batch(number, device)).backward()
        step(optimizer)

    both = two_dims(device)
    others = [
        lambda: shard(converted(titan()), mesh, 1),
        lambda: shard(converted(titan()), mesh, 1, both["inner"]),
        lambda: shard(converted(titan()), both["outer"], 0),
        lambda: converted(titan()),
    ]
    assert_read_by(others, shard(converted(titan()), mesh), train, tmp_path)


@on_ranks(2)
def test_the_local_part_of_a_stack_on_another_mesh_is_fp8(mesh: DeviceMesh, device: str) -> None:
    values = randn(2, 128, 192, device=device)
    frozen = BlockwiseFP8Tensor.from_values(values, SQUARE)
    for stack in (BlockwiseFP8Weight(values), frozen):
        sharded = DTensor.from_local(stack, mesh, [Shard(0)], run_check=False)
        assert sharded.shape == (4, 128, 192)
        local = sharded.to_local()
        assert type(local) is type(local[1]) is type(local.float()) is type(stack)
        assert type(local.transpose(-2, -1)) is type(stack)
