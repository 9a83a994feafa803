"""Weights stored in MXFP4, loaded into models that are cut between ranks."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, Recipe, Scales, convert, load_fp8
from blocktensor.checkpoint import files as reading
from blocktensor.distributed import RowwiseParallel
from blocktensor.sharding import cuts
from blocktensor.sharding.dtensor import own_part
from tests.checkpoint.test_mxfp4 import as_deepseek, biased, codes_of, packed, stored, values_of
from tests.support.published import local_bytes
from tests.support.ranks import on_ranks, shared_mesh

E, N, K, ROWS = 3, 256, 384, 320
WEIGHTS_IN_POWERS = Recipe(scale=Scales(weights="power_of_two"))
SHAPES = {"experts.gate_up_proj": (E, 2 * N, K), "experts.down_proj": (E, K, N)}
HALVES = _StridedShard(1, split_factor=2)
CUTS: dict[str, dict[str, Placement]] = {
    "experts": dict.fromkeys(SHAPES, Shard(0)),
    "rows": {"experts.gate_up_proj": Shard(1)},
    "halves": {"experts.gate_up_proj": HALVES, "experts.down_proj": Shard(2)},
}


class Model(nn.Module):
    """Two stacks of experts and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        for name, shape in SHAPES.items():
            setattr(self.experts, name.partition(".")[2], nn.Parameter(torch.zeros(shape)))
        self.linear = nn.Linear(K, ROWS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def made() -> nn.Module:
    with torch.device("meta"):
        model = Model()
    stacks = {"experts": ["gate_up_proj", "down_proj"]}
    convert(model, WEIGHTS_IN_POWERS, stacks=stacks, skip_small=False)
    return model


def cut(model: nn.Module, layout: str, mesh: DeviceMesh) -> nn.Module:
    """Cut a model over a mesh; over both dimensions of it for "FSDP2 over"."""
    if layout == "FSDP2":
        fully_shard(model, mesh=mesh)
        return model
    if layout == "inside of blocks":
        return parallelize_module(model, mesh, {"linear": RowwiseParallel()})
    if layout.startswith("FSDP2 over "):
        cut(model, layout.removeprefix("FSDP2 over "), mesh["b"])
        return cut(model, "FSDP2", mesh["a"])
    for name, placement in CUTS[layout].items():
        home, _, last = name.rpartition(".")
        x = model.get_parameter(name)
        part = distribute_tensor(x.detach(), mesh, [placement], src_data_rank=None)
        setattr(model.get_submodule(home), last, nn.Parameter(part, x.requires_grad))
    return model


def of_each_expert(far: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What DeepSeek-V4 stores, and the values; one block of each w1 has exponents ``far`` apart."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    seed = 0

    def drawn(name: str, n: int, k: int) -> Tensor:
        nonlocal seed
        seed += 1
        codes, exponents = codes_of(n, k, seed)
        if name.endswith("w1"):
            codes[:128, :128], exponents[:128, :4] = 1, 0
            codes[3, 3], exponents[5, 1] = 7, -far
        tensors.update(as_deepseek(codes, exponents, name))
        return values_of(codes, exponents)

    for e in range(E):
        w1, w3 = (drawn(f"experts.{e}.{name}", N, K) for name in ("w1", "w3"))
        values[f"gate_up {e}"] = torch.cat([w1, w3])
        values[f"down {e}"] = drawn(f"experts.{e}.w2", K, N)
    values["linear"] = drawn("linear", ROWS, K)
    return tensors, values


def of_stacks() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What gpt-oss stores: stacks whose transposes the module holds."""
    tensors, values = {}, {}
    for short, name in (("gate_up", "experts.gate_up_proj"), ("down", "experts.down_proj")):
        experts, n, k = SHAPES[name]
        drawn = [codes_of(k, n, seed) for seed in range(experts)]
        codes, exponents = (torch.stack([each[i] for each in drawn]) for i in (0, 1))
        tensors[f"{name}_blocks"] = packed(codes).view(experts, k, n // 32, 16)
        tensors[f"{name}_scales"] = biased(exponents)
        values |= {f"{short} {e}": values_of(*each).t() for e, each in enumerate(drawn)}
    codes, exponents = codes_of(ROWS, K, 9)
    tensors |= as_deepseek(codes, exponents, "linear")
    values["linear"] = values_of(codes, exponents)
    return tensors, values


def check(kind: str, layouts: Sequence[str], folder: Path, mesh: DeviceMesh) -> None:
    """A load by shard reads the part of each rank, and gives it the bytes of a whole load."""
    tensors, values = KINDS[kind]()
    write(folder, tensors)
    for trainable in (False, True):
        single = made()
        load_fp8(single, folder, device=mesh.device_type, trainable=trainable)
        whole = {name: plain(single.get_parameter(name)) for name in (*SHAPES, "linear.weight")}
        for e in range(E):
            assert torch.equal(whole["experts.gate_up_proj"][e], values[f"gate_up {e}"])
            assert torch.equal(whole["experts.down_proj"][e], values[f"down {e}"])
        assert torch.equal(whole["linear.weight"], values["linear"])
        for layout in layouts:
            if layout == "inside of blocks" and not trainable:
                continue
            model = cut(made(), layout, mesh)
            with counting() as asked:
                report = load_fp8(model, folder, trainable=trainable)
            assert report.rounded == {} and not report.missing
            numbers = sum(numbers_in_blocks_of(x) for x in model.parameters())
            assert asked == {"codes": numbers // 2, "scales": numbers // 32}, layout
            want, got = local_bytes(cut(copy.deepcopy(single), layout, mesh)), local_bytes(model)
            assert got.keys() == want.keys()
            for name, x in want.items():
                assert torch.equal(got[name], x), (layout, name, trainable)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the bytes that are read of codes and of scales."""
    asked: dict[str, int] = defaultdict(int)
    box = reading._box

    def counted(entry: Any, *at: Any) -> Tensor:
        x = box(entry, *at)
        asked["scales" if entry.name.endswith(("scale", "_scales")) else "codes"] += x.nbytes
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_box", counted)
        yield asked


def numbers_in_blocks_of(x: Any) -> int:
    """Count the numbers in the blocks of which this rank holds a part."""
    held = torch.zeros(x.shape, dtype=torch.bool)
    for region in cuts.held(x).regions:
        *lead, rows, cols = region.slices
        rows, cols = (slice(i.start // 128 * 128, -(-i.stop // 128) * 128) for i in (rows, cols))
        held[(*lead, rows, cols)] = True
    return int(held.sum())


def plain(x: Tensor) -> Tensor:
    found: Tensor = x.dequantize() if not x.requires_grad else x.master
    return found.float().cpu()


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    if dist.get_rank() == 0:
        stored(folder, tensors)
    dist.barrier()
    return folder


KINDS: dict[str, Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]] = {
    "matrices": lambda: of_each_expert(14),
    "stacks": of_stacks,
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_each_rank_holds_what_a_whole_load_gives_it(
    mesh: DeviceMesh, kind: str, tmp_path: Path
) -> None:
    check(kind, [*CUTS, "inside of blocks", "FSDP2"], tmp_path, mesh)


@on_ranks(4, gpus=())
def test_fsdp2_over_parallel_experts(tmp_path: Path) -> None:
    mesh = shared_mesh("cpu", 2, 2, names=("a", "b"))
    check("stacks", ["FSDP2 over rows", "FSDP2 over halves"], tmp_path, mesh)


@on_ranks(2, gpus=())
def test_blocks_that_are_not_exact_are_counted_once(mesh: DeviceMesh, tmp_path: Path) -> None:
    """By each rank that has read them, for one or for several parts."""
    codes, exponents = codes_of(ROWS, K)
    codes[128:256, :128], exponents[128:256, :4] = 1, 0
    codes[130, 3], exponents[140, 1] = 7, -15
    tensors = of_each_expert(15)[0] | as_deepseek(codes, exponents, "linear")
    model = cut(made(), "experts", mesh)
    report = load_fp8(model, write(tmp_path, tensors))
    mine = range(2) if mesh.get_local_rank() == 0 else range(2, 3)
    of_experts = {f"experts.{e}.w1.weight": 1 for e in mine}
    assert report.rounded == {**of_experts, "linear.weight": 1}
    assert own_part(model.experts.down_proj).shape[0] == len(mine)
    plain = nn.Module()
    plain.linear = nn.Linear(K, ROWS, bias=False)
    both = [_StridedShard(0, split_factor=2)]  # the second rank has two parts of the block
    cast_twice = distribute_tensor(plain.linear.weight.detach(), mesh, both)
    plain.linear.weight = nn.Parameter(cast_twice)
    with pytest.warns(UserWarning, match="no weight of this Module is in FP8"):
        report = load_fp8(plain, tmp_path, strict=False, trainable=True)
    assert report.rounded == {"linear.weight": 1}


@on_ranks(2, gpus=())
def test_a_bad_scale_of_one_rank_stops_all(mesh: DeviceMesh, tmp_path: Path) -> None:
    """The error has the block of the whole weight; only the second rank reads it."""
    tensors = of_stacks()[0]
    tensors["linear.scale"].view(torch.uint8)[300, 5] = 255  # NaN
    model = cut(made(), "FSDP2", mesh)
    with pytest.raises(CheckpointError, match=r"linear.*the scale of block \[2, 1\] is nan"):
        load_fp8(model, write(tmp_path, tensors))
    assert all(x.is_meta for x in model.parameters())
