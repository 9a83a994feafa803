"""``load_fp8`` of published layouts into models on meta that are cut between ranks."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import CheckpointError, convert, load_fp8, save_fp8, unfreeze
from blocktensor.checkpoint import files as reading
from blocktensor.distributed import ColwiseParallel
from blocktensor.sharding.dtensor import own_part
from tests.support import ranks
from tests.support.published import MODELS, TOKENS, arrange, empty, fsdp, local_bytes, written
from tests.support.ranks import on_ranks


def shared(kind: str, folder: Path) -> Path:
    """A checkpoint that the first rank writes."""
    if dist.get_rank() == 0 and not folder.exists():
        written(kind, folder)
    dist.barrier()
    return folder


def assert_same(model: nn.Module, like: nn.Module) -> None:
    """This rank holds the same bytes of two models."""
    got, want = local_bytes(model), local_bytes(like)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def check(kind: str, layout: str, world: int, device: str, folder: Path) -> None:
    """Compare loads by shard with a load that is cut afterwards, and with one process."""
    shared(kind, folder)
    cut = empty(kind, device, converted=False)
    load_fp8(cut, folder, device=device)
    whole = copy.deepcopy(cut)
    loads(kind, layout, world, device, folder, cut)
    trains(kind, layout, world, device, folder, whole)


def loads(kind: str, layout: str, world: int, device: str, folder: Path, cut: nn.Module) -> None:
    """Compare frozen weights; ``cut``: a model that is loaded and not cut yet."""
    model, single = empty(kind, device), empty(kind, device)
    load_fp8(single, folder, device=device)
    arrange(cut, layout, world, device)
    arrange(model, layout, world, device)
    report = load_fp8(model, folder)
    assert report.fp8 and not report.missing
    assert_same(model, cut)
    tokens = TOKENS.to(device)
    losses = [x(input_ids=tokens, labels=tokens).loss.detach() for x in (model, cut, single)]
    assert torch.equal(losses[0], losses[1])
    if layout == "FSDP":
        assert torch.equal(losses[0], losses[2])
    else:  # ranks round their sums before these are added
        torch.testing.assert_close(losses[0], losses[2], rtol=1e-3, atol=0)


def trains(kind: str, layout: str, world: int, device: str, folder: Path, cut: nn.Module) -> None:
    """Compare masters of a load by shard with masters that are cut afterwards."""
    model = empty(kind, device)
    unfreeze(cut)
    arrange(cut, layout, world, device)
    arrange(model, layout, world, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)  # before the load
    report = load_fp8(model, folder, trainable=True)
    assert not (report.fp8 or report.missing)
    assert_same(model, cut)
    tokens = TOKENS.to(device)
    losses = [x(input_ids=tokens, labels=tokens).loss for x in (model, cut)]
    assert torch.equal(*[loss.detach() for loss in losses])
    for loss in losses:
        loss.backward()
    for (name, x), y in zip(model.named_parameters(), cut.parameters(), strict=True):
        assert x.requires_grad and y.requires_grad, name
        assert torch.equal(own_part(x.grad), own_part(y.grad)), name
    before = local_bytes(model)["model.norm.weight"].clone()
    optimizer.step()
    assert not torch.equal(local_bytes(model)["model.norm.weight"], before)


KINDS = [(kind, layout) for kind in MODELS for layout in ("FSDP", "TP", "EP")]


@pytest.mark.parametrize(("kind", "layout"), [x for x in KINDS if x != ("Qwen3", "EP")])
@on_ranks(2, gpus=(2,))
def test_each_of_two_ranks_holds_what_a_whole_load_gives_it(
    world: int, device: str, kind: str, layout: str, tmp_path: Path
) -> None:
    check(kind, layout, world, device, tmp_path / "fp8")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(x for x in KINDS if x[0] == "DeepSeek-V3"),
        ("Qwen3", "TP"),
        ("Qwen3-MoE", "FSDP"),
        ("GLM-MoE", "EP"),
    ],
)
@on_ranks(4, gpus=())
def test_each_of_four_ranks_holds_what_a_whole_load_gives_it(
    world: int, device: str, kind: str, layout: str, tmp_path: Path
) -> None:
    over = layout if layout == "FSDP" else f"FSDP over {layout}"
    check(kind, over, world, device, tmp_path / "fp8")


@pytest.mark.parametrize(("layout", "share"), [("FSDP", 0.51), ("EP", 0.8)])
@on_ranks(2, gpus=())
def test_a_rank_reads_its_own_bytes_alone(
    world: int,
    device: str,
    layout: str,
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shared("DeepSeek-V3", tmp_path / "fp8")
    model = empty("DeepSeek-V3")
    arrange(model, layout, world, device)
    asked: dict[str, int] = defaultdict(int)
    box = reading._box

    def counted(entry: Any, *at: Any) -> torch.Tensor:
        x = box(entry, *at)
        asked["scales" if entry.name.endswith("scale_inv") else "values"] += x.nbytes
        return x

    monkeypatch.setattr(reading, "_box", counted)
    load_fp8(model, folder)
    scales = sum(x.nbytes for name, x in local_bytes(model).items() if name.endswith("scale"))
    mine = sum(x.nbytes for x in local_bytes(model).values()) - scales
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert asked["values"] == mine < share * whole
    assert asked["scales"] < 0.01 * whole


def damaged(folder: Path, how: str) -> str:
    """Damage a tensor that all ranks read, or its file; return what an error must name."""
    name = "model.layers.1.self_attn.q_proj.weight"
    file, tensors = next(
        (x, y) for x in folder.glob("*.safetensors") if name in (y := load_file(x))
    )
    if how == "a truncated file":
        file.write_bytes(file.read_bytes()[:-1])
        return file.name
    if how == "no file":
        file.unlink()
        return file.name
    if how == "a bad scale":
        tensors[f"{name}_scale_inv"][:] = 0
    elif how == "another shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        assert how == "a missing tensor"
        del tensors[name]
    save_file(tensors, file)
    return name


DAMAGES = ("a truncated file", "no file", "a bad scale", "another shape", "a missing tensor")


@pytest.mark.parametrize("layout", ["FSDP", "EP"])
@on_ranks(2, gpus=())
def test_what_one_rank_finds_damaged_stops_all(
    world: int, device: str, layout: str, tmp_path: Path
) -> None:
    folder = shared("Qwen3-MoE", tmp_path / "fp8")
    model = empty("Qwen3-MoE")
    arrange(model, layout, world, device)
    for how in DAMAGES:
        mine, what = folder, [""]
        if dist.get_rank() == 1:  # its disk has a bad copy
            mine = Path(shutil.copytree(folder, tmp_path / how))
            what = [damaged(mine, how)]
        dist.broadcast_object_list(what, src=1)
        with pytest.raises(CheckpointError, match=re.escape(what[0])) as caught:
            load_fp8(model, mine)
        assert str(tmp_path / how) in str(caught.value)
        assert all(x.is_meta for x in model.parameters())
    load_fp8(model, folder)
    assert not any(x.is_meta for x in model.parameters())


def _load_and_die(folder: Path) -> None:
    """Load on two ranks, of which the second is killed while it reads."""
    model = empty("Qwen3-MoE")
    arrange(model, "FSDP", 2, "cpu")
    box, asked = reading._box, []

    def read(entry: Any, *at: Any) -> torch.Tensor:
        asked.append(entry.name)
        if dist.get_rank() == 1 and len(asked) == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return box(entry, *at)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "_box", read)
        with pytest.raises(RuntimeError):
            load_fp8(model, folder)
    assert len(asked) > 20  # it has read all of its part
    assert all(x.is_meta for x in model.parameters())


def test_a_rank_that_is_killed_leaves_no_model_half_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_GRACE", 60.0)
    folder = written("Qwen3-MoE", tmp_path / "fp8")
    before = {x.name: x.read_bytes() for x in folder.iterdir()}
    group = ranks._Group(2, "cpu")
    group.begin(_load_and_die, folder)
    with pytest.raises(RuntimeError, match="rank 1:\nthe process died") as caught:
        group.answers()
    group.close()
    assert "rank 0" not in str(caught.value)
    assert {x.name: x.read_bytes() for x in folder.iterdir()} == before


class Linear(nn.Module):
    """A linear layer whose rows two ranks cut inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(192, 128, bias=False).bfloat16()


