"""torch.distributed.checkpoint of frozen FP8 weights: bytes for any cut; adapters resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, freeze, iter_fp8
from tests.support.arranged import ARRANGEMENTS, arrange, facts, fsdp, net, same_bits
from tests.support.models import Conv1D, complaint, randn
from tests.support.ranks import on_ranks
from tests.support.sharded_checkpoints import (
    IN_FP32,
    Averaged,
    assert_same_tensors,
    first_ranks,
    load,
    save,
    train,
)

POWERS = Recipe(scale="power_of_two")


def frozen(device: str, seed: int, recipe: Recipe = POWERS) -> nn.Module:
    return net(device, torch.bfloat16, recipe, frozen=True, seed=seed)


def write(model: nn.Module, folder: Path) -> None:
    dcp.save({"model": dcs.get_model_state_dict(model)}, checkpoint_id=folder)


def read(model: nn.Module, folder: Path, **options: Any) -> None:
    state = {"model": dcs.get_model_state_dict(model, options=dcs.StateDictOptions(**options))}
    dcp.load(state, checkpoint_id=folder)
    dcs.set_model_state_dict(model, state["model"])


@pytest.mark.parametrize("how", ARRANGEMENTS)
@on_ranks(2, 4, gpus=(2,))
def test_one_arrangement_saves_and_others_load(
    world: int, device: str, how: str, tmp_path: Path
) -> None:
    model = frozen(device, 1)
    if not arrange(model, how, world, device):
        return
    want = dict(iter_fp8(frozen(device, 1)))
    write(model, tmp_path)
    for other in (how, "FSDP", "TP and EP", "FSDP over TP and EP", "none"):
        model = frozen(device, 2)
        if other == "none" or arrange(model, other, world, device):
            before = facts(model)
            read(model, tmp_path)
            same_bits(dict(iter_fp8(model)), want)
            assert facts(model) == before


@on_ranks(2, gpus=())
def test_what_is_saved_is_the_memory_of_the_model(mesh: DeviceMesh, tmp_path: Path) -> None:
    """One byte a parameter, of which a rank saves and loads its rows, and the scales."""
    model = frozen("cpu", 1)
    fsdp(model, mesh)
    weight = model.down.weight
    parts = dcs.get_model_state_dict(model)["down.weight"]
    assert list(parts) == ["data", "scale"]
    local = weight._local_tensor
    for part, held in zip(parts.values(), (local.data_rows, local.scale), strict=True):
        assert part._local_tensor.data_ptr() == held.data_ptr()
        assert part._local_tensor.shape == held.shape
    write(model, tmp_path)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "model.down.weight" not in stored
    data, scale = (stored[f"model.down.weight.{part}"] for part in parts)
    assert (data.size, data.properties.dtype) == ((260, 512), torch.float8_e4m3fn)
    assert [chunk.sizes for chunk in data.chunks] == [(130, 512), (130, 512)]
    assert (scale.size, scale.properties.dtype, len(scale.chunks)) == ((3, 4), torch.float32, 1)


@pytest.mark.filterwarnings("ignore:.*typed_storage:UserWarning")
@on_ranks(2, gpus=())
def test_other_ways_to_save_and_load(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, want = frozen("cpu", 1), dict(iter_fp8(frozen("cpu", 1)))
    fsdp(model, mesh)
    dcp.async_save({"model": dcs.get_model_state_dict(model)}, checkpoint_id=tmp_path).result()
    for take in (
        lambda model: read(model, tmp_path, cpu_offload=True),
        lambda other: dcs.set_model_state_dict(other, dcs.get_model_state_dict(model)),
        lambda other: other.load_state_dict(dcs.get_model_state_dict(model), assign=True),
        lambda other: other.load_state_dict(model.state_dict()),
    ):
        other = frozen("cpu", 2)
        fsdp(other, mesh)
        take(other)
        got = dict(iter_fp8(other))  # assign=True unties
        same_bits({name: got[name] for name in want}, want)
        assert torch.equal(other.down.weight._local_tensor.scale, want["down.weight_scale_inv"])


@on_ranks(2, gpus=())
def test_fsdp_may_cut_every_expert_and_columns(mesh: DeviceMesh, tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        model = frozen("cpu", seed)
        for part in (model.experts, model.down):
            fully_shard(part, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
        fully_shard(model, mesh=mesh)
        return model

    write(made(1), tmp_path)
    for other in (made(2), frozen("cpu", 2)):
        read(other, tmp_path)
        same_bits(dict(iter_fp8(other)), dict(iter_fp8(frozen("cpu", 1))))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_whole_and_transposed_weights(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(Conv1D(300, 200), nn.Linear(300, 130)).bfloat16()
        convert(model, skip_small=False)
        freeze(model)
        return model

    model, other = made(1), made(2)
    write(model, tmp_path)
    read(other, tmp_path)
    assert other[0].weight.operand.rowwise is None
    parts = dcs.get_model_state_dict(other)["0.weight"]
    assert parts["data"].data_ptr() == other[0].weight.columnwise_data.data_ptr()
    assert parts["scale"].data_ptr() == other[0].weight.columnwise_scale.data_ptr()
    same_bits(dict(iter_fp8(other)), dict(iter_fp8(model)))
    x = randn(5, 200)
    assert torch.equal(other(x), model(x))
    other.to("meta").load_state_dict(dcs.get_model_state_dict(other))


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 8, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(8, base.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(192, 130), nn.ReLU(), nn.Linear(130, 300), nn.ReLU(), nn.Linear(300, 3)
    base = nn.Sequential(*layers).bfloat16().requires_grad_(False)
    convert(base, skip_small=False)
    assert all(isinstance(layer.weight, BlockwiseFP8Tensor) for layer in base[::2])
    return nn.Sequential(*(Lora(x) if isinstance(x, nn.Linear) else x for x in base))


def sharded(seed: int, mesh: DeviceMesh) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = adapted(seed)
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh, mp_policy=IN_FP32)
    return model, Averaged((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def trained_on(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    losses = [train(model, optimizer, step) for step in (2, 3, 4)]
    whole = {n: p.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    return {"losses": torch.stack(losses), **{n: p.detach() for n, p in whole.items()}}


@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 3), (4, 2), (3, 1), (1, 2)])
@on_ranks(4, gpus=())
def test_adapters_resume_with_their_base(source: int, target: int, tmp_path: Path) -> None:
    rank, from_mesh, to_mesh = dist.get_rank(), first_ranks(source), first_ranks(target)
    if rank < source:
        model, optimizer = sharded(0, from_mesh)
        for step in (0, 1):
            train(model, optimizer, step)
        save(model, optimizer, tmp_path, from_mesh)
        wanted = trained_on(model, optimizer)
        assert wanted["losses"][-1] < wanted["losses"][0]
    dist.barrier()
    if rank < target:
        model, optimizer = sharded(1, to_mesh)  # another base, which has run
        train(model, optimizer, 5)
        load(model, optimizer, tmp_path, to_mesh)
        found = trained_on(model, optimizer)
        if rank < source:
            assert_same_tensors(found, wanted)


@on_ranks(2, gpus=())
def test_what_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    def refused(error: type[Exception], run: Callable[[], Any]) -> str:
        return complaint(error, run).replace("\n", " ")

    model, trainable = frozen("cpu", 1, Recipe()), net("cpu", torch.bfloat16, POWERS, frozen=False)
    whole = frozen("cpu", 1, Recipe())
    for each in (model, trainable):
        fsdp(each, mesh)
    state = dcs.get_model_state_dict(model)
    for each in (model, whole):
        with pytest.raises(dcp.CheckpointException, match=r"give it the state of get_model_state"):
            dcp.save(each.state_dict(), checkpoint_id=tmp_path / "one")
    write(model, tmp_path / "two")
    with pytest.raises(dcp.CheckpointException, match=r"Missing key .*: model.up.weight\."):
        read(trainable, tmp_path / "two")
    write(trainable, tmp_path / "three")
    with pytest.raises(dcp.CheckpointException, match=r"Missing key .*: model.up.weight.data\."):
        read(model, tmp_path / "three")

    text = refused(ValueError, lambda: dcs.set_model_state_dict(trainable, dict(state)))
    assert "up.weight is loaded as the bytes and scales" in text and "freeze the model" in text
    text = refused(ValueError, lambda: dcs.set_model_state_dict(whole, dict(state)))
    assert (
        "is loaded in parts {'data': [torch.Size([512, 300]), torch.float8_e4m3fn, (Shard(dim=0),)]"
        in text
    )
    powers = frozen("cpu", 1)
    fsdp(powers, mesh)
    text = refused(ValueError, lambda: read(powers, tmp_path / "two"))
    assert "expected a power of two" in text and "with the recipe of the checkpoint" in text


@on_ranks(2, gpus=())
def test_several_pieces_of_a_rank_are_refused(mesh: DeviceMesh) -> None:
    """As of gate and up in one stack; torch cannot save plain tensors that are cut so either."""
    stack = nn.Module()
    halves: Any = _StridedShard(1, split_factor=2)
    for cut in (Shard(1), halves):
        weight: Any = distribute_tensor(randn(3, 512, 130), mesh, [cut], src_data_rank=None)
        weight._local_tensor = BlockwiseFP8Tensor.from_values(weight.to_local(), (128, 128))
        stack.weight = nn.Parameter(weight, requires_grad=False)
        if cut is not halves:
            assert list(dcs.get_model_state_dict(stack)["weight"]) == ["data", "scale"]
    text = complaint(NotImplementedError, lambda: dcs.get_model_state_dict(stack))
    assert "gives a rank several pieces" in text.replace("\n", " ") and "save_fp8" in text
