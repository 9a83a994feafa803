"""Patterns that leave linears out of a conversion, and those that hit nothing."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import convert
from tests.support.models import DIM, Model, complaint, converted_names, reasons


def both() -> nn.Module:
    """Two models in one."""
    return nn.ModuleDict({"vision_tower": Model(), "text": Model(), "text2": nn.Linear(DIM, DIM)})


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
    model = both()
    convert(model, skip=skip, auto_filter_small_kn=False)
    names = converted_names(model)
    assert names
    assert all(any(fnmatch.fnmatch(n, f"{p}*") for p in left) for n in names)
    assert all(fnmatch.filter(names, f"{p}*") for p in left)


def test_the_first_pattern_is_the_reason_and_heads_may_be_named() -> None:
    report = convert(Model(), skip=["lm_head", "blocks.0", "*.up"], auto_filter_small_kn=False)
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
    report = convert(model, skip=["decoder"], auto_filter_small_kn=False)
    assert converted_names(model) == ["other"]
    assert reasons(report) == {"encoder.0": "skip pattern 'decoder'"}


def test_a_pattern_that_hits_nothing() -> None:
    model = nn.ModuleDict({"model": Model(), "attention": nn.MultiheadAttention(DIM, 2)})

    def text(*skip: Any) -> str:
        return complaint(ValueError, lambda: convert(model, skip=["*.up", *skip]))

    assert_expected_inline(
        text("model.heads"),
        """\
skip pattern 'model.heads' matches no module of this ModuleDict: expected a pattern
that names linears or modules above them; near it: 'model.lm_head', 'model',
'model.blocks'""",
    )
    assert_expected_inline(
        text("*.layers.*.upp"),
        """\
skip pattern '*.layers.*.upp' matches no module of this ModuleDict: expected a
pattern that names linears or modules above them; near it: '*.up'""",
    )
    assert_expected_inline(
        text("*.embed"),
        """\
skip pattern '*.embed' matches only modules that convert leaves alone anyway, such
as 'model.embed' (Embedding): expected a pattern that names linears or modules above
them""",
    )
    assert_expected_inline(
        text("attention"),
        """\
skip pattern 'attention' matches only modules that convert leaves alone anyway, such
as 'attention' (MultiheadAttention): expected a pattern that names linears or
modules above them""",
    )
    assert converted_names(model) == []


def test_patterns_of_another_type() -> None:
    model = Model()
    assert_expected_inline(
        complaint(TypeError, lambda: convert(model, skip="lm_head")),
        """skip='lm_head' is a str: expected a list of patterns, e.g. ['lm_head']""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: convert(model, skip=5)),
        """skip=5 is a int: expected a list of patterns, e.g. ['*.router']""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: convert(model, skip=[model.lm_head])),
        """\
skip holds Linear(in_features=64, out_features=50, bias=False), a Linear: expected
patterns of module names, e.g. ['*.router']""",
    )
    assert converted_names(model) == []
