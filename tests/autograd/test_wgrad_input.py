"""What the weight gradient of a linear reads of the input: ``Recipe(wgrad_input=...)``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import Recipe, functional, quantize, share_inputs, to_blockwise_fp8_weights
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from tests.support.asserts import refused
from tests.support.linear_ways import (
    HIGH,
    RECIPES,
    ROWS,
    assert_all_equal,
    every_recipe,
    grads_of,
    saved_by,
    way_of_linears,
    wgrad,
)
from tests.support.models import assert_matches, linear, randn
from tests.support.numeric import assert_same, relative_error
from tests.support.siblings import K as SIBLINGS_K
from tests.support.siblings import Qkv, converted, results

__all__ = ["way_of_linears"]
pytestmark = pytest.mark.usefixtures("way_of_linears")


@every_recipe
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((2, 150, 130, 70), torch.bfloat16),
        ((128, 192, 576), torch.float16),
        ((5, 256, 384), torch.float32),
        ((1, 1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_only_the_weights_gradient_is_another(
    size: tuple[int, ...], dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> None:
    *tokens, n, k = size
    module, usual = (
        linear(n, k, recipe=made, bias=True, dtype=dtype, device=device)
        for made in (recipe, Recipe(scale=recipe.scale))
    )
    x, grad = (randn(*tokens, c, seed=c, dtype=dtype, device=device) for c in (k, n))
    for _ in range(3):  # a later call may be a recorded one
        y, dx, dw, db = grads_of(module, x, grad)
        want = grads_of(usual, x, grad)
        for got, same in ((y, want[0]), (dx, want[1]), (db, want[3])):
            assert torch.equal(got, same)
        assert_matches(dw, wgrad(grad.flatten(0, -2), x.flatten(0, -2), recipe, dtype))
    y = module(x.requires_grad_())
    for leaf, wanted in ((module.weight, dw), (x, dx)):
        (alone,) = torch.autograd.grad(y, [leaf], grad, retain_graph=True)
        assert torch.equal(alone, wanted)
    module.weight.requires_grad_(False)
    assert torch.equal(grads_of(module, x, grad)[1], dx)


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


@pytest.mark.parametrize("backward_too", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), *RECIPES], ids=str)
def test_autocast(recipe: Recipe, backward_too: bool, device: torch.device) -> None:
    """It must not round the sums of fp32 gradients."""
    module = linear(130, 70, recipe=recipe, dtype=torch.float32, device=device)
    x = randn(300, 70, dtype=torch.float32, device=device, grad=True)
    grad = randn(300, 130, seed=3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = module(x)
    with torch.autocast(device.type, torch.bfloat16, enabled=backward_too):
        y.backward(grad)
    rounded = x.detach().bfloat16()
    if recipe is HIGH:
        exact = grad.double().t() @ rounded.double()
        assert relative_error(module.weight.grad, exact) <= 1e-5  # of sums in fp32
    else:
        assert_matches(module.weight.grad, wgrad(grad, rounded, recipe, torch.float32))


def test_what_is_saved() -> None:
    x = randn(300, 70, grad=True)
    for recipe, format in ((Recipe(), BLOCKS_128X128), (ROWS, BLOCKS_1X128)):
        want = reference.quantize_columnwise(x.detach(), format)
        data, scale, _ = saved_by(lambda recipe=recipe: linear(130, 70, recipe=recipe)(x))
        assert_same(data, want.data)
        assert_same(scale, want.scale)
    saved, _ = saved_by(lambda: linear(130, 70, recipe=HIGH)(x))
    assert saved.data_ptr() == x.data_ptr()
    saved = saved_by(lambda: linear(130, 70, recipe=HIGH, frozen=True)(x))
    assert [t.dtype for t in saved] == [torch.float8_e4m3fn, torch.float32]  # the weight


@pytest.mark.parametrize("recipe", [Recipe(), *RECIPES], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_input_that_is_cast_once(
    recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    options: Any = {"dtype": dtype, "device": device}
    gate = linear(130, 70, recipe=recipe, **options)
    up = linear(256, 70, recipe=recipe, bias=True, **options)
    x, *gs = (randn(2, 150, n, seed=n, **options) for n in (70, 130, 256))

    def run(cast: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        gate.zero_grad(), up.zero_grad()
        leaf = x.clone().requires_grad_()
        outputs = [linear(given) for given in [cast(leaf)] for linear in (gate, up)]
        torch.autograd.backward(outputs, gs)
        parameters = (*gate.parameters(), *up.parameters())
        return [leaf.grad, *(y.detach() for y in outputs), *(p.grad for p in parameters)]

    wanted = run(lambda x: x)
    for view in (lambda q: q, lambda q: q.view(300, 70).view(2, 150, 70), lambda q: q.clone()):
        assert_all_equal(run(lambda x, view=view: view(quantize(x, recipe))), wanted)
    dx, *others = run(lambda x: copy.deepcopy(quantize(x.detach(), recipe)))
    assert dx is None
    assert_all_equal(others, wanted[1:])


def test_shared_inputs_of_other_recipes_are_cast_apart() -> None:
    shared = converted(Qkv())
    to_blockwise_fp8_weights(shared.k, ROWS)
    to_blockwise_fp8_weights(shared.v, HIGH)
    unshared = copy.deepcopy(shared)
    report = share_inputs(shared)
    for seed in range(2):
        x = randn(2, 80, SIBLINGS_K, seed=seed, dtype=torch.float32)
        assert_all_equal(results(shared, x), results(unshared, x))
    assert report.saved == 0


def test_casts_of_another_recipe_are_refused() -> None:
    x, grad = randn(300, 70), randn(300, 130, seed=3)
    for recipe in (Recipe(), ROWS, HIGH):
        module = linear(130, 70, recipe=recipe)
        for other in (Recipe(), ROWS, HIGH):
            given = quantize(x, other)
            with torch.no_grad():
                module(given)
            linear(130, 70, recipe=recipe, frozen=True)(given)  # they ask for rowwise forms only
            if other == recipe:
                module(given).backward(grad)
            else:
                with pytest.raises(ValueError, match="mixed recipes"):
                    module(given)
    assert_expected_inline(
        refused(
            lambda: linear(130, 70, recipe=ROWS)(quantize(x)),
            lambda: linear(130, 70)(quantize(x, HIGH)),
        ),
        """\
