"""Names that a caller gives: patterns that leave weights out, stacks of experts, and no model."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import (
    MinSizes,
    audit,
    convert,
    explain,
    freeze,
    share_inputs,
    to_blockwise_fp8_weights,
    unfreeze,
    unfuse,
)
from tests.support.asserts import refused
from tests.support.matrices import Fused, Unknown, fp8_names
from tests.support.models import DIM, Model, converted_names, reasons


@pytest.mark.parametrize("given", [None, 5, [nn.Linear(2, 2)]])
def test_what_is_no_module(given: Any) -> None:
    kind = type(given).__name__
    alone = convert, to_blockwise_fp8_weights, freeze, unfreeze, unfuse, audit
    calls = (*alone, share_inputs, *((explain,) if kind != "list" else ()))  # a list: of shapes
    for call in calls:
        with pytest.raises(TypeError, match=rf"^{call.__name__} takes a model.*: got a {kind}"):
            call(given)


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["vision_tower"], ["text.blocks.*", "text2"]),
        (["text"], ["vision_tower.blocks.*", "text2"]),
        (["text*"], ["vision_tower.blocks.*"]),
        (["*.blocks"], ["text2"]),
        (["*.blocks.1", "vision_tower"], ["text.blocks.0", "text2"]),
        (("*.u?",), ["vision_tower.*.down", "text.*.down", "text2"]),
        ((pattern for pattern in ["*.[0-9].up", "text2"]), ["vision_tower.*.down", "text.*.down"]),
    ],
)
def test_a_pattern_names_modules_and_all_below_them(skip: Any, left: list[str]) -> None:
    model = nn.ModuleDict({"vision_tower": Model(), "text": Model(), "text2": nn.Linear(DIM, DIM)})
    convert(model, skip=skip, skip_small=False)
    names = converted_names(model)
    assert names
    assert all(any(fnmatch.fnmatch(n, f"{p}*") for p in left) for n in names)
    assert all(fnmatch.filter(names, f"{p}*") for p in left)


def test_the_first_pattern_is_the_reason_and_heads_may_be_named() -> None:
    report = convert(Model(), skip=["lm_head", "blocks.0", "*.up"], skip_small=False)
    assert reasons(report) == {
        "embed": "embedding",
        "blocks.0.up": "skip pattern 'blocks.0'",
        "blocks.0.down": "skip pattern 'blocks.0'",
        "blocks.1.up": "skip pattern '*.up'",
        "lm_head": "skip pattern 'lm_head'",
    }


def test_every_name_of_a_module_counts() -> None:
    shared = nn.Linear(DIM, DIM)
    model = nn.ModuleDict({"encoder": nn.ModuleList([shared]), "decoder": nn.ModuleList([shared])})
    model["other"] = nn.Linear(DIM, DIM)
    report = convert(model, skip=["decoder"], skip_small=False)
    assert converted_names(model) == ["other"]
    assert reasons(report) == {"encoder.0": "skip pattern 'decoder'"}
    stacks = Unknown()
    model = nn.ModuleDict({"encoder": stacks, "decoder": stacks})
    convert(model, stacks={"decoder": ["up"]}, skip_small=False)
    assert fp8_names(model) == ["encoder.up"]


def test_what_may_be_named() -> None:
    model = nn.ModuleDict({"a": Unknown(), "b": nn.ModuleDict({"c": Unknown()})})
    small = MinSizes(expert_n=128, expert_k=128, expert_size=0)
    convert(model, stacks={"*.c": ("up",), "b.?": ["down"]}, skip_small=small)
    assert fp8_names(model) == ["b.c.up", "b.c.down"]
    again = convert(model)
    assert {entry.reason for entry in again.converted} == {"already converted"}
    assert reasons(again)["a.up"] == "stack of matrices: in Unknown; stacks={...} would name it"
    for skip, converted in (([], ["up", "down"]), (["down"], ["up"])):
        whole = Unknown()
        report = convert(whole, stacks={"": ["down", "up"]}, skip=skip, skip_small=small)
        assert fp8_names(whole) == converted
    assert reasons(report)["down"] == "skip pattern 'down'"


COMPLAINTS: list[dict[str, Any]] = [
    {"skip": "lm_head"},
    {"skip": 5},
    {"skip": [nn.Linear(64, 50)]},
    {"skip": ["*.up", "model.heads"]},
    {"skip": ["*.embed"]},
    {"skip": ["down"]},
    {"skip": [".*head"]},
    {"skip": ["head"]},
    {"stacks": [("*.a", ["up"])]},
    {"stacks": {"a": "up"}},
    {"stacks": {"a": [1]}},
    {"stacks": {1: ["up"]}},
    {"stacks": {"a": ["up"], "expert": ["up"]}},
    {"stacks": {"a": ["w1"]}},
    {"stacks": {"a": ["table"]}},
    {"stacks": {"f": ["w13_EF2D"]}},
    {"stacks": {"a": 3}},
    {"stacks": {"attention": ["up"]}},
    {"stacks": {"": ["up"]}},
]


def test_complaints() -> None:
    parts = {"model": Model(), "attention": nn.MultiheadAttention(DIM, 2)}
    model = nn.ModuleDict({**parts, "a": Unknown(), "experts": Unknown(), "f": Fused()})
    calls = [functools.partial(convert, model, **options) for options in COMPLAINTS]
    texts = refused(*calls, lambda: convert(nn.ReLU(), skip=["x"]))
    assert converted_names(model) == fp8_names(model) == []
    assert_expected_inline(
        texts,
        """\
