"""Weights on the grid of MXFP4: forwards read dequantized MXFP4 weights; gradients pass through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Weight,
    Recipe,
    Scales,
    convert,
    freeze,
    functional,
    unfreeze,
)
from blocktensor.ops import reference
from tests.support.models import randn

IN_POWERS = Scales(weights="power_of_two")
GRID = Recipe(scale=IN_POWERS, weight_grid="mxfp4")
GRID_KN = Recipe(scale=IN_POWERS, weight_grid="mxfp4_kn")
PLAIN = Recipe(scale=IN_POWERS)


def linear(n: int, k: int, recipe: Recipe | None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))
    if recipe is not None:
        convert(made, recipe, skip_small=False)
    return made[0]  # type: ignore[return-value]


def on_grid(w: Tensor) -> Tensor:
    return reference.on_mxfp4_grid(w, (1, 32)).to(w.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(200, 160), (128, 256), (1, 32), (130, 40), (64, 127)], ids=str)
def test_the_forward_reads_values_of_the_grid(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Outputs and gradients are those of a weight that has the values of the grid."""
    layer = linear(*shape, GRID, dtype)
    plain = linear(*shape, None, dtype)
    want = on_grid(plain.weight.detach())
    assert torch.equal(layer.weight.dequantize(), want)
    plain.weight.data.copy_(want)
    convert(model := nn.Sequential(plain), PLAIN, skip_small=False)
    assert torch.equal(model[0].weight.dequantize(), want)
    assert not torch.equal(layer.weight.master, model[0].weight.master)
    made = []
    for each in (layer, model[0]):
        x = randn(5, shape[1], dtype=dtype, grad=True)
        y = each(x)
        y.backward(randn(*y.shape, dtype=dtype, seed=1))
        made.append((y, x.grad, each.weight.grad))
    for got, wanted in zip(*made, strict=True):
        assert torch.equal(got, wanted)
    assert made[0][2].abs().sum() > 0


def test_groups_lie_along_the_inputs_however_a_weight_is_stored() -> None:
    """A stack [E, K, N] and the stack [E, N, K] of its transposes."""
    w = randn(3, 96, 160, dtype=torch.float32) * torch.exp(randn(3, 96, 1, dtype=torch.float32))
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    made = []
    for recipe, is_kn in ((GRID, False), (GRID_KN, True)):
        values = w.mT.contiguous() if is_kn else w
        weight = nn.Parameter(BlockwiseFP8Weight(values.clone(), recipe))
        x = randn(9, 160, dtype=torch.float32, grad=True)
        y = functional.grouped_linear(x, weight.mT if is_kn else weight, offs)
        y.backward(randn(*y.shape, dtype=torch.float32, seed=1))
        grad: Any = weight.grad
        made.append((y, x.grad, grad.mT if is_kn else grad, weight.dequantize()))
    (y, dx, dw, values), (y_kn, dx_kn, dw_kn, values_kn) = made
    assert torch.equal(values, on_grid(w)) and torch.equal(values_kn, values.mT)
    for a, b in ((y, y_kn), (dx, dx_kn)):
        assert torch.equal(a, b)
    assert torch.allclose(dw, dw_kn, rtol=0.05, atol=0.05 * float(dw.abs().max()))


def test_groups_along_the_outputs_are_refused() -> None:
    w = nn.Parameter(BlockwiseFP8Weight(randn(64, 96), GRID))
    kn = nn.Parameter(BlockwiseFP8Weight(randn(64, 96), GRID_KN))
    x, tall = randn(2, 96), randn(2, 64)
    assert F.linear(x, w).shape == (2, 64) and (tall @ kn).shape == (2, 96)
    with pytest.raises(ValueError, match="convert it with weight_grid='mxfp4_kn'"):
        tall @ w
    with pytest.raises(ValueError, match="convert it with weight_grid='mxfp4'"):
        F.linear(x, kn)
    with pytest.raises(
        ValueError, match="weight_grid='mxfp4', and the matmul has weight_grid=None"
    ):
        functional.linear(x, w, recipe=PLAIN)


