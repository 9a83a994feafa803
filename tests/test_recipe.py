"""Recipe: its choices, its checks, and that nobody can change one."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from expecttest import assert_expected_inline

from blocktensor import Recipe
from tests.support.models import complaint


def test_the_defaults() -> None:
    assert_expected_inline(
        repr(Recipe()), """Recipe(scale='fp32', columnwise='on_demand', cache_weight='backward', wgrad_input='1x128')"""
    )


@pytest.mark.parametrize(("scale", "power_of_two"), [("fp32", False), ("power_of_two", True)])
@pytest.mark.parametrize("columnwise", ["on_demand", "keep"])
@pytest.mark.parametrize("cache_weight", [False, "backward", "step"])
def test_every_choice_is_a_value(
    scale: Any, power_of_two: bool, columnwise: Any, cache_weight: Any
) -> None:
    recipe = Recipe(scale, columnwise, cache_weight)
    twin = Recipe(scale=scale, columnwise=columnwise, cache_weight=cache_weight)
    assert recipe.power_of_two is power_of_two
    assert recipe == twin == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(twin)
    other = "step" if cache_weight == "backward" else "backward"
    assert recipe != Recipe(scale, columnwise, other)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().scale = "power_of_two"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", v) for v in ("ue8m0", "FP32", "", None, True)),
        *(("columnwise", v) for v in ("always", None, False)),
        *(("cache_weight", v) for v in ("no", None, 1, 0, True)),
    ],
)
def test_other_values_are_refused(name: str, value: Any) -> None:
    text = complaint(ValueError, lambda: Recipe(**{name: value}))
    assert text.startswith(f"Recipe({name}={value!r}): expected ")


def test_the_texts() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: Recipe(scale="ue8m0")),
        """Recipe(scale='ue8m0'): expected one of 'fp32', 'power_of_two'""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: Recipe(cache_weight=1)),
        """Recipe(cache_weight=1): expected one of 'backward', 'step', False""",
    )


@pytest.mark.parametrize("name", ["scale", "columnwise", "cache_weight"])
def test_bad_recipes_name_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Recipe\({name}='no'\): expected"):
        Recipe(**{name: "no"})


@pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
def test_its_formats(scale: Any) -> None:
    recipe = Recipe(scale=scale)
    activations, weights = recipe.activation_format, recipe.weight_format
    assert (activations.block_shape, weights.block_shape) == ((1, 128), (128, 128))
    assert activations.scale_rounding == weights.scale_rounding == scale


def test_a_file_from_before_there_were_three_policies() -> None:
    old = Recipe()
    vars(old)["cache_weight"] = True
    assert pickle.loads(pickle.dumps(old)) == Recipe()
