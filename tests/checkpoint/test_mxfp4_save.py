"""Weights on the grid of MXFP4 are saved and exported by all ranks: the bytes of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

pytest.importorskip("safetensors")

from blocktensor import (
    BlockwiseFP8Weight,
    CheckpointError,
    Recipe,
    Scales,
    convert,
    freeze,
    iter_mxfp4,
    load_fp8,
    save_mxfp4,
)
from blocktensor.checkpoint.on_disk import CONFIG, read_json
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from tests.checkpoint.test_mxfp4 import as_deepseek, linear, stored
from tests.checkpoint.test_mxfp4_export import GRID, any_codes
from tests.support.arranged import same_bits
from tests.support.checkpoint_experts import read
from tests.support.checkpoint_models import content
from tests.support.models import randn
from tests.support.ranks import on_ranks, shared_mesh

IN_POWERS = Recipe(scale=Scales(weights="power_of_two"))
GRID_KN = Recipe(scale=Scales(weights="power_of_two"), weight_grid="mxfp4_kn")
SHARD = 80_000
"""Bytes: the model below then has three files."""


class Model(nn.Module):
    """Linears of which two ranks hold parts of blocks, one without a grid, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 320), nn.Linear(320, 256, bias=False)
        self.head = nn.Linear(256, 96, bias=False)
        self.experts = nn.Module()


def made(frozen: bool = False, seed: int = 0, device: str = "cpu") -> nn.Module:
    model = Model()
    for i, x in enumerate(model.parameters(), 10 * seed):
        x.data.copy_(randn(*x.shape, seed=i, dtype=torch.float32))
    convert(model, GRID, filter=lambda _, name: name != "head", skip_small=False)
    convert(model, filter=lambda _, name: name == "head", skip_small=False)
    stack = randn(3, 256, 130, seed=seed, dtype=torch.float32)
    model.experts.down_proj = nn.Parameter(BlockwiseFP8Weight(stack, GRID_KN))
    if frozen:
        freeze(model)
    return model.to(device)


def cut(model: Any, layout: str, mesh: DeviceMesh) -> nn.Module:
    if layout == "FSDP2":
        for part in (model.up, model.experts, model):
            fully_shard(part, mesh=mesh)
        return model
    if layout == "FSDP2 over TP and EP":
        return cut(cut(model, "TP and EP", mesh["b"]), "FSDP2", mesh["a"])
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stack = distribute_tensor(model.experts.down_proj.detach(), mesh, [Shard(0)])
    model.experts.down_proj = nn.Parameter(stack)
    return model


@on_ranks(2, 4, gpus=[2])
def test_ranks_write_the_bytes_of_one_process(world: int, device: str, tmp_path: Path) -> None:
    mesh = shared_mesh(device, world, names=("all",))
    cases = [("FSDP2", False), ("FSDP2", True), ("TP and EP", False)]
    if world == 4:
        mesh, cases = shared_mesh(device, 2, 2, names=("a", "b")), [("FSDP2 over TP and EP", False)]
    for number, (layout, frozen) in enumerate(cases):
        single, model = made(frozen, device=device), cut(made(frozen, device=device), layout, mesh)
        want = dict(iter_mxfp4(single))
        same_bits(dict(iter_mxfp4(model)), want)
        same_bits(dict(iter_mxfp4(model, rank=1)), want if dist.get_rank() == 1 else {})
        folder, alone = tmp_path / f"{number}", tmp_path / f"alone{number}"
        if dist.get_rank() == 0:
            save_mxfp4(single, alone, max_shard_bytes=SHARD)
        assert save_mxfp4(model, folder, max_shard_bytes=SHARD) == folder
        dist.barrier()
        assert content(folder) == content(alone)
        assert len([*folder.glob("*.safetensors")]) == 3
        # what was loaded, with scales that are not the smallest
        tensors, given = read(alone) | as_deepseek(*any_codes(256, 320), "down"), tmp_path / "given"
        if dist.get_rank() == 0:
            given.mkdir(exist_ok=True)
            stored(given, tensors)
        dist.barrier()
        other = cut(made(frozen, 1, device), layout, mesh)
        load_fp8(other, given, trainable=not frozen)
        save_mxfp4(other, folder, like=given, overwrite=True)
        dist.barrier()
        same_bits(dict(sorted(read(folder).items())), dict(sorted(tensors.items())))


