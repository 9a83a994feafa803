"""Signal to quantization noise of a linear layer: measured, and shown in docs/guides/recipes.md."""

from __future__ import annotations

import math

import torch

from blocktensor import Recipe, functional
from tests.docs.code_blocks import ROOT
from tests.support.numeric import relative_error
from tests.support.outliers import drawn


def sqnr(kind: str, recipe: Recipe, device: torch.device) -> dict[str, float]:
    """Signal to quantization noise of y, dx and dw, in dB; x and g have outliers."""
    x, grad, w = (part.bfloat16().to(device) for part in drawn(kind))
    leaves = [x.requires_grad_(), w.requires_grad_()]
    y = functional.linear(*leaves, recipe=recipe)
    dx, dw = torch.autograd.grad(y, leaves, grad)
    x, w, grad = (part.detach().double() for part in (x, w, grad))
    exact = {"y": x @ w.t(), "dx": grad @ w, "dw": grad.t() @ x}
    pairs = zip((y.detach(), dx, dw), exact.items(), strict=True)
    return {name: -20 * math.log10(relative_error(made, of)) for made, (name, of) in pairs}


def rows_on_the_page(header: str) -> dict[str, list[list[float]]]:
    """The numbers of each row of the table with this header: in each cell, one for each recipe."""
    page = (ROOT / "docs/guides/recipes.md").read_text("utf-8")
    _, _, after = page.partition(f"{header}\n")
    lines = [line for line in after.split("\n\n")[0].splitlines()[1:] if line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: [[*map(float, each.split(" / "))] for each in rest] for name, *rest in cells}
