"""Weights on the grid of MXFP4, and backwards in high precision, under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from blocktensor import Recipe, Scales, convert
from blocktensor.sharding.whole import whole_tensors
from tests.support.models import randn
from tests.support.ranks import on_ranks

IN_POWERS = Scales(weights="power_of_two")
GRID = Recipe(scale=IN_POWERS, weight_grid="mxfp4")


def model_of(recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 100, bias=False), nn.Linear(100, 160, bias=False))
    convert(model, recipe, skip_small=False)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the values of the weights after a step of SGD."""
    y = model(x)
    y.square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    made: list[Tensor] = [y.detach()]
    for p in model.parameters():
        local: Any = p
        made.append(local.full_tensor() if hasattr(local, "full_tensor") else local.master)
    return made


@pytest.mark.parametrize(
    "recipe",
    [
        GRID,
        Recipe(backward="dequantized"),
        Recipe(wgrad_input="dequantized"),
        Recipe(scale=IN_POWERS, weight_grid="mxfp4", backward="dequantized"),
    ],
    ids=["grid", "backward", "wgrad", "both"],
)
@on_ranks(2)
def test_sharded_models_have_the_bits_of_one_process(
    recipe: Recipe, mesh: DeviceMesh, device: str
) -> None:
    alone, model = model_of(recipe).to(device), model_of(recipe).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for seed in range(2):
        x = randn(8, 160, dtype=torch.float32, seed=seed).to(device)
        for a, b in zip(step(model, x), step(alone, x), strict=True):
            assert torch.equal(a, b)
    forms = [*whole_tensors([*model.parameters()], lambda *_: None)]
    for form, p in zip(forms, alone.parameters(), strict=True):
        wanted = p.rowwise()  # type: ignore[attr-defined]
        assert torch.equal(form.data.view(torch.uint8), wanted.data.view(torch.uint8))


@on_ranks(2)
def test_cuts_inside_groups_are_refused(mesh: DeviceMesh, device: str) -> None:
    model = nn.Sequential(nn.Linear(96, 64, bias=False))  # halves of 48 columns
    convert(model, GRID, skip_small=False)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    model = model.to(device)
    with pytest.raises(NotImplementedError, match="need whole groups of 32"):
        model(randn(8, 96, dtype=torch.float32).to(device))


@on_ranks(2)
def test_masters_are_not_gathered(mesh: DeviceMesh, device: str) -> None:
    model = model_of(Recipe(backward="high_precision")).to(device)
    with pytest.raises(NotImplementedError, match="convert the model with backward='dequantized'"):
        fully_shard(model, mesh=mesh)