def cut_inside_blocks(mesh: DeviceMesh, *, is_empty: bool) -> nn.Module:
    model = Linear()
    if is_empty:
        model.up.weight = nn.Parameter(model.up.weight.to("meta"))
    convert(model, skip_small=False)
    return parallelize_module(model, mesh, {"up": ColwiseParallel()})


@on_ranks(2, gpus=())
def test_parts_inside_of_blocks_train_and_cannot_be_frozen(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "fp8"
    source = Linear()
    convert(source, skip_small=False)
    if dist.get_rank() == 0:
        save_fp8(source, folder)
    dist.barrier()
    model = cut_inside_blocks(mesh, is_empty=True)
    with pytest.raises(NotImplementedError, match=r"up\.weight.*cut 128x128 .*trainable=True"):
        load_fp8(model, folder)
    single = Linear()
    load_fp8(single, folder)
    mine = single.up.weight.dequantize().chunk(2)[mesh.get_local_rank()]
    for is_empty in (True, False):
        model = cut_inside_blocks(mesh, is_empty=is_empty)
        load_fp8(model, folder, trainable=True)
        assert torch.equal(model.up.weight.to_local().master, mine)


@on_ranks(2, gpus=())
def test_a_sharded_model_that_is_not_converted(mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = shared("Qwen3", tmp_path / "fp8")
    model, single = (empty("Qwen3", converted=False) for _ in range(2))
    fsdp(model, mesh)
    with pytest.raises(NotImplementedError, match=r"sharded in torch\.bfloat16: convert the model"):
        load_fp8(model, folder)
    with pytest.warns(UserWarning, match=r"blocktensor\.convert converts the model"):
        load_fp8(model, folder, trainable=True)
    load_fp8(single, folder)
    unfreeze(single)
    fsdp(single, mesh)
    convert(model, skip_small=False)
    assert_same(model, single)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_weights_that_accelerate_offloads_are_refused(how: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    folder = written("Qwen3", tmp_path / "fp8")
    model, plain = empty("Qwen3", converted=False), empty("Qwen3", converted=False)
    load_fp8(plain, folder)
    model.to_empty(device="cpu")
    if how == "cpu_offload":
        accelerate.cpu_offload(model, "cpu")
    elif how == "disk_offload":
        accelerate.disk_offload(model, tmp_path / "off", "cpu")
    else:
        places = {"model": "cpu", "lm_head": "disk"}
        accelerate.dispatch_model(model, places, "cpu", offload_dir=tmp_path / "off")
    with pytest.raises(NotImplementedError, match="accelerate offloads the weights of"):
        load_fp8(model, folder)
    accelerate.hooks.remove_hook_from_submodules(model)
    load_fp8(model, folder)
    assert_same(model, plain)


def test_a_report_names_buffers_that_are_still_empty(tmp_path: Path) -> None:
    folder = written("Qwen3", tmp_path / "fp8")
    model = empty("Qwen3").to("meta")
    report = load_fp8(model, folder)
    assert report.empty == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    assert "model.rotary_emb.inv_freq  " in str(report)
    assert "on meta, not persistent: compute it" in str(report)
