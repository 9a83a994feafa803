"""Linears that are given one input share its cast, and nobody can tell by the results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    share_inputs,
    unshare_inputs,
)
from blocktensor import to_blockwise_fp8_weights as to_fp8
from blocktensor.autograd.shared_cast import this_thread
from tests.support.backends import replace_op
from tests.support.compiling import instantiates, reads_grad
from tests.support.fused_kinds import COPIES
from tests.support.models import FP32_SCALES, POWER_OF_TWO, RECIPES, Trace, complaint, plain, randn
from tests.support.moe_models import GroupedExperts
from tests.support.siblings import Casts, K, Mlp, N, Qkv, X, casts, converted, results
from tests.support.steps import assert_bits, step

__all__ = ["casts"]


@pytest.mark.parametrize("bf16_autocast", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_results_and_gradients_are_those_of_the_unshared_model(
    recipe: Recipe, bf16_autocast: bool, device: torch.device
) -> None:
    shared, unshared, by_hand = (converted(Qkv(h), recipe).to(device) for h in (False, False, True))
    share_inputs(shared)
    for seed in range(2):  # the second repeats recorded launches
        x = randn(2, 5, K, seed=seed, dtype=torch.float32, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16_autocast):
            y, *wanted = results(unshared, x)
            assert_bits(results(shared, x), [y, *wanted])
            hand = results(by_hand, x)
        # by hand under autocast, dx is summed in bf16
        assert_bits([y, *wanted][bf16_autocast * 2 :], hand[bf16_autocast * 2 :])


def test_a_lone_linear_gives_the_same_and_saves_no_more() -> None:
    sizes = []
    for share in (False, True):
        model = converted(Qkv())
        if share:
            share_inputs(model)
        for _ in range(2):
            saved: dict[int, Tensor] = {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.setdefault(t.data_ptr(), t), lambda t: t
            ):
                model(X)
            sizes.append(sum(t.nbytes for t in saved.values() if t.dtype == torch.float8_e4m3fn))
    assert sizes == [64 * (3 * K + N)] * 2 + [64 * (K + N)] * 2  # 9 tokens in a step of 64


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("kind", "alone"), [(Qkv, 4), (Mlp, 3)])
def test_one_cast_an_activation(
    casts: Casts, kind: type[nn.Module], alone: int, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(kind())
    if not grad:  # nobody will ask for the other form
        replace_op(monkeypatch, "quantize_columnwise", mock.Mock(side_effect=AssertionError))
    with torch.set_grad_enabled(grad):
        model(X)
        assert len(casts) == alone
        report = share_inputs(model)
        for run in range(1, 4):
            casts.clear()
            model(X)
            assert len(casts) == 2
            assert (report.casts, report.saved) == (2 * run, (alone - 2) * run)


def test_the_report() -> None:
    model = converted(nn.ModuleDict({"layers": nn.ModuleList([Qkv(), Qkv()]), "mlp": Mlp()}))
    report = share_inputs(model)
    for layer in model["layers"]:
        layer(X)
    model["mlp"](X)
    assert_expected_inline(
        str(report),
        """\
