"""Models exported in FP8 and loaded, on one rank and sharded: names and bytes of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, Recipe, convert, freeze, iter_fp8, load_fp8, save_fp8
from blocktensor.checkpoint import files as reading
from blocktensor.checkpoint import save as saving
from blocktensor.sharding.cuts import held
from tests.support.arranged import ARRANGEMENTS, arrange, facts, net, same_bits
from tests.support.checkpoint_experts import layer, read
from tests.support.checkpoint_models import SHARD, content, filled, untagged
from tests.support.models import complaint, randn
from tests.support.ranks import on_ranks, shared_mesh

KINDS: dict[str, Callable[[], nn.Module]] = {
    "trainable": filled,
    "frozen": lambda: filled(frozen=True),
    "experts": layer,
    "frozen experts": lambda: layer(frozen=True),
}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_yields_what_save_fp8_writes(tmp_path: Path, kind: str, separate: bool) -> None:
    options: Any = {"separate_experts": separate}
    model = KINDS[kind]()
    found = dict(iter_fp8(model, **options))
    assert sum(1 for _ in iter_fp8(model, **options)) == len(found)  # each name once
    written = read(save_fp8(model, tmp_path / "fp8", **options))
    same_bits(dict(sorted(found.items())), dict(sorted(written.items())))


def test_errors_before_the_first_tensor_and_ranks_that_get_none() -> None:
    with pytest.raises(ValueError, match="the model has no FP8 weight: convert it first"):
        iter_fp8(nn.Linear(128, 128))
    with pytest.raises(TypeError, match="iter_fp8"):
        iter_fp8("model")  # type: ignore[arg-type]
    assert list(iter_fp8(filled(), rank=1)) == []
    same_bits(dict(iter_fp8(filled(), rank=0)), dict(iter_fp8(filled())))


POWERS = Recipe(scale="power_of_two")
WEIGHTS = [
    (torch.bfloat16, Recipe(), False, False),
    (torch.float32, POWERS, False, False),
    (torch.bfloat16, Recipe(), True, False),
    (torch.bfloat16, POWERS, True, True),
]
"""Dtype of the masters, recipe, whether the model is frozen in FP8, and its experts separate."""


@pytest.mark.parametrize("how", ARRANGEMENTS)
@on_ranks(2, 4, gpus=(2,))
def test_sharded_models(world: int, device: str, how: str, tmp_path: Path) -> None:
    for number, (dtype, recipe, frozen, separate) in enumerate(WEIGHTS):
        model, single, other = (net(device, dtype, recipe, frozen, seed=s) for s in (0, 0, 1))
        if not (arrange(model, how, world, device) and arrange(other, how, world, device)):
            return
        want = dict(iter_fp8(single))
        same_bits(dict(iter_fp8(model)), want)
        same_bits(dict(iter_fp8(model, rank=1)), want if dist.get_rank() == 1 else {})
        folder, alone = tmp_path / f"{number}", tmp_path / f"alone{number}"
        options: Any = {"max_shard_bytes": SHARD, "separate_experts": separate}
        if dist.get_rank() == 0:
            save_fp8(single, alone, **options)
        for _ in range(2):  # a new folder, and one that is replaced
            assert save_fp8(model, folder, overwrite=True, **options) == folder
            dist.barrier()
            assert untagged(content(folder)) == content(alone)
            dist.barrier()
        if frozen:  # and each rank loads its part
            before = facts(other)
            assert len(load_fp8(other, folder).fp8) == 5
            same_bits(dict(iter_fp8(other)), want)
            assert facts(other) == before
            empty = net("meta", dtype, recipe, frozen=False, aligned=True)
            empty.head.weight = empty.embed.weight  # torch unties what it moves to meta
            arrange(empty, how, world, device)
            assert len(load_fp8(empty, folder).fp8) == 5
            same_bits(dict(iter_fp8(empty)), want)
            assert facts(empty) == before
    assert {path.name[:1] for path in tmp_path.iterdir()} <= {"0", "1", "2", "3", "a"}


@on_ranks(2)
def test_what_one_rank_cannot_write_fails_on_all(
    world: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled(), tmp_path / "fp8"
    fully_shard(model, mesh=shared_mesh(device, world, names=("all",)))
    save_fp8(model, folder)
    before = content(folder)

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(saving, "write_shard", full)
        with pytest.raises(OSError, match=f"{folder} was not written .No space left on device"):
            save_fp8(model, folder, overwrite=True, max_shard_bytes=SHARD)
    dist.barrier()
    assert content(folder) == before
    with pytest.raises(FileExistsError, match="pass overwrite=True"):  # on all of them
        save_fp8(model, folder)
    with torch.no_grad():
        model.up.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"up\.weight has a block that FP8 cannot hold"):
        save_fp8(model, folder, overwrite=True)
    dist.barrier()
    assert content(folder) == before
    assert {path.name for path in tmp_path.iterdir()} == {"fp8"}
    loaded = filled(9, convert=False)
    load_fp8(loaded, folder)
    assert int(loaded.steps) == int(model.steps)


@on_ranks(2)
def test_what_cannot_be_loaded_changes_nothing_on_any_rank(
    world: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fp8"
    single, model, trains = (
        net(device, torch.bfloat16, Recipe(), frozen=frozen, seed=seed, aligned=True)
        for frozen, seed in ((True, 1), (True, 2), (False, 3))
    )
    for each in (model, trains):
        arrange(each, "FSDP", world, device)
    if dist.get_rank() == 0:
        save_fp8(single, folder)
    dist.barrier()
    before = {name: x.clone() for name, x in iter_fp8(model)}
    text = complaint(NotImplementedError, lambda: load_fp8(model, folder, recipe=Recipe.deepseek()))
    assert "load before the model is sharded for another recipe" in text.replace("\n", " ")
    with pytest.raises(CheckpointError, match="trainable and would lose its high-precision"):
        load_fp8(trains, folder, strict=False)

    def unreadable(*_: Any) -> None:
        raise CheckpointError("unreadable on one rank")

    if dist.get_rank() == 0:
        monkeypatch.setattr(reading, "_box", unreadable)
    with pytest.raises(CheckpointError, match="unreadable on one rank"):
        load_fp8(model, folder)
    same_bits(dict(iter_fp8(model)), before)


@pytest.mark.parametrize("has_memory", [True, False])
@on_ranks(2)
def test_a_model_that_begins_on_the_meta_device(
    world: int, device: str, has_memory: bool, tmp_path: Path
) -> None:
    single = net(device, torch.bfloat16, Recipe(), frozen=True, seed=1)
    if dist.get_rank() == 0:
        save_fp8(single, tmp_path / "fp8")
    dist.barrier()
    model = net("meta", torch.bfloat16, Recipe(), frozen=True)
    model.head.weight = model.embed.weight  # torch unties what it moves to meta
    fully_shard(model, mesh=shared_mesh(device, world, names=("all",)))
    if has_memory:
        model.to_empty(device=device)
    load_fp8(model, tmp_path / "fp8", recipe=Recipe())
    same_bits(dict(iter_fp8(model)), dict(iter_fp8(single)))


@on_ranks(2, gpus=(2,))
def test_a_rank_with_a_part_of_each_half(mesh: DeviceMesh, device: str, tmp_path: Path) -> None:
    """Gate and up of a stack are each cut between ranks, so that a rank holds several pieces."""
    halves: Any = _StridedShard(1, split_factor=2)
    options: Any = {"skip_small": False, "stacks": {"moe": ["gate_up_proj"]}}

    def experts(seed: int, sharded: bool) -> nn.Module:
        stack = randn(2, 512, 128, seed=seed).to(device)
        model = nn.Module()
        model.moe = nn.Module()
        if sharded:
            stack = distribute_tensor(stack, mesh, [halves], src_data_rank=None)
        model.moe.gate_up_proj = nn.Parameter(stack)
        convert(model, **options)
        freeze(model)
        return model

    source, model = experts(0, sharded=False), experts(1, sharded=True)
    assert len(held(model.moe.gate_up_proj).regions) == 2
    for separate in (False, True):
        folder = tmp_path / f"{separate}"
        if dist.get_rank() == 0:
            save_fp8(source, folder, separate_experts=separate)
        dist.barrier()
        load_fp8(model, folder)
        same_bits(dict(iter_fp8(model)), dict(iter_fp8(source)))
