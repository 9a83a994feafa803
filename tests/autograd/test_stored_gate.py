"""Gated MLPs that save gate and up in FP8: which bits change, and how much less is saved."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd import gated_forms, gated_mlp, plan, products
from blocktensor.ops.cast.ops import dequantize, quantize_rowwise
from tests.support.gated import (
    EAGER,
    HIDDEN,
    KINDS,
    K,
    Kind,
    N,
    assert_bits,
    before,
    every_kind,
    product_of,
    results,
    weights,
    whether_recomputed,
)
from tests.support.groups import GROUPS
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, randn
from tests.support.numeric import DTYPES, relative_error
from tests.support.wgrad_inputs import HIGH, ROWS, saved_by

RECIPES = (FP32_SCALES, POWER_OF_TWO, ROWS, Recipe(cache_weight=False))
MLP = KINDS["MLP"]


def through_fp8(x: Tensor, recipe: Recipe) -> Tensor:
    cast = quantize_rowwise(x.flatten(0, -2), recipe.activation_format)
    return dequantize(cast, x.dtype).view_as(x)


class Product(torch.autograd.Function):
    """``activation(gate) * up`` of both in one tensor or in two, which backward reads in FP8."""

    @staticmethod
    def forward(ctx: Any, activation: str, recipe: Recipe, *sources: Tensor) -> Tensor:
        ctx.activation, ctx.recipe = activation, recipe
        ctx.save_for_backward(*sources)
        return product_of(activation, *sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leaves = [through_fp8(x, ctx.recipe).requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            h = product_of(ctx.activation, *leaves)
        return None, None, *torch.autograd.grad(h, leaves, grads)


def assert_as_by_linears(
    kind: Kind,
    x: Tensor,
    operands: list[Any],
    recompute: bool = False,
    activation: str = "silu",
    makes_again: bool = True,
) -> list[Tensor | None]:
    """Compare with linears and torch's functions; ``makes_again``: what recompute does."""
    recipe, place = operands[0].recipe, 1 if kind.joint else 2

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        held: list[Tensor] = []

        def of_h(*sources: Tensor) -> Tensor:
            held.append(product_of(activation, *(through_fp8(s.detach(), recipe) for s in sources)))
            made: Tensor = Product.apply(activation, recipe, *sources)
            return made

        if not (recompute and makes_again):
            return kind.unfused(x, *operands, of_h=of_h)
        # the weight of down is trained on what is made again
        down = operands[place]
        ops = [*operands[:place], down.detach(), *operands[place + 1 :]]
        y = kind.unfused(x, *ops, of_h=of_h)
        of_w = kind.product(held[0], down, None)
        return y + (of_w - of_w.detach())

    fused = partial(kind.fused, store_fp8=True, recompute=recompute, activation=activation)
    made = results(fused, x, operands)
    assert_bits(made, results(run, x, operands))
    return made


@whether_recomputed
@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@every_kind
def test_bits(kind: Kind, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    x, operands = kind.inputs(device=device), kind.weights(recipe, device=device)
    assert_as_by_linears(kind, x, operands, recompute)


@pytest.mark.parametrize("activation", EAGER)
def test_activations_and_how_near_they_are(activation: str, device: torch.device) -> None:
    x, operands = MLP.inputs(device=device), MLP.weights(device=device)
    made = assert_as_by_linears(MLP, x, operands, activation=activation)
    exact = results(partial(MLP.fused, activation=activation), x, operands)
    assert_bits(made[:1], exact[:1])
    for got, close in zip(made[1:], exact[1:], strict=True):
        assert got is not None and close is not None
        assert relative_error(got, close) < 0.08
    assert not torch.equal(made[2], exact[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, K), (0, K), (129, K), (3, 1, 5, K)], ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = randn(*shape, seed=5, dtype=dtype, device=device, grad=True)
    assert_as_by_linears(MLP, x, MLP.weights(dtype=dtype, device=device))


@whether_recomputed
@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups: str, recompute: bool, device: torch.device) -> None:
    """NaN in rows of no group reach nothing."""
    kind = Kind(groups=groups)
    assert_as_by_linears(kind, kind.inputs(device=device), kind.weights(device=device), recompute)


