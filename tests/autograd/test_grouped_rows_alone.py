"""Grouped linears of rows that are FP8 already, as they arrive from other ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from tests.support.experts import grads, sample, stack
from tests.support.groups import GROUPS, ends, ranges
from tests.support.models import POWER_OF_TWO, randn, with_outliers
from tests.support.numeric import assert_same
from tests.support.refusals import refused

RECIPES = (Recipe(), POWER_OF_TWO, Recipe.deepseek())


class _RowsAlone(torch.autograd.Function):
    """A rowwise cast whose gradient passes straight through, as ``all_to_all_fp8`` makes it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, recipe: Recipe) -> Tensor:
        return BlockwiseFP8Tensor.from_values(x, recipe=recipe, columnwise=False)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def rows_alone(x: Tensor, recipe: Recipe | None = None) -> Tensor:
    made: Tensor = _RowsAlone.apply(x, recipe or Recipe())
    return made


@pytest.mark.parametrize("groups", GROUPS)
def test_only_wgrad_reads_other_values_than_of_plain_rows(groups: str) -> None:
    """It reads a cast of the dequantized rows, whatever the recipe."""
    x, grad, offs = sample(groups)
    for recipe in RECIPES:
        w = stack(len(offs), recipe=recipe)

        def run(t: Tensor, w: Tensor = w) -> Tensor:
            return functional.grouped_linear(t, w, offs)

        y, dx, _ = grads(run, x, grad, w)
        got = grads(lambda t, r=recipe, run=run: run(rows_alone(t, r)), x, grad, w)
        again = rows_alone(x, recipe).dequantize()
        wanted = y, dx, grads(run, again, grad, w)[2]
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)
        run(rows_alone(x, recipe))  # a plan of tensors of this shape
        with pytest.raises(ValueError, match="its columnwise blocks, which"):
            functional.grouped_linear(quantize(x, recipe), w, offs)


def signal_to_noise(got: Tensor, want: Tensor) -> float:
    """In decibels."""
    noise = (got.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise))


ROWS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda t, c: randn(t, c, seed=c),
    "outliers": lambda t, c: with_outliers(t, c, seed=c),
    "rows of many sizes": lambda t, c: randn(t, c, seed=c) * randn(t, 1, seed=3).exp(),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scale}-{r.wgrad_input}")
def test_the_second_rounding_costs_few_decibels(kind: str, recipe: Recipe) -> None:
    sizes = (512, 0, 200, 312)
    offs = ends(*sizes)
    x, grad = (ROWS[kind](1024, c) for c in (256, 384))
    exact = torch.stack([grad[r].double().T @ x[r].double() for r in ranges(offs)])
    made = []
    for run in (lambda t: t, lambda t: rows_alone(t, recipe)):
        w = nn.Parameter(BlockwiseFP8Weight(randn(4, 384, 256, dtype=torch.float32), recipe))
        y = functional.grouped_linear(run(x.float()), w, offs)
        y.backward(grad.float())
        made.append(signal_to_noise(w.grad, exact))
    once, twice = made
    assert twice >= 26, (once, twice)
    assert twice < once + 0.1


def test_indices_of_rows_pass_gradients() -> None:
    x, grad, offs = sample("whole blocks")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    w = stack(len(offs))
    want = grads(lambda t: functional.grouped_linear(rows_alone(t[order]), w, offs), x, grad, w)
    picks: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[order],
        lambda t: t[order, :],
        lambda t: t.index_select(0, order.int()),
    ]
    for pick in picks:

        def run(t: Tensor, pick: Callable[[Tensor], Tensor] = pick) -> Tensor:
            return functional.grouped_linear(pick(rows_alone(t)), w, offs)

        for a, b in zip(grads(run, x, grad, w), want, strict=True):
            assert_same(a, b)


def test_a_weight_gradient_in_high_precision_is_refused() -> None:
    x, _, offs = sample("ragged")
    w = stack(len(offs), recipe=Recipe(wgrad_input="high_precision"))
    assert_expected_inline(
        refused(lambda: functional.grouped_linear(rows_alone(x), w, offs)),
        """\
ValueError: the gradient of the weight has wgrad_input='high_precision', and the input of the
  grouped FP8 linear is FP8 alone: dispatch it in high precision, or convert with another recipe""",
    )
    functional.grouped_linear(rows_alone(x), w.detach(), offs)
