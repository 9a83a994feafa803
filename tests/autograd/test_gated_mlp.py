"""A gated MLP as one function: the bits of its linears, fewer casts, and what it saves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Weight, Recipe, functional, quantize
from tests.support.gated import EAGER, K, assert_bits, biases, results, unfused, weights
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, complaint, plain, randn

fused = functional.gated_mlp
SQUARES = Recipe(wgrad_input="128x128")
RECIPES = (
    FP32_SCALES,
    POWER_OF_TWO,
    SQUARES,
    Recipe(cache_weight=False),
    Recipe(cache_weight="step"),
)


def inputs(*shape: int, grad: bool = True, **options: Any) -> Tensor:
    return randn(*shape, K, seed=5, grad=grad, **options)


def assert_same_bits(
    x: Tensor, operands: list[Any], activation: str = "silu", again: bool = False, **options: Any
) -> None:
    wanted = results(functools.partial(unfused, activation=activation), x, operands, again)
    run = functools.partial(fused, activation=activation, **options)
    assert_bits(results(run, x, operands, again), wanted)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", EAGER)
def test_bits(activation: str, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    operands = weights(recipe=recipe, device=device)
    x = inputs(2, 75, device=device)
    assert_same_bits(x, operands, activation, recompute=recompute)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (129,), (3, 1, 5)])
def test_shapes(shape: tuple[int, ...], device: torch.device) -> None:
    assert_same_bits(inputs(*shape, device=device), weights(device=device))


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,), (0, 1, 2)], ids=lambda f: f"{f}")
@pytest.mark.parametrize("frozen", [(), (0, 1, 2)], ids=lambda f: f"{f}")
def test_biases(trained: tuple[int, ...], frozen: tuple[int, ...]) -> None:
    made = biases(grad=False)
    for i in trained:
        made[i].requires_grad_()
    for x_grad in (True, False):
        assert_same_bits(inputs(70, grad=x_grad), [*weights(frozen=frozen), *made])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    operands = weights(dtype=torch.float32, device=device)
    with torch.autocast(device.type, dtype):
        for again in (False, True):
            assert_same_bits(inputs(70, dtype=torch.float32, device=device), operands, again=again)
    assert_same_bits(inputs(70, dtype=torch.float32, device=device), operands)


def test_other_uses_of_the_input_sum_in_the_same_order() -> None:
    """The order of three bf16 terms shows in the bits of the sum."""
    operands, other = weights(), weights()[0]

    def with_another(run: Callable[..., Tensor], first: bool) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: Any) -> Tensor:
            before = torch.nn.functional.linear(x, other) if first else 0
            y = run(x, *args)
            after = 0 if first else torch.nn.functional.linear(x, other)
            return torch.cat([y, before + after], 1)

        return call

    for first in (True, False):
        wanted = results(with_another(unfused, first), inputs(130), operands, again=True)
        assert_bits(results(with_another(fused, first), inputs(130), operands, True), wanted)


def test_plain_weights_and_cast_inputs() -> None:
    operands = [plain(w).requires_grad_() for w in weights()]
    fp8 = [BlockwiseFP8Weight(w.detach()).requires_grad_() for w in operands]
    wanted = results(unfused, inputs(70), fp8)
    assert_bits(results(fused, inputs(70), operands), wanted)
    got = results(lambda x, *ws: fused(quantize(x), *ws), inputs(70), fp8)
    assert_bits(got, wanted)
    squares = [plain(w).requires_grad_() for w in weights()]
    wanted = results(unfused, inputs(70), weights(recipe=SQUARES))
    assert_bits(results(functools.partial(fused, recipe=SQUARES), inputs(70), squares), wanted)
    assert not torch.equal(wanted[2], results(fused, inputs(70), operands)[2])  # type: ignore


def test_high_precision_weight_gradients_run_linear_by_linear() -> None:
    recipe = Recipe(wgrad_input="high_precision")
    assert_same_bits(inputs(70), weights(recipe=recipe))
    with Trace() as trace, torch.no_grad():  # where nothing reads high precision
        fused(inputs(70), *weights(recipe=recipe))
    assert trace.count("blocktensor.gated") == 1


def test_nothing_of_the_gate_is_saved_where_only_down_is_trained() -> None:
    saved: list[Tensor] = []
    operands = weights(frozen=(0, 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused(inputs(70, grad=False), *operands, recompute=True)
    assert {t.dtype for t in saved} == {torch.float8_e4m3fn, torch.float32}


def test_bad_input() -> None:
    operands, x = weights(), inputs(70)
    assert_expected_inline(
        complaint(ValueError, lambda: fused(x, *operands, activation="tanh")),  # type: ignore
        """activation 'tanh': expected one of silu, gelu, gelu_tanh, relu2""",
    )
    narrow = torch.nn.Parameter(BlockwiseFP8Weight(randn(64, K)))
    assert_expected_inline(
        complaint(ValueError, lambda: fused(x, operands[0], narrow, operands[2])),
        """gate has 320 features and up 64: expected the same number""",
    )
    mixed = [operands[0], *weights(recipe=SQUARES)[1:]]
    assert_expected_inline(
        complaint(ValueError, lambda: fused(x, *mixed)),
        """\
mixed recipes: weights of one gated MLP have wgrad_input='1x128' and '128x128': give
them one recipe, or call functional.linear for each""",
    )
    mixed = [operands[0], *weights(recipe=POWER_OF_TWO)[1:]]
    with pytest.raises(ValueError, match="mixed"):
        fused(x, *mixed)
    with pytest.raises(TypeError, match="convert one of them"):
        fused(x.float(), *operands)
