"""What the weight gradient of a linear reads of the input: ``Recipe(wgrad_input=...)``."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline

import blocktensor
from blocktensor import Recipe, functional, share_inputs
from blocktensor.ops import reference
from tests.support.linear_ways import assert_all_equal, grads_of, way_of_linears
from tests.support.models import assert_matches, complaint, linear, randn
from tests.support.numeric import assert_same, relative_error
from tests.support.siblings import K as SIBLINGS_K
from tests.support.siblings import Qkv, converted, results
from tests.support.wgrad_inputs import HIGH, RECIPES, SQUARES, every_recipe, saved_by, wgrad

__all__ = ["way_of_linears"]

# A linear


@every_recipe
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((300, 130, 70), torch.bfloat16),
        ((128, 192, 576), torch.float16),
        ((5, 256, 384), torch.float32),
        ((1, 1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_only_the_weights_gradient_is_another(
    size: tuple[int, int, int], dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> None:
    m, n, k = size
    module, usual = (
        linear(n, k, recipe=made, bias=True, dtype=dtype, device=device)
        for made in (recipe, Recipe(scale=recipe.scale))
    )
    x, grad = (randn(m, c, seed=c, dtype=dtype, device=device) for c in (k, n))
    for _ in range(3):  # a later call may be a recorded one
        y, dx, dw, db = grads_of(module, x, grad)
        want = grads_of(usual, x, grad)
        for got, same in ((y, want[0]), (dx, want[1]), (db, want[3])):
            assert torch.equal(got, same)
        assert_matches(dw, wgrad(grad, x, recipe, dtype))


@every_recipe
def test_kinds_of_linears_are_told_apart(recipe: Recipe) -> None:
    """Plans are made once for a kind: of equal shapes and other recipes, each has its own."""
    x, grad, w = randn(300, 70), randn(300, 130, seed=3), randn(130, 70, seed=1)
    for other in (Recipe(scale=recipe.scale), recipe, Recipe(scale=recipe.scale)):
        leaf = w.clone().requires_grad_()
        functional.linear(x, leaf, recipe=other).backward(grad)
        want = wgrad(grad, x, other, torch.bfloat16)
        assert torch.equal(leaf.grad, want)
        module = linear(130, 70, recipe=other)
        module(x).backward(grad)
        assert torch.equal(module.weight.grad, want)
        asked = linear(130, 70, recipe=Recipe(scale=recipe.scale))
        functional.linear(x, asked.weight, recipe=other).backward(grad)
        assert torch.equal(asked.weight.grad, want)


@every_recipe
def test_leading_dimensions_and_gradients_of_the_weight_alone(recipe: Recipe) -> None:
    module = linear(130, 70, recipe=recipe)
    x, grad = randn(2, 150, 70), randn(2, 150, 130, seed=3)
    flat = wgrad(grad.flatten(0, 1), x.flatten(0, 1), recipe, torch.bfloat16)
    assert torch.equal(grads_of(module, x, grad)[2], flat)
    y = module(x.requires_grad_())
    (dw,) = torch.autograd.grad(y, [module.weight], grad, retain_graph=True)
    assert torch.equal(dw, flat)
    (dx,) = torch.autograd.grad(y, [x], grad)
    assert torch.equal(dx, x.grad) if x.grad is not None else dx.shape == x.shape
    frozen = linear(130, 70, recipe=recipe, frozen=True)
    assert grads_of(frozen, x.detach(), grad)[1].shape == x.shape


@every_recipe
def test_autocast(recipe: Recipe, device: torch.device) -> None:
    module = linear(130, 70, recipe=recipe, dtype=torch.float32, device=device)
    x = randn(300, 70, dtype=torch.float32, device=device, grad=True)
    grad = randn(300, 130, seed=3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        module(x).backward(grad)  # under autocast too, which must not round the sums
    rounded = x.detach().bfloat16()
    if recipe is HIGH:
        exact = grad.double().t() @ rounded.double()
        assert relative_error(module.weight.grad, exact) <= 1e-5  # of sums in fp32
    else:
        assert_matches(module.weight.grad, wgrad(grad, rounded, recipe, torch.float32))


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_main_grad(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
    module = linear(130, 70, recipe=recipe, dtype=dtype, device=device)
    start = randn(130, 70, seed=9, dtype=torch.float32, device=device)
    module.weight.main_grad = start.clone()
    xs = [randn(300, 70, seed=s, dtype=dtype, device=device) for s in (1, 2)]
    grad = randn(300, 130, seed=3, dtype=dtype, device=device)
    for x in xs:
        grads_of(module, x, grad)
    assert module.weight.grad is None
    want = start.double()
    for x in xs:
        exact = recipe is HIGH and dtype == torch.bfloat16
        part = grad.float().t() @ x.float() if exact else wgrad(grad, x, recipe, torch.float32)
        want += part.double()
    assert relative_error(module.weight.main_grad, want) <= 1e-6 if device.type == "cpu" else 2e-4


def test_what_is_saved() -> None:
    x = randn(300, 70, grad=True)
    want = reference.quantize_columnwise(x.detach(), SQUARES.wgrad_input_format)
    data, scale, _ = saved_by(lambda: linear(130, 70, recipe=SQUARES)(x))
    assert_same(data, want.data)
    assert_same(scale, want.scale)
    saved, _ = saved_by(lambda: linear(130, 70, recipe=HIGH)(x))
    assert saved.data_ptr() == x.data_ptr()
    saved = saved_by(lambda: linear(130, 70, recipe=HIGH, frozen=True)(x))
    assert [t.dtype for t in saved] == [torch.float8_e4m3fn, torch.float32]  # the weight


# Inputs that are cast before


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_input_that_is_cast_once(
    recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    gate, up = (linear(n, 70, recipe=recipe, dtype=dtype, device=device) for n in (130, 256))
    x = randn(2, 150, 70, dtype=dtype, device=device)
    gs = [randn(2, 150, n, seed=n, dtype=dtype, device=device) for n in (130, 256)]
    want = [grads_of(module, x, g) for module, g in zip((gate, up), gs, strict=True)]
    apart = [t.clone() for result in want for t in (result[0], result[2])]
    gate.zero_grad(), up.zero_grad()
    leaf = x.clone().requires_grad_()
    shared = blocktensor.quantize(leaf, recipe)
    for given in (
        shared,
        shared.view(300, 70).view(2, 150, 70),
        shared.clone(),
        copy.deepcopy(shared.detach()),
    ):
        gate.zero_grad(), up.zero_grad()
        outputs = gate(given), up(given)
        torch.autograd.backward(outputs, gs, retain_graph=True)
        together = [outputs[0].detach(), gate.weight.grad, outputs[1].detach(), up.weight.grad]
        assert_all_equal(together, apart)


def test_shared_inputs_of_other_recipes_are_cast_apart() -> None:
    shared = converted(Qkv())
    blocktensor.to_blockwise_fp8_weights(shared.k, SQUARES)
    blocktensor.to_blockwise_fp8_weights(shared.v, HIGH)
    unshared = copy.deepcopy(shared)
    report = share_inputs(shared)
    for seed in range(2):
        x = randn(2, 80, SIBLINGS_K, seed=seed, dtype=torch.float32)
        assert_all_equal(results(shared, x), results(unshared, x))
    assert report.saved == 0


def test_casts_of_another_recipe_are_refused() -> None:
    x, grad = randn(300, 70), randn(300, 130, seed=3)
    for recipe in (Recipe(), SQUARES, HIGH):
        module = linear(130, 70, recipe=recipe)
        for other in (Recipe(), SQUARES, HIGH):
            given = blocktensor.quantize(x, other)
            with torch.no_grad():
                module(given)
            linear(130, 70, recipe=recipe, frozen=True)(given)  # they ask for rowwise forms only
            if other == recipe:
                module(given).backward(grad)
            else:
                with pytest.raises(ValueError, match="mixed recipes"):
                    module(given)
    assert_expected_inline(
        complaint(ValueError, lambda: linear(130, 70, recipe=SQUARES)(functional.quantize(x))),
        """\
