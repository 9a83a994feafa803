"""Scales that are rounded differently for activations, gradients and weights."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import (
    BlockwiseFP8Weight,
    CheckpointError,
    Recipe,
    Scales,
    convert,
    freeze,
    functional,
    load_fp8,
    quantize,
    save_fp8,
)
from tests.support.linear_ways import grads_of, way_of_linears
from tests.support.models import X_IN_POWERS, assert_matches, composed, linear, plain, randn
from tests.support.outliers import KINDS
from tests.support.sqnr import rows_on_the_page, sqnr

__all__ = ["way_of_linears"]

ALL = [Scales(*roundings) for roundings in product(("fp32", "power_of_two"), repeat=3)]


@pytest.mark.usefixtures("way_of_linears")
@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128"])
@pytest.mark.parametrize("scales", ALL, ids=str)
def test_a_linear_layer(scales: Scales, wgrad_input: Any, device: torch.device) -> None:
    """Every operand is cast in its own format."""
    recipe = Recipe(scale=scales, wgrad_input=wgrad_input)
    module = linear(200, 136, recipe=recipe, device=device)
    x, grad = randn(130, 136, device=device), randn(130, 200, seed=1, device=device)
    made = grads_of(module, x, grad)
    for actual, wanted in zip(made, composed(x, plain(module.weight), grad, recipe), strict=True):
        assert_matches(actual, wanted)


@pytest.mark.usefixtures("way_of_linears")
def test_layers_of_unequal_scales_in_one_process(device: torch.device) -> None:
    """Plans, recordings and compiled graphs of one recipe never serve another."""
    x, grad = randn(64, 128, device=device), randn(64, 128, seed=1, device=device)
    modules = [linear(128, 128, recipe=Recipe(scale=scales), device=device) for scales in ALL]
    for _ in range(2):
        for module in modules:
            wanted = composed(x, plain(module.weight), grad, module.weight.recipe)
            for actual, want in zip(grads_of(module, x, grad), wanted, strict=True):
                assert_matches(actual, want)


def test_plain_weights_of_unequal_scales(device: torch.device) -> None:
    x, w = randn(64, 128, device=device), randn(128, 128, seed=1, device=device)
    for scales in ALL:
        recipe = Recipe(scale=scales)
        y = functional.linear(x, w, recipe=recipe)
        assert_matches(y, composed(x, w, randn(64, 128, device=device), recipe)[0])


def test_operands_of_other_scales_are_refused() -> None:
    """Each operand is compared with the recipe of the weight."""
    weight = BlockwiseFP8Weight(randn(128, 128), X_IN_POWERS)
    x = randn(4, 128)
    for recipe in (X_IN_POWERS, Recipe(scale="power_of_two")):
        y = functional.linear(quantize(x, recipe), weight)
        assert torch.equal(y, functional.linear(x, weight))
        with torch.inference_mode():
            assert torch.equal(torch.mm(quantize(x, recipe), weight.t()), y)
    refused = "mixed recipes: activations are cast with scale='power_of_two' here"
    for run in (functional.linear, torch.nn.functional.linear):
        with torch.no_grad(), pytest.raises(ValueError, match=refused):
            run(quantize(x), weight)
    with pytest.raises(ValueError, match="weights of one gated MLP have scale=Scales"):
        functional.gated_mlp(x, weight, weight, BlockwiseFP8Weight(randn(128, 128)))


def test_checkpoints_hold_the_scales_of_weights(tmp_path: Path) -> None:
    def made(recipe: Recipe) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        convert(model, recipe, skip_small=False)
        return model

    powers = Recipe(scale=Scales(weights="power_of_two"))
    save_fp8(made(powers), tmp_path / "powers")
    save_fp8(made(X_IN_POWERS), tmp_path / "fp32")
    model = made(powers)
    freeze(model)
    load_fp8(model, tmp_path / "powers")
    assert model[0].weight.recipe == powers
    x = randn(4, 256, dtype=torch.float32)
    assert torch.equal(model(x), made(powers)(x))
    assert "scale='power_of_two'" in repr(model[0].weight)
    with pytest.raises(CheckpointError, match="expected a power of two"):
        load_fp8(model, tmp_path / "fp32")
    for recipe in (Recipe(), X_IN_POWERS):  # with scales in fp32, any are read
        other = made(recipe)
        freeze(other)
        load_fp8(other, tmp_path / "powers")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["0.weight"].recipe == powers


# The table of docs/guides/recipes.md

RECIPES = {
    "fp32 scales": Recipe(),
    "activations in powers of two": Recipe(scale=Scales(activations="power_of_two")),
    "all in powers of two": Recipe(scale="power_of_two"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_on_the_page(kind: str, device: torch.device) -> None:
    made = [[*sqnr(kind, recipe, device).values()] for recipe in RECIPES.values()]
    shown = rows_on_the_page("| x and g | y | dx | dw |")
    assert shown.keys() == KINDS.keys()
    for wanted, found in zip(shown[kind], zip(*made, strict=True), strict=True):
        assert wanted == pytest.approx(found, abs=0.1)