def test_compiled_has_the_bits_of_eager() -> None:
    for recipe in (GRID, GRID_KN):
        stored = randn(96, 160, dtype=torch.float32)
        weight = nn.Parameter(
            BlockwiseFP8Weight(stored if recipe is GRID else stored.mT.clone(), recipe)
        )

        def step(x: Tensor, weight: Tensor = weight, is_kn: bool = recipe is GRID_KN) -> Tensor:
            return x @ weight if is_kn else F.linear(x, weight)

        made = []
        for run in (step, torch.compile(step, fullgraph=True)):
            x, weight.grad = randn(5, 160, dtype=torch.float32, grad=True), None
            y = run(x)
            y.backward(randn(*y.shape, dtype=torch.float32, seed=1))
            made.append((y, x.grad, weight.grad))
        for a, b in zip(*made, strict=True):
            assert torch.equal(a, b)


def test_a_loop_over_experts_reads_the_grid() -> None:
    w = randn(2, 64, 96, dtype=torch.float32)
    stack = nn.Parameter(BlockwiseFP8Weight(w.clone(), GRID))
    x = randn(3, 96, dtype=torch.float32)
    for e in range(2):
        wanted = functional.linear(x, on_grid(w[e]), recipe=PLAIN)
        assert torch.equal(F.linear(x, stack[e]), wanted)
    assert torch.equal(functional.linear(x, w[0], recipe=GRID), F.linear(x, stack[0]))
    assert torch.equal(functional.linear(x, w[0], recipe=GRID_KN), F.linear(x, stack[0]))


def test_training_freezing_copies_and_moves_keep_the_grid() -> None:
    layer = linear(64, 96, GRID)
    x = randn(5, 96, dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    layer(x).square().sum().backward()
    before = layer.weight.dequantize().detach()
    optimizer.step()
    after = layer.weight.dequantize().detach()
    assert not torch.equal(before, after)
    assert torch.equal(after, on_grid(layer.weight.master))
    again = copy.deepcopy(layer)
    assert again.weight.recipe == GRID and torch.equal(again.weight.dequantize(), after)
    assert "weight_grid='mxfp4'" in repr(layer.weight)
    half = copy.deepcopy(layer).bfloat16()
    assert torch.equal(half.weight.dequantize(), on_grid(layer.weight.master.bfloat16()))
    with torch.no_grad():
        y = layer(x)
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match="rounded at random leave the grid"):
        freeze(model, rounding="stochastic")
    assert type(model[0].weight) is BlockwiseFP8Weight
    freeze(model)
    assert torch.equal(layer.weight.dequantize(), after)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    unfreeze(model)
    assert layer.weight.recipe.weight_grid == "mxfp4"
    assert torch.equal(layer(x), y)


def test_convert_chooses_the_layout_of_known_modules() -> None:
    transformers = pytest.importorskip("transformers")
    conv = nn.Sequential(transformers.pytorch_utils.Conv1D(64, 96))
    w = conv[0].weight.detach().clone()
    frozen = copy.deepcopy(conv).requires_grad_(False)
    convert(conv, GRID, skip_small=False)
    convert(frozen, GRID, skip_small=False)
    assert conv[0].weight.recipe == GRID_KN
    for each in (conv, frozen):
        assert torch.equal(each[0].weight.dequantize(), on_grid(w.mT).mT)
    x = randn(5, 96, dtype=torch.float32)
    assert torch.equal(conv(x), frozen(x))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"weight_grid": "mxfp4"}, "blocks of fp32 scales do not hold the values of the grid"),
        (
            {"weight_grid": "mxfp6", "scale": "power_of_two"},
            "expected one of None, 'mxfp4', 'mxfp4_kn'",
        ),
        ({"weight_grid": "mxfp4", "scale": Scales(activations="power_of_two")}, "blocks of fp32"),
    ],
)
def test_recipes_without_the_grid(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**choices)


def test_the_default_recipe_is_unchanged() -> None:
    assert Recipe() == Recipe(backward="fp8", weight_grid=None)
    assert Recipe().weight_format.name == "128x128" == Recipe().weight_format_nk.name
    assert Recipe().weight_format.mxfp4_group is None