@whether_recomputed
def test_biases(recompute: bool, device: torch.device) -> None:
    operands = [*MLP.weights(device=device), *MLP.biases(device=device, grad=True)]
    assert_as_by_linears(MLP, MLP.inputs(device=device), operands, recompute)


@whether_recomputed
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)], ids=str)
@pytest.mark.parametrize("x_grad", [False, True])
def test_frozen_weights(x_grad: bool, frozen: tuple[int, ...], recompute: bool) -> None:
    operands, x = MLP.weights(frozen=frozen), MLP.inputs(grad=x_grad)
    saves_both = x_grad or frozen != (0, 1)
    assert_as_by_linears(MLP, x, operands, recompute, makes_again=saves_both)


@whether_recomputed
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_up_at_the_limit_of_its_dtype(dtype: torch.dtype, recompute: bool) -> None:
    """Power-of-two scales round it to a number that the dtype lacks."""
    count, tiny = 31, 2.0**-12
    each = 2048.0 if dtype is torch.float16 else 2.0**123  # 31 of them round up to 32
    made = []
    for store_fp8 in (True, False):
        gate, up, down = (torch.zeros(s, dtype=dtype) for s in ((4, K), (4, K), (N, 4)))
        gate[:, 0], up[:, :count], down[:, 0] = tiny, each, tiny
        operands: list[Any] = [
            nn.Parameter(BlockwiseFP8Weight(w, POWER_OF_TWO)) for w in (gate, up, down)
        ]
        x = torch.ones(1, K, dtype=dtype, requires_grad=True)
        run = partial(functional.gated_mlp, store_fp8=store_fp8, recompute=recompute)
        y = run(x, *operands)
        y.backward(torch.full_like(y, tiny))
        made.append([y.detach(), x.grad, *(w.grad for w in operands)])
    for got, exact in zip(*made, strict=True):
        assert exact.isfinite().all()
        assert relative_error(got, exact) < 0.08


def test_large_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made one after the other, of the same values."""
    x, operands = randn(70, K, grad=True), weights()
    run = partial(functional.gated_mlp, store_fp8=True)
    want = results(run, x, operands)
    monkeypatch.setattr(plan, "LARGE_BYTES", 0)
    with Trace() as trace:
        made = results(run, x, operands)
    assert trace.ops.count("blocktensor.gated silu 1x128 128x128") == 1
    assert_bits(made, want)


@whether_recomputed
def test_what_is_saved(recompute: bool) -> None:
    x, operands = randn(80, K, grad=True), weights()
    run = partial(functional.gated_mlp, store_fp8=True, recompute=recompute)
    saved = saved_by(lambda: run(x, *operands))
    bytes_of = [t.nbytes for t in saved if type(t) is Tensor and t.itemsize == 1]
    assert bytes_of == [K * 80, *([] if recompute else [HIDDEN * 80]), *[80 * HIDDEN] * 2]
    assert not any(t.dtype == torch.bfloat16 and type(t) is Tensor for t in saved)
    with torch.no_grad(), Trace() as trace:
        run(x, *operands)
    assert trace.ops.count("blocktensor.quantize_rowwise 1x128") == 1  # of x


def test_high_precision_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By forward, and by backward before the gradients of gate and up meet the weights."""
    refs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def remember(*args: Any) -> None:
        refs.extend(weakref.ref(x) for x in args[:3] if isinstance(x, Tensor))

    before(monkeypatch, gated_mlp, "gated", remember)
    before(monkeypatch, gated_forms, "gated_backward", remember)
    before(
        monkeypatch,
        products,
        "gemm",
        lambda *_: alive.append(sum(ref() is not None for ref in refs)),
    )
    y = functional.gated_mlp(randn(256, K, grad=True), *weights(), store_fp8=True)
    assert len(refs) == 2
    assert alive == [0, 0, 0]  # of gate and up; the product of down
    y.backward(torch.ones_like(y))
    assert len(refs) == 5  # and the gradient of h
    assert alive[3:] == [0] * 6


def test_high_precision_weight_gradients_store_no_fp8() -> None:
    operands, x = weights(recipe=HIGH), randn(70, K, grad=True)
    run = partial(functional.gated_mlp, store_fp8=True)
    assert_bits(results(run, x, operands), results(functional.gated_mlp, x, operands))