TypeError: skip='lm_head' is a str: expected a list of patterns, e.g. ['lm_head']
TypeError: skip=5 is a int: expected a list of patterns, e.g. ['*.router']
TypeError: skip holds Linear(in_features=64, out_features=50, bias=True), a Linear: expected
  patterns of module names, e.g. ['*.router']
ValueError: skip pattern 'model.heads' matches no weight of this ModuleDict that could be
  converted: expected a pattern of the names of linear layers or modules above them; names of
  such weights end in up, down, lm_head, w2_EDF
ValueError: skip pattern '*.embed' matches no weight of this ModuleDict that could be converted:
  expected a pattern of the names of linear layers or modules above them; names of such weights
  end in up, down, lm_head, w2_EDF
ValueError: skip pattern 'down' matches no weight of this ModuleDict that could be converted:
  expected a pattern of the names of linear layers or modules above them; names of such weights
  end in up, down, lm_head, w2_EDF; a pattern matches whole names: '*.down' matches 2 of 6
ValueError: skip pattern '.*head' matches no weight of this ModuleDict that could be converted:
  expected a pattern of the names of linear layers or modules above them; names of such weights
  end in up, down, lm_head, w2_EDF; a pattern matches whole names: '*head' matches 1 of 6
ValueError: skip pattern 'head' matches no weight of this ModuleDict that could be converted:
  expected a pattern of the names of linear layers or modules above them; names of such weights
  end in up, down, lm_head, w2_EDF; a pattern matches whole names: '*head*' matches 1 of 6
TypeError: stacks=[('*.a', ['up'])] is a list: expected patterns of module names with the names
  of their stacks, e.g. {'*.experts': ['w1', 'w2']}
TypeError: stacks has 'a': 'up': expected a pattern with a list of the names of stacks, e.g.
  {'*.experts': ['w1', 'w2']}
TypeError: stacks has 'a': [1]: expected a pattern with a list of the names of stacks, e.g.
  {'*.experts': ['w1', 'w2']}
TypeError: stacks has 1: ['up']: expected a pattern with a list of the names of stacks, e.g.
  {'*.experts': ['w1', 'w2']}
ValueError: stacks pattern 'expert' matches no module of this ModuleDict: expected a pattern of
  the names of modules that hold stacks; modules with parameters of 3 dimensions have names that
  end in a, experts, f
ValueError: stacks names 'w1' of 'a', which has no such parameter: its parameters are up, down,
  table
ValueError: stacks names 'table' of 'a', experts with 2 dimensions: expected 3: expected a
  parameter [E, N, K] or [E, K, N]
ValueError: stacks names 'w13_EF2D' of 'f', experts with 4 dimensions, which several fused
  projections share: expected a parameter [E, N, K] or [E, K, N]
TypeError: stacks has 'a': 3: expected a pattern with a list of the names of stacks, e.g.
  {'*.experts': ['w1', 'w2']}
ValueError: stacks names 'up' of 'attention', which has no such parameter: its parameters are
  in_proj_weight, in_proj_bias
ValueError: stacks names 'up' of '', which has no such parameter: its parameters are none
ValueError: skip pattern 'x' matches no weight of this ReLU that could be converted: expected a
  pattern of the names of linear layers or modules above them; names of such weights end in none""",
    )