ValueError: mixed recipes: the gradient of the weight has wgrad_input='1x128', and the input,
  which is FP8 already, holds 128x128 blocks; cast it with one recipe, e.g.
  blocktensor.quantize(x, recipe=weight.recipe)
ValueError: mixed recipes: the gradient of the weight has wgrad_input='128x128', and the input,
  which is FP8 already, is cast for 'high_precision'; cast it with one recipe, e.g.
  blocktensor.quantize(x, recipe=weight.recipe)""",
    )


def test_parts_of_an_input_lack_what_it_was_cast_from() -> None:
    module, x = linear(130, 70, recipe=HIGH), randn(300, 70)
    given = quantize(x, HIGH)
    for part in (given[:128], torch.cat([given, given])):
        with pytest.raises(ValueError, match=r"lacks the tensor .* cut or join the high-precision"):
            module(part)
    cast, plain = lambda m, x: m(quantize(x, HIGH)), lambda m, x: m(x)
    assert_all_equal(*(grads_of(module, x[:128], randn(128, 130), y) for y in (cast, plain)))


def test_an_input_that_was_changed_after_its_cast_is_refused() -> None:
    module, x = linear(130, 70, recipe=HIGH), randn(300, 70)
    given = quantize(x, HIGH)
    part = given.view(2, 150, 70)
    x.mul_(2)
    for fp8 in (given, part):
        with pytest.raises(RuntimeError, match="changed in place since"):
            module(fp8)
    with torch.no_grad():
        module(given)
    with torch.inference_mode():  # PyTorch counts no changes
        assert torch.equal(module(quantize(x * 1, HIGH)), module(x))


@pytest.mark.parametrize("shape", [(6,), (129,), (2, 3), (300,)], ids=str)
@pytest.mark.parametrize("recipe", [Recipe(), *RECIPES], ids=str)
def test_a_gradient_in_fp8(recipe: Recipe, shape: tuple[int, ...], device: torch.device) -> None:
    module, x = linear(130, 70, recipe=recipe, device=device), randn(*shape, 70, device=device)
    grad = randn(*shape, 130, seed=3, device=device)
    of_grad = Recipe(scale=recipe.scale_of("gradients"), wgrad_input="1x128")
    given = quantize(grad, of_grad)
    got, want = grads_of(module, x, given), grads_of(module, x, grad)
    if recipe is HIGH:
        rows = given.dequantize().flatten(0, -2), x.flatten(0, -2)
        want[2] = wgrad(*rows, recipe, torch.bfloat16)
    assert_all_equal(got, want)
    module.weight.grad, values = None, grad.flatten(0, -2)
    rows = type(given).from_values(values, recipe=of_grad, rowwise=False)
    module(x.flatten(0, -2)).backward(rows)  # where dgrad does not read it
    assert recipe is HIGH or torch.equal(module.weight.grad, want[2])


def test_on_meta() -> None:
    module = linear(130, 70, recipe=HIGH).to("meta")
    module(torch.empty(5, 70, dtype=torch.bfloat16, device="meta")).sum().backward()
    assert module.weight.grad.is_meta


def test_a_gradient_in_fp8_in_squares_is_refused() -> None:
    y = linear(130, 70)(randn(300, 70, grad=True))
    grad = quantize(randn(300, 130))
    assert_expected_inline(
        refused(lambda: y.backward(grad, retain_graph=True)),
        """\
ValueError: a columnwise form in 128x128 blocks where an FP8 linear layer reads 1x128: pass the
  tensor in high precision, or cast gradients with blocktensor.quantize(grad, Recipe.deepseek())""",
    )
