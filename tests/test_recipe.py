"""Recipe: its choices, its checks, and that nobody can change one."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import blocktensor
from blocktensor import Recipe, Scales
from tests.support.models import complaint


def test_the_defaults() -> None:
    values = "scale='fp32', cache_weight='backward', wgrad_input='128x128', batch_invariant=False"
    assert repr(Recipe()) == f"Recipe({values}, backward='fp8', weight_grid=None)"


@pytest.mark.parametrize(("scale", "power_of_two"), [("fp32", False), ("power_of_two", True)])
@pytest.mark.parametrize("cache_weight", [False, "backward"])
@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision", "dequantized"])
def test_every_choice_is_a_value(
    scale: Any, power_of_two: bool, cache_weight: Any, wgrad_input: Any
) -> None:
    recipe = Recipe(scale, cache_weight, wgrad_input)
    twin = Recipe(scale=scale, cache_weight=cache_weight, wgrad_input=wgrad_input)
    assert recipe.power_of_two is power_of_two
    assert recipe == twin == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(twin)
    for name, one, other in (
        ("cache_weight", False, "backward"),
        ("wgrad_input", "1x128", "128x128"),
        ("batch_invariant", False, True),
    ):
        value = other if getattr(recipe, name) == one else one
        assert recipe != dataclasses.replace(recipe, **{name: value})


def test_named_recipes_are_frozen() -> None:
    assert Recipe.deepseek() == Recipe(wgrad_input="1x128")
    assert Recipe.accurate() == Recipe(wgrad_input="high_precision")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().scale = "power_of_two"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", v) for v in ("ue8m0", "FP32", "", None, True)),
        *(("cache_weight", v) for v in ("step", None, 1, 0, True)),
        *(("wgrad_input", v) for v in ("bf16", None, (128, 128), "128x1")),
        *(("batch_invariant", v) for v in ("yes", None, 1)),
        *(("backward", v) for v in ("bf16", None, True)),
        *(("weight_grid", v) for v in ("nvfp4", False, 4)),
    ],
)
def test_other_values_are_refused(name: str, value: Any) -> None:
    choices = {
        "scale": "'fp32', 'power_of_two', or a blocktensor.Scales",
        "cache_weight": "'backward', False",
        "wgrad_input": "'1x128', '128x128', 'high_precision', 'dequantized'",
        "batch_invariant": "False, True",
        "backward": "'fp8', 'high_precision', 'dequantized'",
        "weight_grid": "None, 'mxfp4', 'mxfp4_kn'",
    }
    text = complaint(ValueError, lambda: Recipe(**{name: value}))
    assert text.replace("\n", " ") == f"Recipe({name}={value!r}): expected one of {choices[name]}"


OPERANDS = "activations", "gradients", "weights"


def test_scales_of_operands() -> None:
    """Each combination is a value; equal choices are equal recipes, however they are given."""
    made = set()
    for roundings in product(("fp32", "power_of_two"), repeat=3):
        scales = Scales(*roundings)
        recipe = Recipe(scale=scales)
        assert tuple(map(recipe.scale_of, OPERANDS)) == roundings
        assert recipe == Recipe(scale=scales) == pickle.loads(pickle.dumps(recipe))
        assert recipe == dataclasses.replace(recipe) == eval(repr(recipe))
        formats = recipe.activation_format, recipe.gradient_format, recipe.weight_format
        assert tuple(x.scale_rounding for x in formats) == roundings
        for wgrad_input in ("1x128", "128x128"):
            format = Recipe(scale=scales, wgrad_input=wgrad_input).wgrad_input_format
            assert format is not None
            assert (format.name.partition("_")[0], format.scale_rounding) == (
                wgrad_input,
                roundings[0],
            )
        assert recipe.power_of_two == (set(roundings) == {"power_of_two"})
        made.add(recipe)
    assert len(made) == 8
    assert Recipe(scale=Scales()) == Recipe()
    assert Recipe(scale=Scales(*["power_of_two"] * 3)) == Recipe(scale="power_of_two")


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("value", ["ue8m0", "", None, True, ("fp32",)])
def test_other_scales_are_refused(operand: str, value: Any) -> None:
    text = complaint(ValueError, lambda: Scales(**{operand: value}))
    assert text == f"Scales({operand}={value!r}): expected one of 'fp32', 'power_of_two'"


@pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
def test_its_formats(scale: Any) -> None:
    recipe = Recipe(scale=scale)
    activations, weights = recipe.activation_format, recipe.weight_format
    assert (activations.block_shape, weights.block_shape) == ((1, 128), (128, 128))
    assert activations.scale_rounding == weights.scale_rounding == scale
    wgrad_inputs = {"1x128": activations, "128x128": weights, "high_precision": None}
    for choice, format in wgrad_inputs.items():
        found = Recipe(scale=scale, wgrad_input=choice)  # type: ignore[arg-type]
        assert found.wgrad_input_format is format
        assert found.activation_format is activations


X, W = torch.ones(4, 128), torch.ones(128, 128)
TAKE_A_RECIPE: dict[str, Callable[..., Any]] = {
    "explain": partial(blocktensor.explain, [(4, 128, 128)], device="cpu"),
    "plan": partial(blocktensor.plan, nn.ModuleList([nn.Linear(256, 256)]), skip_small=False),
    "quantize": partial(blocktensor.quantize, X),
    "functional.linear": partial(blocktensor.functional.linear, X, W),
    "BlockwiseFP8Weight": lambda recipe: blocktensor.BlockwiseFP8Weight(W, recipe).recipe,
    "from_values": partial(blocktensor.BlockwiseFP8Tensor.from_values, X),
    "from_data": partial(
        blocktensor.BlockwiseFP8Tensor.from_data,
        X.to(torch.float8_e4m3fn),
        torch.ones(4, 1),
        block_shape=(1, 128),
    ),
}


@pytest.mark.parametrize("name", TAKE_A_RECIPE)
def test_none_is_the_default_recipe_everywhere(name: str) -> None:
    run = TAKE_A_RECIPE[name]
    made = [run(recipe=recipe) for recipe in (None, Recipe())]
    values = [x.dequantize().tolist() if hasattr(x, "dequantize") else str(x) for x in made]
    assert values[0] == values[1]
    with pytest.raises(TypeError, match=r"recipe='fast' is a str: expected a blocktensor\.Recipe"):
        run(recipe="fast")
    with pytest.raises(TypeError, match=r"is a Scales: .* e\.g\. Recipe\(scale=Scales\("):
        run(recipe=Scales(weights="power_of_two"))
