"""Calls that convert nothing, or less than their caller may think, warn with a remedy."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import BlockwiseFP8Weight, Recipe, convert, to_blockwise_fp8_weights
from tests.support.models import Model


def said(call: Callable[[], object]) -> str:
    """The one warning of a call; it points to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (warning,) = caught
    assert warning.category is UserWarning and warning.filename == __file__
    return str(warning.message)


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if isinstance(p, BlockwiseFP8Weight)]


# One module


def containers() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64))


def test_a_container_of_linears_is_left_alone_with_a_warning() -> None:
    model = containers()
    text = said(lambda: to_blockwise_fp8_weights(model))
    assert text.startswith("to_blockwise_fp8_weights converts one module, and this Sequential has")
    assert "the 2 of modules below it" in text and "model.apply(" in text
    assert in_fp8(model) == []
    model.apply(to_blockwise_fp8_weights)  # as the text says, without a warning
    assert in_fp8(model) == ["0.0.weight", "1.weight"]
    for again in (None, Recipe(), Recipe(scale="power_of_two")):
        model.apply(functools.partial(to_blockwise_fp8_weights, recipe=again))
    to_blockwise_fp8_weights(model)  # some are in FP8 below it


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Sequential(), nn.MultiheadAttention(64, 2)])
def test_a_module_above_nothing_that_could_be_converted_is_no_mistake(module: nn.Module) -> None:
    to_blockwise_fp8_weights(module)
    module.apply(to_blockwise_fp8_weights)


def test_apply_with_an_exception_does_not_warn() -> None:
    model = containers()
    model.apply(lambda module: None if module is model[1] else to_blockwise_fp8_weights(module))
    assert in_fp8(model) == ["0.0.weight"]


# A model


class Experts(nn.Module):
    """A stack of one's own, as large as stacks that convert knows are to be."""

    def __init__(self, rows: int = 1024, experts: int = 2) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, rows, 2048))


def with_experts(**sizes: int) -> nn.Module:
    layers = [nn.ModuleDict({"moe": Experts(**sizes), "out": nn.Linear(64, 64)}) for _ in range(2)]
    return nn.Sequential(*layers)


def test_large_stacks_that_nobody_has_named() -> None:
    convert_all: Any = functools.partial(convert, skip_small=False)
    text = said(lambda: convert_all(with_experts()))
    assert text.startswith("2 stacks of matrices (8,388,608 values) stay in high precision")
    assert said(lambda: convert_all(with_experts(), dry_run=True)) == text
    stacks, skip = map(ast.literal_eval, re.findall(r"(?:stacks|skip)=(\{.*?\}|\[.*?\])", text))
    model = with_experts()
    convert_all(model, stacks=stacks)
    assert len(in_fp8(model)) == 4
    model = with_experts()
    convert_all(model, skip=skip)
    assert in_fp8(model) == ["0.out.weight", "1.out.weight"]
    # the caller decides by a filter; and no experts
    convert_all(with_experts(), filter=lambda module, name: True)
    for sizes in ({"rows": 255}, {"experts": 1}):
        convert_all(with_experts(**sizes))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "skip_small=False converts small weights too"),
        ({"filter": lambda module, name: False}, "filter and skip leave weights alone"),
        ({"skip": ["blocks"], "skip_small": False}, "filter and skip leave weights alone"),
    ],
)
def test_a_model_of_which_nothing_is_converted(options: Any, remedy: str) -> None:
    assert f" is in FP8: {remedy}. " in said(lambda: convert(Model(), **options))


def test_a_head_or_experts_alone() -> None:
    head = nn.ModuleDict({"embed": nn.Embedding(64, 32), "lm_head": nn.Linear(32, 64)})
    text = said(lambda: convert(head, skip_small=False))
    assert "is in FP8: convert_head=True converts the head. " in text
    text = said(lambda: convert(nn.ModuleDict({"moe": Experts()})))
    assert "is in FP8: stacks={'moe': ['up']} names experts that convert does not know. " in text
