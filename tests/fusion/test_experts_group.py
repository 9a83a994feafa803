"""One cast of an input for the stacks of one module of experts."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
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
from blocktensor.autograd.shared_cast import this_thread
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


def test_forms_are_kept_no_longer_than_their_last_use() -> None:
    module = experts()
    group = share_inputs(module).groups[0]
    step(module)
    group.begin()
    try:
        with torch.no_grad():
            module.forward(tokens().detach(), SIZES)
        running: Any = this_thread.running
        assert len(running.users) == 2
        assert running._latest.forms == ()
    finally:
        group.end(whole=True)
    assert this_thread.running is None


def other_input(x: Tensor) -> Tensor:
    return x + 1


def in_place(x: Tensor) -> Tensor:
    return x.add_(1)


def by_data(x: Tensor) -> Tensor:
    x.data = x.data + 1
    return x


class Twice(GroupedExperts):
    """Changes its input between two products."""

    change: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        offs = sizes.cumsum(0, dtype=torch.int32)
        first = torch._grouped_mm(x, self.w1_EFD.bfloat16().transpose(-2, -1), offs=offs)
        x = self.change(x)
        return first + torch._grouped_mm(x, self.w3_EFD.bfloat16().transpose(-2, -1), offs=offs)


@pytest.mark.parametrize("change", [other_input, in_place, by_data])
def test_an_input_that_changed_is_cast_again(change: Callable[[Tensor], Tensor]) -> None:
    made = []
    for share in (False, True):
        module = Twice(E, K, N)
        module.change = change
        convert(module, skip_small=False, stacks={"": ["w1_EFD", "w2_EDF", "w3_EFD"]})
        report = share_inputs(module) if share else None
        with torch.no_grad():
            made.append([module(tokens(seed).detach(), SIZES) for seed in range(3)])
        assert report is None or report.saved == 0
    assert_bits(*made)


def test_offs_that_changed_are_another_input() -> None:
    module = experts()
    share_inputs(module)
    for sizes in (SIZES, torch.tensor([140, 0, 0, 0]), torch.tensor([0, 70, 0, 0])):
        alone = experts()
        with torch.no_grad():
            assert torch.equal(module(tokens(), sizes), alone(tokens(), sizes))


def test_an_exception_ends_the_sharing() -> None:
    module = experts()
    share_inputs(module)
    with pytest.raises((RuntimeError, ValueError)):
        module(randn(4, K + 1), SIZES)
    assert this_thread.running is None
    step(module)


def test_copies_share_for_themselves() -> None:
    module = experts()
    report = share_inputs(module)
    twin = copy.deepcopy(module)
    step(twin)
    assert report.casts == 0
    of_twin = share_inputs(twin)
    assert (of_twin.casts, of_twin.saved) == (2, 1)
    assert share_inputs(twin).groups == of_twin.groups  # a second call adds no hooks
    assert len(twin._forward_hooks) == 1


def test_a_freed_input_takes_its_forms_along() -> None:
    module = experts()
    report = share_inputs(module)
    group = report.groups[0]
    group.begin()
    try:
        x = tokens().detach()
        with torch.no_grad():
            torch._grouped_mm(
                x, module.w1_EFD.bfloat16().transpose(-2, -1), offs=SIZES.cumsum(0).int()
            )
        running: Any = this_thread.running
        latest = running._latest
        assert latest is not None
        assert len(latest.forms) == 2
        del x
        gc.collect()
        assert latest.forms == ()
    finally:
        group.end(whole=False)


def test_compiled_experts_cast_for_themselves() -> None:
    module = experts()
    report = share_inputs(module)
    wanted = step(experts())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    made = step(compiled)
    assert report.casts == 0
    assert_bits(made, wanted)