@on_ranks(2, gpus=())
def test_what_ranks_cannot_export(mesh: DeviceMesh, tmp_path: Path) -> None:
    inside = nn.Sequential(nn.Linear(96, 64, bias=False))  # halves of 48 columns
    convert(inside, GRID, skip_small=False)
    parallelize_module(inside, mesh, {"0": RowwiseParallel()})
    for export in (lambda: [*iter_mxfp4(inside)], lambda: save_mxfp4(inside, tmp_path / "inside")):
        with pytest.raises(NotImplementedError, match=r"parts of 48 .* need whole groups of 32"):
            export()
    model, like = cut(made(), "TP and EP", mesh), tmp_path / "like"
    if dist.get_rank() == 0:
        like.mkdir()
        stored(like, as_deepseek(*any_codes(64, 64)))
    dist.barrier()
    with pytest.raises(CheckpointError, match="no checkpoint"):  # on both ranks
        iter_mxfp4(model, like=like if dist.get_rank() == 0 else tmp_path)
    if dist.get_rank() == 0:
        (like / "model.safetensors").unlink()
    other = nn.Sequential(nn.Linear(256, 256, bias=False)).requires_grad_(False)
    convert(other, IN_POWERS, skip_small=False)
    other[0].weight.recipe = GRID  # the cast had none
    fully_shard(other, mesh=mesh)
    with pytest.raises(ValueError, match=r"0\.weight has values that are not on the grid"):
        save_mxfp4(other, tmp_path / "other")  # on all ranks, also those that encode nothing
    dist.barrier()
    assert not any(any(path.iterdir()) for path in tmp_path.iterdir())


def test_it_writes_what_iter_mxfp4_yields(tmp_path: Path) -> None:
    model = made()
    folder = save_mxfp4(model, tmp_path / "made", config={"name": 1})
    same_bits(dict(sorted(read(folder).items())), dict(sorted(iter_mxfp4(model))))
    described = read_json(folder / CONFIG)
    assert described["name"] == 1
    described = described["quantization_config"]
    assert (described["quant_method"], described["expert_dtype"]) == ("fp8", "fp4")
    # a file may be as large as asked, and no larger
    sizes = [
        file.stat().st_size
        for file in save_mxfp4(model, tmp_path / "cut", max_shard_bytes=SHARD).glob("*.safetensors")
    ]
    assert max(sizes) < SHARD + 2_000 and len(sizes) == 3
    # the bytes that were loaded, with scales that are not the smallest
    tensors = as_deepseek(*any_codes(200, 160))
    given = stored(tmp_path, tensors)
    loaded = linear(200, 160)
    load_fp8(loaded, given, recipe=GRID)
    save_mxfp4(loaded, given, like=given, overwrite=True)  # in its place
    same_bits(dict(sorted(read(given).items())), dict(sorted(tensors.items())))


def test_transformers_reads_gpt_oss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 50}
    counts = {"num_local_experts": 2, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **counts, **heads))
    convert(model, GRID, skip_small=False, skip=["*.self_attn.*", "lm_head"])
    folder = save_mxfp4(model, tmp_path / "made")
    assert read_json(folder / CONFIG)["quantization_config"]["quant_method"] == "mxfp4"
    in_bf16 = transformers.Mxfp4Config(dequantize=True)
    again = transformers.GptOssForCausalLM.from_pretrained(folder, quantization_config=in_bf16)
    for name in ("gate_up_proj", "down_proj"):
        x, y = (each.get_parameter(f"model.layers.0.mlp.experts.{name}") for each in (again, model))
        assert torch.equal(x, y.dequantize().to(x.dtype)), name
