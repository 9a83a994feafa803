"""What the weight gradients of experts read of the input: ``Recipe(wgrad_input=...)``."""

from __future__ import annotations

import pytest
import torch

from blocktensor import Recipe, functional
from blocktensor.ops import reference
from tests.support.experts import grads, sample, stack
from tests.support.groups import GROUPS, ranges
from tests.support.linear_ways import assert_all_equal
from tests.support.models import Trace
from tests.support.numeric import assert_same, relative_error
from tests.support.wgrad_inputs import HIGH, SQUARES, every_recipe, saved_by, wgrad


@every_recipe
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kn", [False, True])
def test_grouped_linears(groups: str, dtype: torch.dtype, kn: bool, recipe: Recipe) -> None:
    """Blocks begin anew in every group; rows of no group are NaN, and reach nothing."""
    x, grad, offs = sample(groups, dtype)
    w, usual = (
        stack(len(offs), recipe=r, dtype=dtype, kn=kn) for r in (recipe, Recipe(scale=recipe.scale))
    )
    y, dx, dw = grads(lambda t: functional.grouped_linear(t, w.mT if kn else w, offs), x, grad, w)
    want = grads(lambda t: functional.grouped_linear(t, usual.mT if kn else usual, offs), x, grad)
    assert_same(y, want[0])
    assert_same(dx, want[1])
    assert dw.is_contiguous()
    dw = dw.mT if kn else dw
    for e, inside in enumerate(ranges(offs)):
        wanted = wgrad(grad[inside], x[inside], recipe, dtype)
        if kn or recipe is HIGH:  # sums in another order
            torch.testing.assert_close(dw[e], wanted, rtol=2e-2, atol=1e-3)
        else:
            assert_same(dw[e], wanted)


@every_recipe
@pytest.mark.parametrize("kn", [False, True])
def test_main_grad_of_experts(recipe: Recipe, kn: bool) -> None:
    x, grad, offs = sample("ragged")
    w, twin = (stack(len(offs), recipe=recipe, kn=kn) for _ in range(2))
    w.main_grad = torch.ones(w.shape)
    for leaf in (w, twin):
        y = functional.grouped_linear(x.requires_grad_(), leaf.mT if kn else leaf, offs)
        y.backward(grad)
    assert w.grad is None
    assert relative_error(w.main_grad - 1, twin.grad) <= 3e-3


@every_recipe
def test_several_weights_of_one_input(recipe: Recipe) -> None:
    x, grad, offs = sample("ragged")
    ws = [stack(len(offs), recipe=recipe) for _ in range(3)]
    ws[0].requires_grad_(False)  # the first does not ask for the columnwise form
    apart = grads(
        lambda t: sum(functional.grouped_linear(t, w, offs) for w in ws), x, grad, *ws[1:]
    )
    with Trace() as trace:
        together = grads(lambda t: sum(functional.grouped_linear(t, ws, offs)), x, grad, *ws[1:])
    assert_all_equal(together, apart)
    columnwise = trace.count("quantize_grouped") - (0 if recipe is HIGH else len(ws[1:]))
    assert columnwise == (0 if recipe is HIGH else 1)


def test_what_a_grouped_linear_saves() -> None:
    x, _, offs = sample("ragged")
    format = SQUARES.wgrad_input_format
    w = stack(len(offs), recipe=SQUARES)
    _, data, scale, _ = saved_by(lambda: functional.grouped_linear(x.requires_grad_(), w, offs))
    want = reference.quantize_grouped_columnwise(x.detach(), offs, format)
    assert_same(data, want.data)
    assert_same(scale, want.scale)
    w = stack(len(offs), recipe=HIGH)
    _, saved, _ = saved_by(lambda: functional.grouped_linear(x, w, offs))
    assert saved.data_ptr() == x.data_ptr()
