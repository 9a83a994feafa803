"""What may change in a fused MLP: hooks and adapters of its linears, their class and recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import Recipe, convert, fuse
from tests.support.fused_kinds import KINDS
from tests.support.gated import assert_bits
from tests.support.mlps import HIDDEN, K, Model, X, converted, results, with_adapter
from tests.support.models import Trace, plain


def fused() -> tuple[nn.Module, nn.Module]:
    """A fused model, and its twin that is not."""
    return KINDS["mlp"].fused()


def runs_fused(model: nn.Module) -> int:
    """How many MLPs of a model did run fused."""
    with Trace() as trace, torch.no_grad():
        model(X.to(next(model.parameters()).dtype))
    return trace.count("blocktensor.gated ")


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        *(("gate_proj", "forward"), ("up_proj", "forward_pre")),
        *(("down_proj", "full_backward"), ("act_fn", "full_backward_pre"), ("act_fn", "forward")),
    ],
)
def test_hooks_on_inner_modules_that_come_later_run(kind: str, which: str) -> None:
    model, twin = fused()
    seen: list[str] = []
    target = getattr(model.layers[0]["mlp"], which)
    handle = getattr(target, f"register_{kind}_hook")(lambda *_: seen.append(kind) or None)
    assert_bits(results(model), results(twin))
    assert seen == [kind]
    assert runs_fused(model) == 1
    handle.remove()
    assert runs_fused(model) == 2


def test_modules_that_are_replaced_later() -> None:
    def tanh(mlp: Any) -> None:
        mlp.act_fn = nn.Tanh()

    def plain_up(mlp: Any) -> None:
        weight = plain(mlp.up_proj.weight)
        mlp.up_proj = nn.Linear(K, HIDDEN, bias=False, dtype=torch.bfloat16)
        mlp.up_proj.weight = nn.Parameter(weight * 2)

    def other_weight(mlp: Any) -> None:
        mlp.up_proj.weight = nn.Parameter(plain(mlp.up_proj.weight) * 2)

    def other_forward(mlp: Any) -> None:
        mlp.up_proj.forward = lambda x: torch.zeros_like(mlp.gate_proj(x))

    def other_activation(mlp: Any) -> None:
        mlp.act_fn.forward = lambda x: x

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    def other_class(mlp: Any) -> None:
        mlp.up_proj.__class__ = Doubled

    changes = tanh, plain_up, other_weight, other_forward, other_activation, other_class
    for change in changes:
        model, twin = fused()
        for each in (model, twin):
            change(each.layers[0]["mlp"])
        with torch.no_grad():
            x = X.bfloat16()
            assert torch.equal(model(x), twin(x))
        assert runs_fused(model) == 1


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gate_proj", Recipe(scale="power_of_two")),
        ("down_proj", Recipe(wgrad_input="high_precision")),
    ],
)
def test_a_linear_that_gets_another_recipe_later(name: str, recipe: Recipe) -> None:
    model, twin = fused()
    for each in (model, twin):
        convert(getattr(each.layers[0]["mlp"], name), recipe, skip_small=False)
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == 1
    report = fuse(model)
    assert [entry.name for entry in report.left_alone] == ["layers.0.mlp"]
    for each in (model, twin):  # all of them, and fused again
        convert(each.layers[0]["mlp"], Recipe(scale="power_of_two"), skip_small=False)
    assert fuse(model).left_alone == ()
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == 2


@pytest.mark.parametrize("first", ["adapters", "fuse"])
def test_adapters(first: str) -> None:
    model = converted(Model())
    wanted = with_adapter(copy.deepcopy(model), "up_proj")
    if first == "fuse":
        fuse(model)
        made = with_adapter(model, "up_proj")
    else:
        made = with_adapter(model, "up_proj")
        report = fuse(made)
        assert [entry.reason for entry in report.left_alone] == [
            "up_proj is a Linear, not an nn.Linear"
        ] * 2
    with torch.no_grad():
        assert torch.equal(made(X.bfloat16()), wanted(X.bfloat16()))
    assert runs_fused(made) == 0
