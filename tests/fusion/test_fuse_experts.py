"""Experts are found by their stacks and verified; what only looks alike is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import Recipe, convert, fuse
from tests.support.fused_experts import EXPERTS, ROWS, Ends, Sizes, fused_in, groups_of, results
from tests.support.gated import WeightShapes, assert_bits
from tests.support.models import complaint, plain
from tests.support.moe_models import GroupedExperts

NAMES = {"*": ("w1", "w3", "w2")}


def converted(model: nn.Module, recipe: Recipe | None = None, names: Any = None) -> nn.Module:
    convert(model, recipe or Recipe(), skip_small=False, stacks=names)
    return model


HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clamped": lambda gate, up: F.silu(gate).clamp(max=7.0) * up,
    "swapped": lambda gate, up: F.silu(up) * gate,
    "rounded once less": lambda gate, up: (F.silu(gate.float()) * up.float()).to(up.dtype),
    "a stopped gradient": lambda gate, up: F.silu(gate) * up.detach(),
}
"""h of gate and up, in other ways."""


def planted(name: str) -> type[Sizes]:
    class Planted(Sizes):
        def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
            return HIDDEN[name](gate, up)

    return Planted


class Biased(Sizes):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(192))


class AllRows(Sizes):
    """Gives the rows of no group to the last expert."""

    def offs(self, groups: Tensor) -> Tensor:
        offs = super().offs(groups)
        return torch.cat([offs[:-1], offs.new_full((1,), ROWS)])


PLANTED = {**{name: planted(name) for name in HIDDEN}, "a bias": Biased, "all rows": AllRows}


def test_planted_differences() -> None:
    reasons = []
    for planted_one, make in PLANTED.items():
        model = converted(make(), names=NAMES).train()
        before = {name: plain(p).clone() for name, p in model.named_parameters()}
        torch.manual_seed(4)
        state = torch.get_rng_state()
        (entry,) = fuse(model).entries
        reasons.append(f"{planted_one}: {entry.reason}")
        assert fused_in(model) == []
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(plain(p), before[name]) for name, p in model.named_parameters())
        assert model.training
    assert_expected_inline(
        "\n".join(reasons),
        """\
clamped: differs in its output
swapped: differs in its output
rounded once less: differs in its output
a stopped gradient: differs in the gradient of its input
a bias: has more than stacks and an activation: bias
all rows: differs in its output""",
    )


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="power_of_two", wgrad_input="128x128")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Sizes, Ends, GroupedExperts])
def test_sizes_and_ends_of_groups(kind: Any, dtype: torch.dtype, recipe: Recipe) -> None:
    model = kind(EXPERTS, 192, 320) if kind is GroupedExperts else kind()
    model = converted(model.to(dtype), recipe, None if kind is GroupedExperts else NAMES)
    twin = copy.deepcopy(model)
    (entry,) = fuse(model).entries
    assert entry.reason == "" and entry.computes.endswith(" by expert")
    assert "silu" in entry.computes
    assert model._fused_pattern.ends == (kind is Ends)
    groups = groups_of(kind is Ends)
    assert_bits(results(model, groups), results(twin, groups))


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_activations_are_found(activation: str) -> None:
    model = converted(Sizes(activation), names=NAMES)
    twin = copy.deepcopy(model)
    assert fuse(model).fused[0].computes == f"w2({activation}(w1(x)) * w3(x)) by expert"
    assert_bits(results(model), results(twin))


def test_experts_by_hand() -> None:
    class Own(Sizes):
        NAMES = ("wg", "wu", "wd")

    model = nn.ModuleDict({"experts": Own()})
    converted(model, names={"experts": Own.NAMES})
    twin = copy.deepcopy(model)
    assert fuse(model).entries == ()
    report = fuse(model, experts={"exp*": ("wg", "wu", "wd", "silu")})
    assert fused_in(model) == ["experts"]
    assert_expected_inline(
        str(report),
        """\
module   class  computes                           result
-------  -----  ---------------------------------  ------
experts  Own    wd(silu(wg(x)) * wu(x)) by expert  fused
1 fused, 0 left alone""",
    )
    assert_bits(results(model["experts"]), results(twin["experts"]))


def test_large_experts_are_verified_with_fewer_features() -> None:
    model = converted(Sizes(experts=6, hidden=704), names=NAMES)
    with WeightShapes() as stacks:
        assert fuse(model).left_alone == ()
    assert stacks.seen == {(4, 192, 656), (4, 656, 192)}


def test_stacks_of_gate_and_up() -> None:
    """Of experts that are given rows and their groups."""

    class Joint(Sizes):
        def __init__(self) -> None:
            super().__init__()
            both = torch.cat([plain(self.w1), plain(self.w3)], 1)
            del self.w1, self.w3
            self.gate_up = nn.Parameter(both)

        def forward(self, x: Tensor, groups: Tensor) -> Tensor:
            offs = self.offs(groups)
            both = torch._grouped_mm(x, self.gate_up.transpose(1, 2), offs)
            h = self.hidden(*both.chunk(2, -1))
            return torch._grouped_mm(h, self.w2.transpose(1, 2), offs)

    model = converted(Joint(), names={"*": ("gate_up", "w2")})
    twin = copy.deepcopy(model)
    report = fuse(
        nn.ModuleDict({"own": model}), experts={"own": ("gate_up", "gate_up", "w2", None)}
    )
    assert report.fused[0].computes == "w2(silu(gate) * up), both of gate_up(x) by expert"
    assert_bits(results(model), results(twin))


def test_bad_input() -> None:
    model = nn.ModuleDict({"experts": converted(Sizes(), names=NAMES)})
    cases: list[Any] = [
        {"none": ("w1", "w3", "w2", "silu")},
        {"experts": ("w1", "w3", "w2")},
        {"experts": ("w1", "w3", "w4", None)},
        {"experts": ("w1", "w3", "w2", "tanh")},
        {"experts": ("w1", "w2", "w2", None)},
    ]
    messages = [complaint(ValueError, lambda e=e: fuse(model, experts=e)) for e in cases]
    assert_expected_inline(
        "\n\n".join(messages),
        """\
experts pattern 'none' matches no module of this ModuleDict: expected a pattern of
module names, e.g. '*.experts'

experts={'experts': ('w1', 'w3', 'w2')}: expected (gate, up, down, activation), e.g.
('w1', 'w3', 'w2', 'silu')

experts pattern 'experts' names 'experts', a Sizes without a stack 'w4'; it has
'w1', 'w3', 'w2'

experts pattern 'experts': 'experts' has no attribute 'tanh', and no activation is
called so: expected one of silu, gelu, gelu_tanh, relu2

experts pattern 'experts': down is 'w2', as up is: expected another; gate and up
alone may be one""",
    )
    assert fused_in(model) == []
    high = Recipe(wgrad_input="high_precision")
    assert_expected_inline(
        fuse(converted(Sizes(), high, NAMES)).left_alone[0].reason,
        """weight gradients read high precision (wgrad_input='high_precision')""",
    )
