"""``load_fp8`` into DTensors of which a rank holds several pieces: part of gate and part of up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

pytest.importorskip("safetensors")

from blocktensor import Recipe, convert, freeze, load_fp8, save_fp8
from blocktensor.checkpoint import load
from blocktensor.ops.formats import Quantized
from tests.support.checkpoint_experts import read
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_same_cast

E, ROWS, K = 2, 512, 200
"""Experts; rows of gate and up together, of each one block on a rank; columns, not whole blocks."""

HALVES: Any = _StridedShard(1, split_factor=2)


class Experts(nn.Module):
    """A stack of gate and up, and a table that is never FP8, under names of transformers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(randn(E, ROWS, K, seed=seed))
        self.table = nn.Parameter(randn(E, ROWS, K, seed=seed + 10))

    def cut(self, mesh: DeviceMesh) -> Experts:
        """Give every rank a half of gate and a half of up."""
        for name, x in list(self.named_parameters()):
            cut = distribute_tensor(x.detach(), mesh, [HALVES], src_data_rank=None)
            setattr(self, name, nn.Parameter(cut))
        return self


def in_fp8(model: nn.Module) -> nn.Module:
    convert(model, skip_small=False, stacks={"experts": ["gate_up_proj"]})
    if not next(model.parameters()).is_meta:
        freeze(model)
    return model


def holder(experts: Experts) -> nn.Module:
    model = nn.Module()
    model.experts = experts
    return model


@pytest.mark.parametrize("separate", [False, True], ids=["whole", "matrices of experts"])
@pytest.mark.parametrize("is_empty", [False, True])
@on_ranks(2, gpus=())
def test_several_pieces_of_a_stack(
    mesh: DeviceMesh, is_empty: bool, separate: bool, tmp_path: Path
) -> None:
    source = in_fp8(holder(Experts(0)))
    if dist.get_rank() == 0:
        save_fp8(source, tmp_path / "fp8", separate_experts=separate)
    dist.barrier()
    assert ("experts.0.gate_proj.weight" in read(tmp_path / "fp8")) == separate
    experts = Experts(1)
    model = in_fp8(holder((experts.to("meta") if is_empty else experts).cut(mesh)))
    report = load_fp8(model, tmp_path / "fp8")
    assert report.fp8 == ("experts.gate_up_proj",)

    def mine(x: torch.Tensor) -> torch.Tensor:
        """Return this rank's half of gate and of up."""
        return torch.cat([half.chunk(2, 1)[mesh.get_local_rank()] for half in x.chunk(2, 1)], 1)

    data, scale, format = source.experts.gate_up_proj.rowwise()
    local = model.experts.gate_up_proj.to_local()
    assert_same_cast(local.rowwise(), Quantized(mine(data), mine(scale), format))
    assert torch.equal(model.experts.table.to_local(), mine(source.experts.table))


def written(mesh: DeviceMesh, path: Path) -> Path:
    if dist.get_rank() == 0:
        save_fp8(in_fp8(holder(Experts(0))), path)
    dist.barrier()
    return path


@on_ranks(2, gpus=())
def test_another_recipe_than_that_of_shards_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = in_fp8(holder(Experts(1).cut(mesh)))
    before = model.experts.gate_up_proj.to_local().rowwise()
    path = written(mesh, tmp_path / "fp8")
    with pytest.raises(NotImplementedError, match="gate_up_proj is sharded with Recipe"):
        load_fp8(model, path, recipe=Recipe(batch_invariant=True))
    assert_same_cast(model.experts.gate_up_proj.to_local().rowwise(), before)


@on_ranks(2, gpus=())
def test_a_file_that_one_rank_cannot_read_changes_no_rank(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_fp8(holder(Experts(1).cut(mesh)))
    before = model.experts.gate_up_proj.to_local().rowwise()
    table = model.experts.table.to_local().clone()
    path = written(mesh, tmp_path / "fp8")

    def fail(*args: Any) -> Any:
        raise OSError("a broken disk")

    if dist.get_rank() == 1:
        monkeypatch.setattr(load, "read_values", fail)
    with pytest.raises((OSError, RuntimeError), match="a broken disk"):
        load_fp8(model, path)
    assert_same_cast(model.experts.gate_up_proj.to_local().rowwise(), before)
    assert torch.equal(model.experts.table.to_local(), table)
