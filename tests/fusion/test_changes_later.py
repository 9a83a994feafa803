"""A fused model that changes, or is called in another way, computes what its twin does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, convert, freeze, fuse, unfuse
from tests.support import fused_experts
from tests.support.fused_experts import Ends, groups_for
from tests.support.fused_kinds import KINDS, count_runs
from tests.support.gated import EAGER, assert_bits
from tests.support.mlps import HIDDEN, MLP, K, X, converted, with_adapter
from tests.support.models import plain, randn
from tests.support.steps import step

pytest.importorskip("transformers")

POWER_OF_TWO, ROWS = Recipe(scale="power_of_two"), Recipe.deepseek()
LORA = "peft.tuners.lora.layer.Linear"
PARTS = {"mlp": "layers.0.mlp", "norm": "layers.0", "experts": "", "routed": ""}
"""What a change of each kind is given."""


def plain_parameter(weight: Tensor, factor: int = 1) -> nn.Parameter:
    return nn.Parameter(plain(weight) * factor)


def plain_linear(old: nn.Linear) -> nn.Linear:
    made = nn.Linear(K, HIDDEN, bias=False, dtype=torch.bfloat16)
    made.weight = plain_parameter(old.weight, 2)
    return made


def no_weight(block: Any) -> None:
    block.input_layernorm.weight = None
    block.input_layernorm.forward = lambda x: x * 2


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def put(path: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change: replace what is at ``path`` below a module by what is made of it."""
    *owners, name = path.split(".")

    def change(module: Any) -> None:
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, name, make(getattr(owner, name, None)))

    return change


CHANGES: dict[tuple[str, int], dict[str, Callable[[Any], Any]]] = {
    ("mlp", 1): {
        "activation": put("act_fn", lambda _: nn.Tanh()),
        "its forward": put("act_fn.forward", lambda _: lambda x: x),
        "linear": put("up_proj", plain_linear),
        "weight": put("up_proj.weight", lambda w: plain_parameter(w, 2)),
        "forward": put("up_proj.forward", lambda forward: lambda x: 0 * forward(x)),
        "class": put("up_proj.__class__", lambda _: Doubled),
    },
    ("norm", 5): {
        "epsilon": put("input_layernorm.variance_epsilon", lambda _: 1e-2),
        "no weight": no_weight,
    },
    ("norm", 6): {
        "plain reader": put("self_attn.q_proj.weight", plain_parameter),
        "hook of a reader": lambda block: block.self_attn.q_proj.register_forward_pre_hook(
            lambda m, args: (args[0] + 1,)
        ),
    },
    ("experts", 0): {
        "plain stack": put("w3", plain_parameter),
        "recipe of a stack": put("w3", lambda w: nn.Parameter(BlockwiseFP8Weight(plain(w), ROWS))),
        "activation": put("of_gate", lambda _: EAGER["gelu_tanh"]),
    },
    ("routed", 0): {
        "implementation": put("experts.config._experts_implementation", lambda _: "eager"),
        "parallel": put("experts._is_expert_parallel", lambda _: True),
        "dtype of a stack": put("experts.down_proj", lambda w: nn.Parameter(w.detach().float())),
    },
}
"""By kind, and how many modules then run fused: changes of its part."""


@pytest.mark.parametrize(
    ("name", "runs", "change"), [(*x, y) for x, changes in CHANGES.items() for y in changes]
)
def test_what_changes_later(name: str, runs: int, change: str) -> None:
    kind = KINDS[name]
    model, twin = kind.fused()
    for each in (model, twin):
        CHANGES[name, runs][change](each.get_submodule(PARTS[name]))
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


INNER = (
    "gate_proj forward",
    "up_proj forward_pre",
    "down_proj full_backward",
    "act_fn full_backward_pre",
    "act_fn forward",
)


@pytest.mark.parametrize("hook", INNER)
def test_hooks_on_inner_modules_that_come_later_run(hook: str) -> None:
    which, kind = hook.split()
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
        ("mlp", "up_proj", [f"up_proj is wrapped by an adapter of peft, {LORA}"] * 2, 0),
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


class Converts(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.up_proj.weight.dtype))


class Takes(MLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


x, rows = X.bfloat16(), randn(fused_experts.ROWS, K)
sizes, ends = groups_for(fused_experts.Sizes()), groups_for(Ends())
tokens, weights = randn(5, 128), randn(5, 2, seed=1).abs()
routing = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [1, 0]])

CALLS: dict[str, tuple[Callable[[], Any], list[tuple[int, Callable[[Any], Tensor]]]]] = {
    "mlp": (
        lambda: converted(Takes()),
        [
            (1, lambda m: m(x)),
            (0, lambda m: m(x, 2.0)),
            (0, lambda m: m(x=x)),
            (0, lambda m: m(x, scale=0.5)),
        ],
    ),
    "mlp that converts": (
        lambda: converted(Converts()),
        [(1, lambda m: m(x)), (0, lambda m: m(x.float()))],
    ),
    "sizes of groups": (
        lambda: fused_experts.converted(fused_experts.Sizes()),
        [
            (1, lambda m: m(rows, sizes)),
            (0, lambda m: m(rows, groups=sizes)),
            (0, lambda m: m(rows.float(), sizes)),
        ],
    ),
    "ends of groups": (
        lambda: fused_experts.converted(Ends()),
        [(1, lambda m: m(rows, ends)), (0, lambda m: m(rows, ends.long()))],
    ),
    "routed": (
        lambda: KINDS["routed"].make(torch.bfloat16).experts,
        [
            (1, lambda m: m(tokens, routing, weights)),
            (0, lambda m: m(tokens, routing, top_k_weights=weights)),
            (1, lambda m: m(tokens[:0], routing[:0], weights[:0])),
            (1, lambda m: m(tokens, routing, weights.float())),
        ],
    ),
}
"""Models, how many modules run fused, and in which call."""


@pytest.mark.parametrize("name", CALLS)
def test_other_arguments(name: str) -> None:
    make, calls = CALLS[name]
    model = make()
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    for runs, call in calls:
        assert count_runs(call, model) == runs
        with torch.no_grad():
            assert torch.equal(call(model), call(twin))


def test_stacks_of_another_dtype_convert_as_written() -> None:
    model, twin = KINDS["routed"].fused()
    for given in (tokens, tokens.float()):
        batch = given, routing, weights.to(given.dtype)
        assert_bits(*(step(each.experts.float(), *batch) for each in (model, twin)))
