"""The config: every way in which transformers and users carry it gives it back."""

from __future__ import annotations

import copy
import json
import pickle
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import pytest
from expecttest import assert_expected_inline

from blocktensor import MinSizes, Recipe
from blocktensor.integrations.transformers import BlockwiseFP8Config

OPTIONS: dict[str, Any] = {
    "recipe": Recipe(scale="power_of_two", wgrad_input="1x128"),
    "skip": ["*.q_proj", "lm_head"],
    "skip_small": MinSizes(n=512),
    "experts": {"*.moe": ["w_up", "w_down"]},
    "convert_head": True,
    "frozen": True,
    "fuse": True,
    "mark": True,
}


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["default", "all options"])
def test_it_goes_there_and_back(options: dict[str, Any]) -> None:
    config = BlockwiseFP8Config(**options)
    there = json.loads(config.to_json_string())
    assert there == config.to_dict() == dict(config)
    assert there["quant_method"] == "blocktensor"
    assert BlockwiseFP8Config.from_dict(there) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_defaults() -> None:
    off = dict.fromkeys(("convert_head", "frozen", "fuse", "mark"), False)
    default = BlockwiseFP8Config(recipe=Recipe(), skip=[], skip_small=True, experts=True, **off)
    assert BlockwiseFP8Config() == default


def test_each_option_counts() -> None:
    default, given = BlockwiseFP8Config(), BlockwiseFP8Config(**OPTIONS)
    assert OPTIONS.keys() == {x.name for x in fields(given) if x.init}
    for name, value in OPTIONS.items():
        assert getattr(given, name) == value != getattr(default, name)
        assert BlockwiseFP8Config(**{**OPTIONS, name: getattr(default, name)}) != given


def test_arguments_replace_the_entries_of_a_file() -> None:
    stored = BlockwiseFP8Config(**OPTIONS).to_dict()
    config, unused = BlockwiseFP8Config.from_dict(
        stored, return_unused_kwargs=True, skip=[], other=1
    )
    assert config == BlockwiseFP8Config(**{**OPTIONS, "skip": []})
    assert unused == {"other": 1}
    assert stored == BlockwiseFP8Config(**OPTIONS).to_dict()


BAD: tuple[dict[str, Any], ...] = (
    {"recipe": "power_of_two"},
    {"skip": "lm_head"},
    {"skip": [1]},
    {"skip_small": 1},
    {"experts": "*.moe"},
    {"convert_head": "fp8"},
    {"frozen": 1},
    {"fuse": "no"},
    {"mark": None},
)
BAD_FILES: tuple[dict[str, Any], ...] = (
    {"skipp": []},
    {"recipe": {"scales": "fp32"}},
    {"recipe": {"scale": "e8"}},
)


def said(makes: Callable[[dict[str, Any]], object], bad: Iterable[dict[str, Any]]) -> str:
    messages = []
    for options in bad:
        with pytest.raises((TypeError, ValueError)) as raised:
            makes(options)
        messages.append(textwrap.fill(str(raised.value), 90))
    return "\n".join(messages)


def test_bad_options_and_files() -> None:
    assert_expected_inline(
        said(lambda options: BlockwiseFP8Config(**options), BAD),
        """\
recipe='power_of_two' is a str: expected a blocktensor.Recipe, e.g.
Recipe(scale='power_of_two')
skip='lm_head': expected a list of patterns of module names
skip=[1]: expected a list of patterns of module names
skip_small=1: expected True, False or a blocktensor.MinSizes
experts='*.moe': expected True, False, or the names of stacks by patterns of module names,
e.g. {'*.moe': ['w_up', 'w_down']}
convert_head='fp8': expected True or False
frozen=1: expected True or False
fuse='no': expected True or False
mark=None: expected True or False""",
    )
    assert_expected_inline(
        said(BlockwiseFP8Config.from_dict, BAD_FILES),
        """\
quantization_config has the unknown entries ['skipp']: expected some of ['convert_head',
'experts', 'frozen', 'fuse', 'mark', 'recipe', 'skip', 'skip_small']; they may be those of
a later version of blocktensor
recipe of quantization_config has the unknown entries ['scales']: expected some of
['batch_invariant', 'cache_weight', 'scale', 'wgrad_input']; they may be those of a later
version of blocktensor
Recipe(scale='e8'): expected one of 'fp32', 'power_of_two'""",
    )
