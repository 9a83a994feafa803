"""The differentiable linear: what it multiplies and saves, and how it lives in autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    freeze,
    functional,
    quantize,
    to_blockwise_fp8_weights,
)
from tests.support.linear_ways import assert_all_equal, grads_of, saved_by, way_of_linears
from tests.support.models import (
    RECIPES,
    assert_matches,
    assert_same_bytes,
    composed,
    linear,
    plain,
    randn,
    unaligned,
)

__all__ = ["way_of_linears"]
pytestmark = pytest.mark.usefixtures("way_of_linears")

N, K = 128, 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize(
    "size",
    [
        *((tokens, 24, 40) for tokens in (1, 16, 127, 129, 4095)),
        (5, 256, 384),
        (300, 130, 70),
        (128, 192, 576),
        (1, 1, 1),
    ],
)
def test_equals_the_composition_of_reference_ops(
    size: tuple[int, int, int], recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    m, n, k = size
    module = linear(n, k, recipe=recipe, bias=True, dtype=dtype, device=device)
    x, grad = (randn(m, c, seed=c, dtype=dtype, device=device) for c in (k, n))
    y, dx, dw, db = grads_of(module, x, grad)
    expected = composed(x, plain(module.weight), grad, recipe, plain(module.bias))
    for actual, wanted in zip((y, dx, dw), expected, strict=True):
        assert_matches(actual, wanted)
    torch.testing.assert_close(db, grad.double().sum(0).to(dtype))


@pytest.mark.parametrize(
    "shape", [(384,), (3, 384), (2, 3, 384), (2, 1, 3, 384), (0, 384), (2, 0, 384)]
)
def test_leading_dimensions(shape: tuple[int, ...], device: torch.device) -> None:
    module = linear(256, 384, bias=True, device=device)
    x = randn(*shape, device=device)
    grad = randn(*shape[:-1], 256, seed=3, device=device)
    y, dx, dw, db = grads_of(module, x, grad)
    flat = grads_of(module, x.reshape(-1, 384), grad.reshape(-1, 256))
    assert y.shape == (*shape[:-1], 256)
    assert dx.shape == shape
    assert_all_equal([y.reshape(-1, 256), dx.reshape(-1, 384), dw, db], flat)
    if 0 in shape:
        assert dw.shape == (256, 384)
        assert not dw.any()
        assert not db.any()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("backward", ["fp8", "high_precision", "dequantized"])
@pytest.mark.parametrize("features", [(0, 384), (256, 0), (0, 0)], ids=str)
def test_no_features(features: tuple[int, int], backward: Any, device: torch.device) -> None:
    """All features of a layer may be pruned."""
    n, k = features
    module = nn.Linear(k, n, device=device)
    to_blockwise_fp8_weights(module, Recipe(backward=backward))
    x = randn(2, 3, k, dtype=torch.float32, device=device)
    grad = randn(2, 3, n, dtype=torch.float32, device=device)
    y, dx, dw, db = grads_of(module, x, grad)
    assert torch.equal(y, module.bias.expand_as(grad))
    assert not dx.any() and dx.shape == x.shape
    assert not dw.any() and dw.shape == module.weight.shape
    torch.testing.assert_close(db, grad.sum((0, 1)))


@pytest.mark.parametrize("spoiled", ["x", "grad"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_reach_their_outputs_and_no_others(
    value: float, spoiled: str, device: torch.device
) -> None:
    module = linear(256, 384, device=device)
    x, grad = randn(300, 384, device=device), randn(300, 256, seed=3, device=device)
    clean = grads_of(module, x, grad)
    (x if spoiled == "x" else grad)[130, 200] = value
    y, dx, dw = (torch.isfinite(t).cpu() for t in grads_of(module, x, grad))
    row, column, all_finite = torch.ones(300, 1), torch.ones(1, 256), torch.ones(())
    row[130] = column[0, 200] = 0
    columns = torch.ones(1, 384).index_fill(1, torch.arange(128, 256), 0)  # of the block of x
    of_x = [row, all_finite, columns]  # row 130 of y
    of_grad = [all_finite, row, column.t()]  # row 130 of dx, row 200 of dw
    wanted = of_x if spoiled == "x" else of_grad
    for finite, mask, before in zip((y, dx, dw), wanted, clean, strict=True):
        assert torch.equal(finite, mask.bool().expand_as(finite))
        assert torch.isfinite(before).all()


def test_autocast_keeps_the_precision_of_an_fp8_inputs_gradient(device: torch.device) -> None:
    module = linear(256, 384, dtype=torch.float32, device=device)
    x = randn(5, 384, dtype=torch.float32, device=device, grad=True)
    grad = randn(5, 256, seed=3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = module(functional.quantize(x))
    assert y.dtype == torch.bfloat16
    y.backward(grad)
    _, dx, dw = composed(x.detach(), plain(module.weight), grad)
    assert not torch.equal(dx, dx.bfloat16().float())
    assert_matches(x.grad, dx)
    assert_matches(module.weight.grad, dw)
    module.weight.requires_grad_(False)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = module(functional.quantize(x))
    assert_matches(torch.autograd.grad(y, x, grad)[0], dx)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bias_gradient_is_summed_in_fp32(autocast: bool, device: torch.device) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    module = linear(128, 128, bias=True, dtype=dtype, device=device)
    x = randn(3000, 128, dtype=dtype, device=device)
    grad = 1 + randn(3000, 128, seed=3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        y = module(x)
    y.backward(grad)
    exact = grad.double().sum(0)
    assert module.bias.grad.dtype == dtype
    if autocast:
        torch.testing.assert_close(module.bias.grad.double(), exact, rtol=1e-5, atol=1e-3)
    else:
        assert torch.equal(module.bias.grad, exact.to(dtype))


def test_module_and_parameter_hooks() -> None:
    module, x, grad = linear(256, 384), randn(5, 384), randn(5, 256, seed=9)
    _, dx, dw = grads_of(module, x, grad)
    seen: list[Tensor] = []
    module.register_full_backward_pre_hook(lambda m, gs: seen.append(gs[0].clone()))
    module.register_full_backward_hook(lambda m, gi, go: seen.extend((gi[0], go[0])))
    module.weight.register_hook(lambda g: seen.append(g.clone()))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    grads_of(module, x, grad)
    assert len(seen) == 5
    for wanted in (grad, grad, dx, dw, dw):  # in whatever order
        assert any(torch.equal(wanted, s) for s in seen if s.shape == wanted.shape)


def test_a_weight_used_twice_in_one_graph() -> None:
    module, x, grad = linear(256, 256, dtype=torch.float32), randn(5, 256), randn(5, 256, seed=9)
    x, grad = x.float(), grad.float()
    _, dx, dw = grads_of(module, x, grad, lambda m, t: m(m(t)))
    assert module.weight.cache.casts == 2
    assert module.weight.cache.nbytes() == 0
    _, dh, dw_outer = grads_of(module, module(x).detach(), grad)
    _, dx_wanted, dw_inner = grads_of(module, x, dh)
    assert_all_equal([dx, dw], [dx_wanted, dw_outer + dw_inner])


def test_what_is_saved(device: torch.device) -> None:
    """Nothing of the size of x in high precision; no x without wgrad, no weight without dgrad."""
    x = randn(2, 150, 384, device=device)
    leaf = x.clone().requires_grad_()
    module, frozen = (linear(256, 384, bias=True, frozen=f, device=device) for f in (False, True))
    data, scale, weight = saved_by(lambda: module(leaf * 1)[0])
    assert weight is module.weight or weight.master is module.weight.master
    want = quantize(x).columnwise()
    assert_same_bytes(data, want.data)
    assert_same_bytes(scale, want.scale)
    assert data.untyped_storage().nbytes() == 384 * 320  # a multiple of 64 tokens
    assert scale.untyped_storage().nbytes() in (44, 48)  # rows of 16 bytes
    assert [t.dtype for t in saved_by(lambda: module(x))] == [data.dtype, scale.dtype]
    saved = saved_by(lambda: frozen(leaf * 1)[0])  # dgrad reads the bytes of the weight
    assert [(t.dtype, t.shape) for t in saved] == [(data.dtype, (256, 384)), (scale.dtype, (2, 3))]
    module.weight.requires_grad_(False)
    assert saved_by(lambda: module(leaf)) == [module.weight]
    assert saved_by(lambda: [module(x), frozen(x)]) == []


def test_a_saved_weight_may_come_back_plain() -> None:
    module, x = linear(N, K, dtype=torch.float32), randn(5, K, dtype=torch.float32)
    x.requires_grad_()
    gradients = []
    for pack in (lambda tensor: tensor, plain):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = module(x)
        gradients += torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("pack", [lambda t: t.clone(), unaligned], ids=["clone", "unaligned"])
@pytest.mark.parametrize("frozen", [False, True])
def test_saved_bytes_may_come_back_laid_out_anew(
    frozen: bool, pack: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """On a GPU, a run for one layout would read another's bytes in the wrong place."""
    module, x = linear(N, K, device=device, frozen=frozen), randn(6, K, device=device, grad=frozen)
    leaf, grads = x if frozen else module.weight, []
    for hook in (lambda t: t, pack, lambda t: t):

        def of_bytes(t: Tensor, hook: Callable[[Tensor], Tensor] = hook) -> Tensor:
            return t if isinstance(t, BlockwiseFP8Weight) else hook(t)

        with torch.autograd.graph.saved_tensors_hooks(of_bytes, lambda t: t):
            y = module(x)
        grads += torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert all(torch.equal(grads[0], grad) for grad in grads[1:])


