"""Shared by the tests of ``Recipe(wgrad_input=...)``: the recipes, and weight gradients by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor import Recipe
from blocktensor.ops import reference

ROWS, HIGH = Recipe(wgrad_input="1x128"), Recipe(wgrad_input="high_precision")
RECIPES = (ROWS, Recipe(scale="power_of_two", wgrad_input="1x128"), HIGH)
every_recipe = pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe.wgrad_input} {recipe.scale}"
)


def wgrad(grad: Tensor, x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``gradᵀ x`` of matrices, spelled out."""
    format = recipe.wgrad_input_format
    if format is None:
        return (grad.t() @ x).to(dtype)
    g_col = reference.quantize_columnwise(grad, recipe.activation_format)
    return reference.gemm(g_col, reference.quantize_columnwise(x, format), None, dtype)


def saved_by(run: Callable[[], Any]) -> list[Tensor]:
    """The tensors that ``run()`` saves for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved
