"""Helpers of accelerate that rebuild or move parameters: they work, or refuse in clear words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.utils import set_module_tensor_to_device

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert
from tests.support.models import randn

X = randn(4, 128)


def model(frozen: bool, recipe: Recipe | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16()
    made.requires_grad_(not frozen)
    convert(made, recipe or Recipe(), skip_small=False)
    return made


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_is_rebuilt_from_an_fp8_one(frozen: bool) -> None:
    made = model(frozen, Recipe(scale="power_of_two"))
    with torch.no_grad():
        wanted = made(X)
    value = made[0].weight.detach().clone()
    set_module_tensor_to_device(made, "0.weight", "cpu", value=value)
    weight = made[0].weight
    assert type(weight) is (BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight)
    assert weight.recipe == Recipe(scale="power_of_two")
    assert weight.requires_grad is not frozen
    with torch.no_grad():
        assert torch.equal(made(X), wanted)
    if frozen:
        set_module_tensor_to_device(made, "0.weight", "meta")
        assert made[0].weight.is_meta


def test_frozen_weights_are_offloaded_to_the_cpu() -> None:
    made = model(frozen=True)
    with torch.no_grad():
        wanted = made(X)
        offloaded = cpu_offload(made, "cpu")
        assert made[0].weight.is_meta
        assert torch.equal(offloaded(X), wanted)


def load(made: nn.Module, folder: Path) -> None:
    torch.save(made.state_dict(), folder / "pytorch_model.bin")
    load_checkpoint_and_dispatch(made, str(folder / "pytorch_model.bin"), device_map={"": "cpu"})


HELPERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu_offload": lambda m, folder: cpu_offload(m, "cpu")(X),
    "disk_offload": lambda m, folder: disk_offload(m, str(folder), "cpu")(X),
    "dispatch_model": lambda m, folder: dispatch_model(
        m, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=str(folder)
    )(X),
    "load_checkpoint_and_dispatch": load,
    "set a plain value": lambda m, folder: set_module_tensor_to_device(
        m, "0.weight", "cpu", value=randn(256, 128)
    ),
}


@pytest.mark.parametrize(
    ("helper", "frozen"),
    [*((name, False) for name in HELPERS), ("disk_offload", True), ("set a plain value", True)],
)
def test_helpers_that_would_lose_the_recipe_are_refused(
    helper: str, frozen: bool, tmp_path: Path
) -> None:
    words = r"cannot be rebuilt from plain values.*convert it then|dequantize"
    made = model(frozen)
    with pytest.raises(NotImplementedError, match=words):
        HELPERS[helper](made, tmp_path)
    assert frozen or not any(p.is_meta for p in made.parameters())