def test_a_transposed_weight(device: torch.device) -> None:
    """``x @ w``: forward reads the columnwise form, and dgrad the rowwise one."""
    weight = linear(N, K, device=device).weight
    x, grad = randn(5, N, device=device, grad=True), randn(5, K, seed=1, device=device)
    for _ in range(2):
        y = x @ weight
        dx, dw = torch.autograd.grad(y, (x, weight), grad)
        wanted = composed(x.detach(), plain(weight).t(), grad)
        for got, want in zip((y.detach(), dx, dw.t()), wanted, strict=True):
            assert_matches(got, want)


@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "a view", "rows"])
def test_a_frozen_weight_that_is_written_before_its_backward(
    how: str, device: torch.device
) -> None:
    """It raises, as a plain one does; in calls that are repeated, too."""
    module, other = (linear(256, 256, device=device) for _ in range(2))
    freeze(module), freeze(other)
    x = randn(5, 256, grad=True, device=device)
    for _ in range(3):
        y = module(x)
        (kept,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert kept.any()
        with torch.no_grad():
            if how == "copy_":
                module.weight.copy_(other.weight)
            elif how == "a view":
                module.weight.t().copy_(other.weight.t())
            elif how == "rows":
                module.weight[:128].copy_(other.weight[:128])
            else:
                module.load_state_dict(other.state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a matrix": lambda w: w[1],
    "a matrix of a part": lambda w: w[1:3][0],
    "one of all": lambda w: w.unbind(0)[1],
    "rows of a matrix": lambda w: w[1][128:],
    "restacked": lambda w: w.view(6, 128, 256)[2],
    "transposed": lambda w: w.mT[1].t(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_frozen_stack_that_is_written_before_its_backward(
    view: str, device: torch.device
) -> None:
    """A write to the whole, or through another view, counts for each view."""
    x = randn(5, 256, grad=True, device=device)
    other = BlockwiseFP8Tensor.from_values(randn(3, 256, 256, device=device), (128, 128))
    writes: list[Callable[[Tensor], Tensor]] = [
        lambda w: w.copy_(other),
        lambda w: w.detach().copy_(other),
        lambda w: w[1].copy_(other[1]),
        lambda w: VIEWS[view](w).copy_(VIEWS[view](other)),
    ]
    for write in writes:
        w = BlockwiseFP8Tensor.from_values(randn(3, 256, 256, device=device), (128, 128))
        y = torch.nn.functional.linear(x, VIEWS[view](w))
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        with torch.no_grad():
            write(w)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_second_derivatives_raise(device: torch.device) -> None:
    """Of calls that are repeated, too."""
    module, x = linear(128, 192, bias=True, device=device), randn(5, 192, grad=True, device=device)
    for of in ([x, module.weight], [module.bias]):
        for _ in range(2):
            y = module(x).float().square().sum()
            with pytest.raises(NotImplementedError, match="second derivative is not implemented"):
                torch.autograd.grad(y, of, create_graph=True)
