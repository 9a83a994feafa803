"""Weights stored in MXFP4, loaded into models that are cut between ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

pytest.importorskip("safetensors")

from blocktensor import Recipe, Scales, convert, load_fp8
from blocktensor.sharding.dtensor import own_part
from tests.checkpoint.test_mxfp4 import as_deepseek, biased, codes_of, packed, stored, values_of
from tests.support.published import local_bytes
from tests.support.ranks import on_ranks

E, N, K = 3, 256, 384
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
        self.linear = nn.Linear(K, 2 * N, bias=False)

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
    if layout == "FSDP2":
        fully_shard(model, mesh=mesh)
        return model
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
    values["linear"] = drawn("linear", 2 * N, K)
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
    codes, exponents = codes_of(2 * N, K, 9)
    tensors |= as_deepseek(codes, exponents, "linear")
    values["linear"] = values_of(codes, exponents)
    return tensors, values


def check(layout: str, folder: Path, mesh: DeviceMesh, values: dict[str, Tensor]) -> None:
    """A load by shard gives each rank the bytes of a whole load that is cut afterwards."""
    for trainable in (False, True):
        single, model = made(), cut(made(), layout, mesh)
        load_fp8(single, folder, device="cpu", trainable=trainable)
        whole = {name: plain(single.get_parameter(name)) for name in (*SHAPES, "linear.weight")}
        for e in range(E):
            assert torch.equal(whole["experts.gate_up_proj"][e], values[f"gate_up {e}"])
            assert torch.equal(whole["experts.down_proj"][e], values[f"down {e}"])
        assert torch.equal(whole["linear.weight"], values["linear"])
        report = load_fp8(model, folder, trainable=trainable)
        assert report.rounded == {} and not report.missing
        got, want = local_bytes(model), local_bytes(cut(single, layout, mesh))
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert torch.equal(got[name], x), (name, trainable)


def plain(x: Tensor) -> Tensor:
    found: Tensor = x.dequantize() if not x.requires_grad else x.master
    return found.float()


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    if dist.get_rank() == 0:
        stored(folder, tensors)
    dist.barrier()
    return folder


KINDS: dict[str, Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]] = {
    "matrices": lambda: of_each_expert(14),
    "stacks": of_stacks,
}


@pytest.mark.parametrize("layout", [*CUTS, "FSDP2"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, gpus=())
def test_each_rank_holds_what_a_whole_load_gives_it(
    mesh: DeviceMesh, kind: str, layout: str, tmp_path: Path
) -> None:
    tensors, values = KINDS[kind]()
    check(layout, write(tmp_path, tensors), mesh, values)


@on_ranks(2, gpus=())
def test_blocks_that_are_not_exact_are_counted(mesh: DeviceMesh, tmp_path: Path) -> None:
    """By the ranks that have read them."""
    tensors, _ = of_each_expert(15)
    model = cut(made(), "experts", mesh)
    report = load_fp8(model, write(tmp_path, tensors))
    mine = range(2) if mesh.get_local_rank() == 0 else range(2, 3)
    assert report.rounded == {f"experts.{e}.w1.weight": 1 for e in mine}
    assert own_part(model.experts.down_proj).shape[0] == len(mine)
