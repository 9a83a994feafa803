"""The config: every way in which transformers and users carry it gives it back."""

from __future__ import annotations

import copy
import json
import pickle
import textwrap
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import pytest
from expecttest import assert_expected_inline
from transformers.quantizers.auto import AutoQuantizationConfig

from blocktensor import MinSizes, Recipe, Scales
from blocktensor.integrations.transformers import BlockwiseFP8Config

OPTIONS: dict[str, Any] = {
    "recipe": Recipe(scale="power_of_two", wgrad_input="1x128"),
    "skip": ["*.q_proj", "lm_head"],
    "skip_small": MinSizes(n=512),
    "experts": {"*.moe": ["w_up", "w_down"]},
    "convert_head": True,
    "frozen": True,
    "fuse": True,
}


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["default", "all options"])
def test_it_goes_there_and_back(options: dict[str, Any]) -> None:
    config = BlockwiseFP8Config(**options)
    there = json.loads(config.to_json_string())  # which its repr shows
    assert there == config.to_dict()
    assert there["quant_method"] == "blocktensor"
    assert BlockwiseFP8Config.from_dict(there) == config
    assert AutoQuantizationConfig.from_dict(there) == config
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_defaults_and_that_each_option_counts() -> None:
    off = dict.fromkeys(("convert_head", "frozen", "fuse"), False)
    default = BlockwiseFP8Config(recipe=Recipe(), skip=[], skip_small=True, experts=True, **off)
    given = BlockwiseFP8Config(**OPTIONS)
    assert BlockwiseFP8Config() == default
    assert OPTIONS.keys() == {x.name for x in fields(given)} - {"quant_method"}
    for name, value in OPTIONS.items():
        assert getattr(given, name) == value != getattr(default, name)
        assert BlockwiseFP8Config(**{**OPTIONS, name: getattr(default, name)}) != given


def test_collections_of_other_types() -> None:
    """The quantizer and JSON see lists and dicts."""
    names = MappingProxyType({"*.moe": ("w_up", "w_down")})
    config = BlockwiseFP8Config(skip=("*.q_proj", "lm_head"), experts=names)
    assert config == BlockwiseFP8Config(skip=OPTIONS["skip"], experts=OPTIONS["experts"])
    assert (type(config.skip), type(config.experts)) == (list, dict)
    assert json.loads(config.to_json_string()) == config.to_dict()
    config = BlockwiseFP8Config(recipe=Recipe(scale=Scales(weights="power_of_two")))
    stored = json.loads(config.to_json_string())
    assert BlockwiseFP8Config.from_dict(stored) == config
    assert stored["recipe"]["scale"] == {
        "activations": "fp32",
        "gradients": "fp32",
        "weights": "power_of_two",
    }


BAD: tuple[dict[str, Any], ...] = (
    {"recipe": "power_of_two"},
    {"skip": "lm_head"},
    {"skip": [1]},
    {"skip_small": 1},
    {"experts": "*.moe"},
    {"convert_head": "fp8"},
    {"frozen": 1},
    {"fuse": "no"},
)


def test_bad_options() -> None:
    messages = []
    for options in BAD:
        with pytest.raises((TypeError, ValueError)) as raised:
            BlockwiseFP8Config(**options)
        messages.append(textwrap.fill(str(raised.value), 90))
    assert_expected_inline(
        "\n".join(messages),
        """\
recipe='power_of_two' is a str: expected a blocktensor.Recipe, e.g.
Recipe(scale='power_of_two')
skip='lm_head' is a str: expected a list of patterns, e.g. ['lm_head']
skip holds 1, a int: expected patterns of module names, e.g. ['*.router']
skip_small=1: expected True, False or a blocktensor.MinSizes
experts='*.moe': expected True, False, or the names of stacks by patterns of module names,
e.g. {'*.moe': ['w_up', 'w_down']}
convert_head='fp8': expected True or False
frozen=1: expected True or False
fuse='no': expected True or False""",
    )
