"""Stateless FP8: its accuracy, its agreement with a converted model, and what it refuses."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from tests.support.models import (
    POWER_OF_TWO,
    RECIPES,
    SQUARE,
    composed,
    linear,
    plain,
    randn,
    with_outliers,
)
from tests.support.steps import assert_bits, step

SMALL_KN = [(256, 384), (192, 576), (130, 70)]
LARGE_KN = [(2048, 1100), (7168, 2112), (2048, 10944)]
TOKENS = [1, 3, 127, 128, 300]


CASES = [
    *(pytest.param("cpu", kn, m) for kn in SMALL_KN for m in TOKENS),
    *(
        pytest.param("cuda", kn, m, marks=pytest.mark.gpu)
        for kn in SMALL_KN + LARGE_KN
        for m in [*TOKENS, 4096]
    ),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("where", "kn", "m"), CASES)
def test_signal_to_quantization_noise(
    where: str, kn: tuple[int, int], m: int, outliers: bool, recipe: Recipe
) -> None:
    """Energies are pooled over draws: one row holds too few outliers for a stable ratio."""
    k, n = kn
    draw = functools.partial(with_outliers if outliers else randn, device=where)
    w = draw(n, k, seed=0).requires_grad_()
    energies = torch.zeros(3, 2, dtype=torch.float64)  # of y, dx, dw: signal and noise
    for seed in range(max(1, min(300 // m, 32))):
        x, grad = (draw(m, c, seed=c + seed) for c in (k, n))
        x, w.grad = x.requires_grad_(), None
        y = functional.linear(x, w, recipe=recipe)
        y.backward(grad)
        x64, w64, g64 = (t.detach().double() for t in (x, w, grad))
        exact = x64 @ w64.t(), g64 @ w64, g64.t() @ x64
        for i, (got, want) in enumerate(zip((y.detach(), x.grad, w.grad), exact, strict=True)):
            energies[i, 0] += want.square().sum().cpu()
            energies[i, 1] += (got - want).square().sum().cpu()
    decibels = 10 * torch.log10(energies[:, 0] / energies[:, 1])
    assert (decibels >= (25 if outliers else 27)).all(), decibels


# One result, however it is asked for


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_converted_module(bias: bool, recipe: Recipe, device: torch.device) -> None:
    module = linear(256, 384, bias=bias, recipe=recipe, device=device)
    parameters = [plain(p).requires_grad_() for p in module.parameters()]
    stateless = functools.partial(functional.linear, recipe=recipe)
    got = step(lambda x: stateless(x, *parameters), randn(2, 5, 384, device=device), of=parameters)
    assert_bits(got, step(module, randn(2, 5, 384, device=device)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    view=st.sampled_from(["contiguous", "transposed", "stepped", "offset", "expanded"]),
    grad_view=st.sampled_from(["contiguous", "transposed", "stepped", "offset", "expanded"]),
    recipe=st.sampled_from(RECIPES),
)
def test_any_shape_and_view(
    lead: list[int], n: int, k: int, view: str, grad_view: str, recipe: Recipe
) -> None:
    x, w = viewed(view, (*lead, k)).requires_grad_(), randn(n, k, seed=1, grad=True)
    grad = viewed(grad_view, (*lead, n))
    y = functional.linear(x, w, recipe=recipe)
    y.backward(grad)
    rows = math.prod(lead)
    wanted = composed(x.detach().reshape(rows, k), w.detach(), grad.reshape(rows, n), recipe)
    assert torch.equal(y, wanted[0].view(*lead, n))
    assert torch.equal(x.grad, wanted[1].view(*lead, k))
    assert torch.equal(w.grad, wanted[2])


def viewed(view: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` that lies in memory as ``view`` says."""
    if view == "transposed":
        return randn(*reversed(shape)).permute(*reversed(range(len(shape))))
    if view == "stepped":
        return randn(*(2 * s for s in shape))[(slice(None, None, 2),) * len(shape)]
    if view == "offset":
        return randn(*(s + 3 for s in shape))[(slice(3, None),) * len(shape)]
    if view == "expanded":
        return randn(*(1 for _ in shape)).expand(shape)
    return randn(*shape)


def test_the_recipe_comes_with_an_operand() -> None:
    x, w = randn(5, 384), randn(256, 384, seed=1)
    wanted = functional.linear(x, w, recipe=POWER_OF_TWO)
    assert not torch.equal(functional.linear(x, w), wanted)  # the recipes do differ here
    assert torch.equal(functional.linear(quantize(x, POWER_OF_TWO), w), wanted)
    trained = BlockwiseFP8Weight(w, POWER_OF_TWO)
    for weight in (trained, BlockwiseFP8Tensor.from_values(w, SQUARE, POWER_OF_TWO)):
        assert torch.equal(functional.linear(x, weight), wanted)
        assert torch.equal(F.linear(x, weight), wanted)


# What is no tensor, no recipe, or of a dtype that does not fit

X, W, STACK = randn(16, 256), randn(256, 256, seed=1), randn(2, 256, 256, seed=2)
NORM, ENDS = randn(256, seed=3), torch.tensor([8, 16], dtype=torch.int32)
TARGET = torch.zeros(16, dtype=torch.int64)

OPERANDS: dict[str, tuple[Any, ...]] = {
    "linear": (X, W, NORM),
    "gated_mlp": (X, W, W, W, NORM, NORM, NORM),
    "gated_experts": (X, STACK, STACK, STACK, ENDS),
    "linear_cross_entropy": (X, W, TARGET, NORM),
    "grouped_linear": (X, STACK, ENDS, STACK[:, 0]),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_are_no_tensors_are_refused(name: str) -> None:
    run, operands = getattr(functional, name), OPERANDS[name]
    assert name in functional.__all__
    for i in range(len(operands)):
        for other in (3, {1.0}, "x"):
            given = [*operands[:i], other, *operands[i + 1 :]]
            with pytest.raises(TypeError, match=rf"\b{type(other).__name__}\b"):
                run(*given)
    with pytest.raises(TypeError, match=r"x is a NoneType: expected a tensor"):
        run(None, *operands[1:])
    for recipe, example in (("fast", r"Recipe\.deepseek\(\)"), ("fp32", r"Recipe\(scale='fp32'\)")):
        with pytest.raises(TypeError, match=rf"expected a blocktensor\.Recipe, e\.g\..*{example}"):
            run(*operands, recipe=recipe)
    made, wanted = run(*operands, recipe=None), run(*operands)
    assert torch.equal(made, wanted)


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("gated_mlp", {"recompute": "yes"}, "recompute='yes': expected True or False"),
        ("gated_experts", {"recompute": "yes"}, "recompute='yes': expected True or False"),
        (
            "linear_cross_entropy",
            {"ignore_index": 0.5},
            "ignore_index is a float: expected the index of a class",
        ),
    ],
)
def test_options_of_another_type_are_refused(name: str, option: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        getattr(functional, name)(*OPERANDS[name], **option)


def test_a_cast_of_what_is_no_tensor() -> None:
    for x in (None, [1.0]):
        with pytest.raises(TypeError, match=rf"x is a {type(x).__name__}: expected a tensor"):
            functional.quantize(x)
    with pytest.raises(TypeError, match=r"recipe='fast' is a str: expected a blocktensor\.Recipe"):
        functional.quantize(X, "fast")
    made, wanted = functional.quantize(X, None), functional.quantize(X)
    assert torch.equal(made.dequantize(), wanted.dequantize())
