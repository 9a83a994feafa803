"""load_fp8 into sharded models: all ranks change or none; for what loads see test_export.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, Recipe, iter_fp8, load_fp8, save_fp8
from blocktensor.checkpoint import load
from tests.support.arranged import arrange, net, same_bits
from tests.support.models import complaint
from tests.support.ranks import on_ranks, shared_mesh

BF16 = torch.bfloat16


@on_ranks(2)
def test_what_cannot_be_loaded_changes_nothing_on_any_rank(
    world: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fp8"
    single, model, trains = (
        net(device, BF16, Recipe(), frozen=frozen, seed=seed, aligned=True)
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
        monkeypatch.setattr(load, "_tensor", unreadable)
    with pytest.raises(CheckpointError, match="unreadable on one rank"):
        load_fp8(model, folder)
    same_bits(dict(iter_fp8(model)), before)


@on_ranks(2)
def test_a_model_that_begins_on_the_meta_device(world: int, device: str, tmp_path: Path) -> None:
    single = net(device, BF16, Recipe(), frozen=True, seed=1)
    if dist.get_rank() == 0:
        save_fp8(single, tmp_path / "fp8")
    dist.barrier()
    model = net("meta", BF16, Recipe(), frozen=True)
    model.head.weight = model.embed.weight  # torch unties what it moves to meta
    mesh = shared_mesh(device, world, names=("all",))
    fully_shard(model, mesh=mesh)
    text = complaint(NotImplementedError, lambda: load_fp8(model, tmp_path / "fp8"))
    assert "is sharded and on the meta device: give it memory first" in text.replace("\n", " ")
    model.to_empty(device=device)
    load_fp8(model, tmp_path / "fp8")
    same_bits(dict(iter_fp8(model)), dict(iter_fp8(single)))
