"""One cast of an input for the stacks of one module of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    share_inputs,
    unshare_inputs,
)
from tests.support import steps
from tests.support.models import randn
from tests.support.moe_models import GroupedExperts
from tests.support.steps import assert_bits

E, K, N = 4, 128, 256
SIZES = torch.tensor([3, 0, 129, 8])
REPORT = """\
module   linears                 given one input  casts  saved
-------  ----------------------  ---------------  -----  -----
(model)  w1_EFD, w2_EDF, w3_EFD  2 products       6      3
1 groups; 6 casts made, 3 saved"""


def experts(recipe: Recipe | None = None) -> GroupedExperts:
    module = GroupedExperts(E, K, N)
    convert(module, recipe, skip_small=False)
    return module


def tokens(seed: int = 0) -> Tensor:
    return randn(140, K, seed=seed, grad=True)


def step(module: nn.Module) -> list[Tensor | None]:
    return steps.step(module, tokens(), SIZES, of=[getattr(module, "_orig_mod", module)])


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
def test_gate_and_up_share_one_cast_and_keep_their_bits(wgrad_input: Any) -> None:
    alone, module = (experts(Recipe(wgrad_input=wgrad_input)) for _ in range(2))
    report = share_inputs(module)
    for turn in range(1, 4):
        assert_bits(step(alone), step(module))
        assert (report.casts, report.saved) == (2 * turn, turn)
    assert str(report) == REPORT
    assert unshare_inputs(module) == [""]
    step(module)
    assert report.casts == 6


def test_rows_that_are_fp8_already_are_cast_again_once() -> None:
    alone, module = experts(), experts()
    report = share_inputs(module)
    rows = BlockwiseFP8Tensor.from_values(tokens().detach(), columnwise=False)
    for turn in range(1, 3):
        made = []
        for each in (alone, module):
            each.zero_grad()
            each(rows, SIZES).backward(randn(140, K, seed=9))
            made.append([p.grad for p in each.parameters()])
        assert_bits(*made)
        assert (report.casts, report.saved) == (2 * turn, turn)


@pytest.mark.parametrize("other", ["1x128", "high_precision"])
def test_stacks_of_other_recipes_cast_for_themselves(other: Any) -> None:
    alone, module = (experts(Recipe(wgrad_input="128x128")) for _ in range(2))
    for made in (alone, module):
        weight = made.w3_EFD
        made.w3_EFD = nn.Parameter(BlockwiseFP8Weight(weight.master, Recipe(wgrad_input=other)))
    report = share_inputs(module)
    for _ in range(2):
        assert_bits(step(alone), step(module))
    assert report.saved == 0


def test_offs_that_changed_are_another_input() -> None:
    module = experts()
    share_inputs(module)
    for sizes in (SIZES, torch.tensor([140, 0, 0, 0]), torch.tensor([0, 70, 0, 0])):
        alone = experts()
        with torch.no_grad():
            assert torch.equal(module(tokens(), sizes), alone(tokens(), sizes))