mixed recipes: the gradient of the weight has wgrad_input='128x128', and the input,
which is FP8 already, holds 1x128 blocks; cast it with one recipe, e.g.
blocktensor.quantize(x, recipe=weight.recipe)""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: linear(130, 70)(functional.quantize(x, HIGH))),
        """\
mixed recipes: the gradient of the weight has wgrad_input='1x128', and the input,
which is FP8 already, is cast for 'high_precision'; cast it with one recipe, e.g.
blocktensor.quantize(x, recipe=weight.recipe)""",
    )


def test_an_input_that_was_changed_after_its_cast_is_refused() -> None:
    module, x = linear(130, 70, recipe=HIGH), randn(300, 70)
    given = blocktensor.quantize(x, HIGH)
    part = given.view(2, 150, 70)
    x.mul_(2)
    for fp8 in (given, part):
        with pytest.raises(RuntimeError, match="changed in place since"):
            module(fp8)
    with torch.no_grad():
        module(given)


def test_a_gradient_in_fp8() -> None:
    x, grad = randn(300, 70), randn(300, 130, seed=3)
    for recipe in RECIPES:
        module = linear(130, 70, recipe=recipe)
        given = functional.quantize(grad, Recipe(scale=recipe.scale))
        got, want = grads_of(module, x, given), grads_of(module, x, grad)
        if recipe is HIGH:
            want[2] = wgrad(given.dequantize(), x, recipe, torch.bfloat16)
        assert_all_equal(got, want)
    assert_expected_inline(
        complaint(
            ValueError,
            lambda: linear(130, 70)(x.requires_grad_()).backward(
                functional.quantize(grad, SQUARES)
            ),
        ),
        """\
a columnwise form in 128x128 blocks where an FP8 linear reads 1x128: pass the tensor
in high precision""",
    )
