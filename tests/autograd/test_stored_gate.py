"""Gated MLPs that save gate and up in FP8: which bits change, and how much less is saved."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd import gated_forms, gated_mlp, plan, products
from blocktensor.ops.cast.ops import dequantize, quantize_rowwise
from tests.support.gated import EAGER, HIDDEN, K, N, assert_bits, biases, results, weights
from tests.support.groups import GROUPS, ends
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, randn
from tests.support.numeric import DTYPES, relative_error

SQUARES = Recipe(wgrad_input="128x128")
RECIPES = (FP32_SCALES, POWER_OF_TWO, SQUARES, Recipe(cache_weight=False))
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
whether_recomputed = pytest.mark.parametrize("recompute", [False, True])


def through_fp8(x: Tensor, recipe: Recipe) -> Tensor:
    cast = quantize_rowwise(x.flatten(0, -2), recipe.activation_format)
    return dequantize(cast, x.dtype).view_as(x)


class Product(torch.autograd.Function):
    """``activation(gate) * up`` of both in one tensor or in two, which backward reads in FP8."""

    @staticmethod
    def forward(ctx: Any, activation: str, recipe: Recipe, *sources: Tensor) -> Tensor:
        ctx.activation, ctx.recipe = activation, recipe
        ctx.save_for_backward(*sources)
        return of(activation, *sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leaves = [through_fp8(x, ctx.recipe).requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            h = of(ctx.activation, *leaves)
        return None, None, *torch.autograd.grad(h, leaves, grads)


def of(activation: str, *sources: Tensor) -> Tensor:
    gate, up = sources if len(sources) == 2 else sources[0].chunk(2, -1)
    return EAGER[activation](gate) * up


def wanted(
    x: Tensor,
    operands: list[Any],
    product: Callable[..., Tensor],
    recipe: Recipe,
    recompute: bool,
    activation: str = "silu",
) -> list[Tensor | None]:
    """By linears and torch's functions; ``operands``: weights, then any biases."""
    count = 3 if len(operands) % 3 == 0 else 2

    def run(x: Tensor, *operands: Tensor) -> Tensor:
        ws = operands[:count]
        bs = operands[count:] or (None,) * count
        sources = [product(x, w, b) for w, b in zip(ws[:-1], bs[:-1], strict=True)]
        h = Product.apply(activation, recipe, *sources)
        if recompute:  # the weight of down is trained on what is made again
            again = of(activation, *(through_fp8(s.detach(), recipe) for s in sources))
            of_h = product(h, ws[-1].detach(), bs[-1])
            of_w = product(again, ws[-1], None)
            return of_h + (of_w - of_w.detach())
        return product(h, ws[-1], bs[-1])

    return results(run, x, operands)


def inputs(*shape: int, grad: bool = True, **options: Any) -> Tensor:
    return randn(*shape, K, seed=5, grad=grad, **options)


@whether_recomputed
@every_recipe
@pytest.mark.parametrize("activation", EAGER)
def test_bits(activation: str, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    x, operands = inputs(2, 75, device=device), weights(recipe=recipe, device=device)
    options: Any = {"activation": activation, "recompute": recompute}
    made = results(functools.partial(functional.gated_mlp, store_fp8=True, **options), x, operands)
    assert_bits(made, wanted(x, operands, F.linear, recipe, **options))
    exact = results(functools.partial(functional.gated_mlp, **options), x, operands)
    assert_bits(made[:1], exact[:1])
    for got, close in zip(made[1:], exact[1:], strict=True):
        assert got is not None
        assert close is not None
        assert relative_error(got, close) < 0.08
    assert not torch.equal(made[2], exact[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (129,), (3, 1, 5)])
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, operands = inputs(*shape, dtype=dtype, device=device), weights(dtype=dtype, device=device)
    made = results(functools.partial(functional.gated_mlp, store_fp8=True), x, operands)
    rows = [x[None] if x.ndim == 1 else x, operands]
    want = wanted(*rows, F.linear, FP32_SCALES, False)  # type: ignore[arg-type]
    shaped = [
        t if t is None or m is None else t.view_as(m) for t, m in zip(want, made, strict=True)
    ]
    assert_bits(made, shaped)


@whether_recomputed
def test_biases(recompute: bool, device: torch.device) -> None:
    operands = [*weights(device=device), *biases(device=device)]
    x = inputs(70, device=device)
    run = functools.partial(functional.gated_mlp, store_fp8=True, recompute=recompute)
    assert_bits(results(run, x, operands), wanted(x, operands, F.linear, FP32_SCALES, recompute))


@whether_recomputed
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)], ids=str)
@pytest.mark.parametrize("x_grad", [False, True])
def test_frozen_weights(x_grad: bool, frozen: tuple[int, ...], recompute: bool) -> None:
    operands, x = weights(frozen=frozen), inputs(70, grad=x_grad)
    run = functools.partial(functional.gated_mlp, store_fp8=True, recompute=recompute)
    if not x_grad and frozen == (0, 1):  # nothing of gate and up is saved
        recompute = False
    made = results(run, x, operands)
    assert_bits(made, wanted(x, operands, F.linear, FP32_SCALES, recompute))


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
        run = functools.partial(functional.gated_mlp, store_fp8=store_fp8, recompute=recompute)
        y = run(x, *operands)
        y.backward(torch.full_like(y, tiny))
        made.append([y.detach(), x.grad, *(w.grad for w in operands)])
    for got, exact in zip(*made, strict=True):
        assert exact.isfinite().all()
        assert relative_error(got, exact) < 0.08


