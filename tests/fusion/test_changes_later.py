"""A fused model that changes, or is called in another way, computes what its twin does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, convert, freeze, fuse, unfuse
from tests.support import fused_experts
from tests.support.fused_experts import Ends, groups_for
from tests.support.fused_kinds import KINDS, count_runs
from tests.support.gated import assert_bits
from tests.support.mlps import HIDDEN, MLP, K, X, converted, with_adapter
from tests.support.models import plain, randn
from tests.support.steps import step

pytest.importorskip("transformers")

POWER_OF_TWO, ROWS = Recipe(scale="power_of_two"), Recipe.deepseek()
PARTS = {"mlp": "layers.0.mlp", "norm": "layers.0", "experts": "", "routed": ""}
"""What a change of each kind is given."""


def plain_parameter(weight: Tensor, factor: int = 1) -> nn.Parameter:
    return nn.Parameter(plain(weight) * factor)


def plain_linear(mlp: Any) -> None:
    weight = plain_parameter(mlp.up_proj.weight, 2)
    mlp.up_proj = nn.Linear(K, HIDDEN, bias=False, dtype=torch.bfloat16)
    mlp.up_proj.weight = weight


def no_weight(block: Any) -> None:
    block.input_layernorm.weight = None
    block.input_layernorm.forward = lambda x: x * 2


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


CHANGES: dict[str, dict[str, tuple[Callable[[Any], Any], int]]] = {
    "mlp": {
        "activation": (lambda mlp: setattr(mlp, "act_fn", nn.Tanh()), 1),
        "its forward": (lambda mlp: setattr(mlp.act_fn, "forward", lambda x: x), 1),
        "linear": (plain_linear, 1),
        "weight": (
            lambda mlp: setattr(mlp.up_proj, "weight", plain_parameter(mlp.up_proj.weight, 2)),
            1,
        ),
        "forward": (
            lambda mlp: setattr(mlp.up_proj, "forward", lambda x: 0 * mlp.gate_proj(x)),
            1,
        ),
        "class": (lambda mlp: setattr(mlp.up_proj, "__class__", Doubled), 1),
    },
    "norm": {
        "epsilon": (lambda block: setattr(block.input_layernorm, "variance_epsilon", 1e-2), 5),
        "no weight": (no_weight, 5),
        "plain reader": (
            lambda block: setattr(
                block.self_attn.q_proj, "weight", plain_parameter(block.self_attn.q_proj.weight)
            ),
            6,
        ),
        "hook of a reader": (
            lambda block: block.self_attn.q_proj.register_forward_pre_hook(
                lambda m, args: (args[0] + 1,)
            ),
            6,
        ),
    },
    "experts": {
        "plain stack": (lambda experts: setattr(experts, "w3", plain_parameter(experts.w3)), 0),
        "recipe of a stack": (
            lambda experts: setattr(
                experts, "w3", nn.Parameter(BlockwiseFP8Weight(plain(experts.w3), ROWS))
            ),
            0,
        ),
        "activation": (lambda experts: setattr(experts, "act_name", "gelu_tanh"), 0),
    },
    "routed": {
        "implementation": (
            lambda block: setattr(block.experts.config, "_experts_implementation", "eager"),
            0,
        ),
        "parallel": (lambda block: setattr(block.experts, "_is_expert_parallel", True), 0),
        "dtype of a stack": (
            lambda block: setattr(
                block.experts, "down_proj", nn.Parameter(block.experts.down_proj.detach().float())
            ),
            0,
        ),
    },
}
"""By kind: changes, and how many modules then run fused."""


@pytest.mark.parametrize(("name", "change"), [(x, y) for x in CHANGES for y in CHANGES[x]])
def test_what_changes_later(name: str, change: str) -> None:
    kind, (apply, runs) = KINDS[name], CHANGES[name][change]
    model, twin = kind.fused()
    for each in (model, twin):
        apply(each.get_submodule(PARTS[name]))
    assert kind.fused_runs(model) == runs
    if change != "plain stack":  # torch's own product writes no rows of no group
        assert_bits(kind.results(model), kind.results(twin))


def test_a_norm_of_another_dtype_raises_as_written() -> None:
    for each in KINDS["norm"].fused():
        each.layers[0].input_layernorm.float()
        with pytest.raises((TypeError, ValueError)):
            each(X.bfloat16())


def test_another_number_of_experts_raises_as_written() -> None:
    model, twin = KINDS["routed"].fused()
    for each in (model, twin):
        each.experts.num_experts = 2
        with pytest.raises(ValueError, match="4 experts"):
            KINDS["routed"].results(each)
    unfuse(model)
    (entry,) = fuse(model).left_alone
    assert entry.reason == "its num_experts is not the length of its stacks"


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        *(("gate_proj", "forward"), ("up_proj", "forward_pre")),
        *(("down_proj", "full_backward"), ("act_fn", "full_backward_pre"), ("act_fn", "forward")),
    ],
)
def test_hooks_on_inner_modules_that_come_later_run(kind: str, which: str) -> None:
    mlp = KINDS["mlp"]
    model, twin = mlp.fused()
    seen: list[str] = []
    target = getattr(model.layers[0]["mlp"], which)
    handle = getattr(target, f"register_{kind}_hook")(lambda *_: seen.append(kind) or None)
    assert_bits(mlp.results(model), mlp.results(twin))
    assert seen == [kind]
    assert mlp.fused_runs(model) == 1
    handle.remove()
    assert mlp.fused_runs(model) == 2


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("gate_proj", POWER_OF_TWO), ("down_proj", Recipe(wgrad_input="high_precision"))],
)
def test_a_linear_that_gets_another_recipe_later(name: str, recipe: Recipe) -> None:
    mlp = KINDS["mlp"]
    model, twin = mlp.fused()
    for each in (model, twin):
        convert(getattr(each.layers[0]["mlp"], name), recipe, skip_small=False)
    assert_bits(mlp.results(model), mlp.results(twin))
    assert mlp.fused_runs(model) == 1
    assert [entry.name for entry in fuse(model).left_alone] == ["layers.0.mlp"]
    for each in (model, twin):  # all of them, and fused again
        convert(each.layers[0]["mlp"], POWER_OF_TWO, skip_small=False)
    assert fuse(model).left_alone == ()
    assert_bits(mlp.results(model), mlp.results(twin))
    assert mlp.fused_runs(model) == 2


@pytest.mark.parametrize("first", ["adapters", "fuse"])
@pytest.mark.parametrize(
    ("name", "linear", "reasons", "runs"),
    [
        ("mlp", "up_proj", ["up_proj is a Linear, not an nn.Linear"] * 2, 0),
        ("norm", "q_proj", [], 6),
    ],
)
def test_adapters(name: str, linear: str, reasons: list[str], runs: int, first: str) -> None:
    kind = KINDS[name]
    model = kind.make(torch.bfloat16)
    freeze(model)
    wanted = with_adapter(copy.deepcopy(model), linear)
    if first == "fuse":
        fuse(model)
    made = with_adapter(model, linear)
    if first == "adapters":
        assert [entry.reason for entry in fuse(made).left_alone] == reasons
    assert_bits(kind.results(made), kind.results(wanted))
    assert kind.fused_runs(made) == runs


# Other arguments


class Takes(MLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


x, rows = X.bfloat16(), randn(fused_experts.ROWS, K)
sizes, ends = groups_for(fused_experts.Sizes()), groups_for(Ends())
tokens, weights = randn(5, 128), randn(5, 2, seed=1).abs()
routing = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [1, 0]])

CALLS: dict[str, tuple[Callable[[], Any], list[tuple[Callable[[Any], Tensor], int]]]] = {
    "mlp": (
        lambda: converted(Takes()),
        [
            *((lambda m: m(x), 1), (lambda m: m(x, 2.0), 0)),
            *((lambda m: m(x=x), 0), (lambda m: m(x, scale=0.5), 0)),
        ],
    ),
    "sizes of groups": (
        lambda: fused_experts.converted(fused_experts.Sizes()),
        [
            *((lambda m: m(rows, sizes), 1), (lambda m: m(rows, groups=sizes), 0)),
            (lambda m: m(rows.float(), sizes), 0),
        ],
    ),
    "ends of groups": (
        lambda: fused_experts.converted(Ends()),
        [(lambda m: m(rows, ends), 1), (lambda m: m(rows, ends.long()), 0)],
    ),
    "routed": (
        lambda: KINDS["routed"].make(torch.bfloat16).experts,
        [
            (lambda m: m(tokens, routing, weights), 1),
            (lambda m: m(tokens, routing, top_k_weights=weights), 0),
            (lambda m: m(tokens[:0], routing[:0], weights[:0]), 1),
            (lambda m: m(tokens, routing, weights.float()), 1),
        ],
    ),
}
"""Models, calls, and how many modules run fused."""


@pytest.mark.parametrize("name", CALLS)
def test_other_arguments(name: str) -> None:
    make, calls = CALLS[name]
    model = make()
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    for call, runs in calls:
        assert count_runs(call, model) == runs
        with torch.no_grad():
            assert torch.equal(call(model), call(twin))


def test_stacks_of_another_dtype_convert_as_written() -> None:
    model, twin = KINDS["routed"].fused()
    for given in (tokens, tokens.float()):
        batch = given, routing, weights.to(given.dtype)
        assert_bits(*(step(each.experts.float(), *batch) for each in (model, twin)))