module        linear layers   casts  saved
------------  --------------  -----  -----
layers.* (2)  q, k, v, o      2      2
mlp           gate, up, down  2      1
3 groups; 6 casts made, 5 saved""",
    )
    assert share_inputs(model).groups == report.groups  # again changes nothing
    assert len(model["mlp"]._forward_pre_hooks) == 1


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_linears_in_a_container_are_siblings(kind: type, casts: Casts) -> None:
    class Contained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linears = [nn.Linear(K, N) for _ in range(3)]
            named = zip("abc", linears, strict=True)
            inner = nn.ModuleList(linears) if kind is nn.ModuleList else nn.ModuleDict(named)
            self.experts = nn.ModuleDict({"inner": inner})

        def forward(self, x: Tensor) -> Tensor:
            return sum(expert(x) for expert in self.experts["inner"].children())  # type: ignore[return-value]

    model = converted(Contained())
    assert [group.name for group in share_inputs(model).groups] == [""]
    model(X)
    assert len(casts) == 1


def test_a_different_recipe_is_cast_by_itself() -> None:
    shared, unshared = Qkv(), Qkv()
    for model in (shared, unshared):
        converted(model)
        to_fp8(model.k, POWER_OF_TWO)
        assert (model.k.weight.recipe, model.v.weight.recipe) == (POWER_OF_TWO, FP32_SCALES)
    share_inputs(shared)
    assert_bits(results(shared, X), results(unshared, X))


@pytest.mark.parametrize("first", [None, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", ["", "q", "qkv"])
def test_a_cast_without_gradients_does_not_serve_one_with(
    first: Callable[[], Any] | None, frozen: str
) -> None:
    shared, unshared = Qkv(), Qkv()

    def without(model: nn.Module, x: Tensor) -> None:
        if first is not None:
            with first():
                model.k(x), model.v(x)

    for model in (shared, unshared):
        for name in frozen:
            getattr(model, name).weight.requires_grad_(False)
        converted(model)
        assert isinstance(model.q.weight, BlockwiseFP8Tensor) == ("q" in frozen)
        model.between = functools.partial(without, model)
    share_inputs(shared)
    assert_bits(results(shared, X), results(unshared, X))


def test_autocast_within_the_module() -> None:
    outputs: list[Tensor] = []

    def other(x: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(torch.cat([model.k(x), model.v(x)]))

    for share in (False, True):
        model = converted(Qkv(between=other))
        if share:
            share_inputs(model)
        model(X)
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)


@pytest.mark.parametrize("how", COPIES)
def test_copies_share_for_themselves(how: str, casts: Casts) -> None:
    model = converted(Qkv())
    report = share_inputs(model)
    y = model(X)
    twin = COPIES[how](model)
    casts.clear()
    mine = share_inputs(twin)
    assert mine.groups[0] is not report.groups[0]
    assert torch.equal(twin(X), y)
    assert len(casts) == 2
    assert (mine.casts, report.casts) == (4, 2)
    unshare_inputs(twin)
    casts.clear()
    twin(X)
    assert len(casts) == 4
    model(X)
    assert report.casts == 4


def test_removing_leaves_the_model_as_it_was(casts: Casts) -> None:
    model = converted(Qkv())
    keys = list(model.state_dict())
    report = share_inputs(model)
    assert list(model.state_dict()) == keys
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    assert unshare_inputs(model) == [group.name for group in report.groups]
    assert unshare_inputs(model) == []
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks)
        assert not module._forward_hooks_always_called
    model(X)
    assert len(casts) == 4


def test_linears_converted_later_join(casts: Casts) -> None:
    model = Qkv()
    for linear in (model.q, model.k):
        to_fp8(linear)
    first = share_inputs(model)
    assert first.groups[0].linears == ("q", "k")
    converted(model)
    second = share_inputs(model)
    assert second.groups[0].linears == ("q", "k", "v", "o")
    model(X)
    assert len(casts) == 2
    assert (first.casts, second.casts) == (0, 2)
    assert unshare_inputs(model) == [""]
    assert not model._forward_hooks


def test_an_input_in_fp8_already_is_left_alone(casts: Casts) -> None:
    model = converted(Qkv(by_hand=True))
    report = share_inputs(model)
    for _ in range(2):
        model(X)
    assert (report.casts, report.saved) == (2, 0)  # o's


def test_whoever_watches_ops_sees_those_of_the_unshared_model() -> None:
    model, seen = converted(Qkv()), []
    model(X)
    for _ in range(2):
        with Trace() as trace, torch.no_grad():
            model(X)
        seen.append(trace.ops)
        share_inputs(model)
        model(X)
    assert seen[0] == seen[1]
    assert trace.count("quantize_rowwise 1x128") == 4


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_hooks_compile_to_nothing(fullgraph: bool) -> None:
    model = converted(Qkv())
    report = share_inputs(model)
    for linear in (model.q, model.k, model.v, model.o):
        linear.weight = nn.Parameter(plain(linear.weight))
    y = model(X)
    assert model._forward_hooks
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=fullgraph)(X), y)
    assert report.casts == 0 and this_thread.running is None


@instantiates
@reads_grad
def test_linear_layers_that_are_compiled_one_by_one() -> None:
    """Before torch 2.14 Dynamo skips the forward of an ``nn.Linear``, so that they share."""
    model = converted(Qkv())
    wanted = results(model, X)
    report = share_inputs(model)
    for linear in (model.q, model.k, model.v, model.o):
        linear.compile(backend="aot_eager")
    for _ in range(2):
        assert_bits(results(model, X), wanted)
    are_compiled = torch.__version__ >= (2, 14)  # each casts its own input then
    assert (report.casts, report.saved) == ((0, 0) if are_compiled else (4, 4))


def test_a_backward_hook_of_a_linear_sees_its_own_gradient() -> None:
    seen: list[Tensor] = []
    for share in (False, True):
        model = converted(Qkv())
        model.k.register_full_backward_hook(lambda _, grad_in, __: seen.append(grad_in[0]))
        if share:
            share_inputs(model)
        results(model, X)
    assert torch.equal(seen[0], seen[1])


def test_nothing_to_share() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: share_inputs(Qkv())),
        """\
no linear layer of this Qkv is in FP8, so there is no cast to share: convert it
first with blocktensor.convert(model)""",
    )
    assert share_inputs(converted(nn.Linear(K, N))).groups == ()


# Experts: the stacks of a module


SIZES = torch.tensor([3, 0, 129, 8])
TOKENS = randn(140, 128, grad=True)
REPORT = """\
module   linear layers           casts  saved
-------  ----------------------  -----  -----
(model)  w1_EFD, w2_EDF, w3_EFD  6      3
1 groups; 6 casts made, 3 saved"""


def experts(recipe: Recipe | None = None) -> GroupedExperts:
    module = GroupedExperts(4, 128, 256)
    convert(module, recipe, skip_small=False)
    return module


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
def test_gate_and_up_share_one_cast_and_keep_their_bits(wgrad_input: Any) -> None:
    alone, module = (experts(Recipe(wgrad_input=wgrad_input)) for _ in range(2))
    report = share_inputs(module)
    for turn in range(1, 4):
        assert_bits(step(module, TOKENS, SIZES), step(alone, TOKENS, SIZES))
        assert (report.casts, report.saved) == (2 * turn, turn)
    assert str(report) == REPORT
    assert unshare_inputs(module) == [""]
    step(module, TOKENS, SIZES)
    assert report.casts == 6


@pytest.mark.parametrize("other", ["1x128", "high_precision"])
def test_stacks_of_other_recipes_cast_for_themselves(other: Any) -> None:
    alone, module = experts(), experts()
    for made in (alone, module):
        weight = made.w3_EFD
        made.w3_EFD = nn.Parameter(BlockwiseFP8Weight(weight.master, Recipe(wgrad_input=other)))
    report = share_inputs(module)
    for _ in range(2):
        assert_bits(step(module, TOKENS, SIZES), step(alone, TOKENS, SIZES))
    assert report.saved == 0