def test_large_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made one after the other, of the same values."""
    x, operands = inputs(70), weights()
    run = functools.partial(functional.gated_mlp, store_fp8=True)
    want = results(run, x, operands)
    monkeypatch.setattr(plan, "LARGE_BYTES", 0)
    with Trace() as trace:
        made = results(run, x, operands)
    assert trace.ops.count("blocktensor.gated silu 1x128 1x128") == 2
    assert_bits(made, want)


@whether_recomputed
@every_recipe
@pytest.mark.parametrize("hidden", [256, 320])
def test_joint(hidden: int, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    operands: list[Any] = [
        nn.Parameter(BlockwiseFP8Weight(randn(*shape, seed=i, device=device) / 14, recipe))
        for i, shape in enumerate(((2 * hidden, K), (N, hidden)))
    ]
    x = inputs(2, 75, device=device)

    def run(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
        return functional.gated_mlp(x, both, None, down, store_fp8=True, recompute=recompute)

    assert_bits(results(run, x, operands), wanted(x, operands, F.linear, recipe, recompute))


@whether_recomputed
@every_recipe
@pytest.mark.parametrize("groups", GROUPS)
def test_experts(groups: str, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    """NaN in rows of no group reach nothing."""
    count, sizes = GROUPS[groups]
    offs = ends(*sizes, device=device)
    x = randn(count, K, device=device)
    x[sum(sizes) :] = float("nan")
    operands: list[Any] = [
        nn.Parameter(
            BlockwiseFP8Weight(randn(len(sizes), n, k, seed=i, device=device) / 14, recipe)
        )
        for i, (n, k) in enumerate(((HIDDEN, K), (HIDDEN, K), (N, HIDDEN)))
    ]

    def product(x: Tensor, w: Tensor, bias: None) -> Tensor:
        return torch._grouped_mm(x, w.transpose(1, 2), offs)

    run = functools.partial(
        functional.gated_experts, offs=offs, store_fp8=True, recompute=recompute
    )
    x.requires_grad_()
    assert_bits(results(run, x, operands), wanted(x, operands, product, recipe, recompute))


@whether_recomputed
def test_what_is_saved(recompute: bool) -> None:
    saved: list[Tensor] = []
    x, operands = inputs(80), weights()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.gated_mlp(x, *operands, store_fp8=True, recompute=recompute)
    bytes_of = [t.nbytes for t in saved if type(t) is Tensor and t.itemsize == 1]
    assert bytes_of == [K * 80, *([] if recompute else [HIDDEN * 80]), *[80 * HIDDEN] * 2]
    assert not any(t.dtype == torch.bfloat16 and type(t) is Tensor for t in saved)
    with torch.no_grad(), Trace() as trace:
        functional.gated_mlp(x, *operands, store_fp8=True, recompute=recompute)
    assert trace.ops.count("blocktensor.quantize_rowwise 1x128") == 1  # of x


def test_high_precision_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By forward, and by backward before the gradients of gate and up meet the weights."""
    refs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            refs.extend(weakref.ref(x) for x in args[:3] if isinstance(x, Tensor))
            return function(*args, **options)

        return run

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            alive.append(sum(ref() is not None for ref in refs))
            return function(*args, **options)

        return run

    for owner, name in ((gated_mlp, "gated"), (gated_forms, "gated_backward")):
        monkeypatch.setattr(owner, name, remembering(getattr(owner, name)))
    monkeypatch.setattr(products, "gemm", counting(products.gemm))
    y = functional.gated_mlp(inputs(256), *weights(), store_fp8=True)
    assert len(refs) == 2
    assert alive == [0, 0, 0]  # of gate and up; the product of down
    y.backward(torch.ones_like(y))
    assert len(refs) == 5  # and the gradient of h
    assert alive[3:] == [0] * 6


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    operands, x = weights(), inputs(70)
    run = functools.partial(functional.gated_mlp, store_fp8=True)
    again = functools.partial(checkpoint, run, use_reentrant=use_reentrant)
    assert_bits(results(again, x, operands), results(run, x, operands))


def test_high_precision_weight_gradients_store_no_fp8() -> None:
    recipe = Recipe(wgrad_input="high_precision")
    operands, x = weights(recipe=recipe), inputs(70)
    run = functools.partial(functional.gated_mlp, store_fp8=True)
    assert_bits(results(run, x, operands), results(functional.gated_mlp, x, operands))
