"""What tensor parallel linears compute, in one process: whole, and as sums over parts.

A partial sum is emulated as a product with all of the weight, of an input or gradient whose columns
on other ranks are zeros: parts of the weight are not made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from blocktensor import Recipe, to_blockwise_fp8_weights
from blocktensor.ops.cast.ops import quantize_both, quantize_forms, quantize_rowwise, transpose
from blocktensor.ops.gemm.ops import gemm


@contextmanager
def one_backend(device: str) -> Iterator[None]:
    """On GPUs, one kernel for the products of wholes and of parts: others sum in other orders."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cuda":
            patch.setenv("BLOCKTENSOR_GEMM", "triton")
        yield


class Step(NamedTuple):
    """The results of a forward and a backward."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    dbias: Tensor | None


def plain(n: int, k: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """A linear of the same values on every rank."""
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias).to(dtype)


def converted(
    n: int, k: int, bias: bool, dtype: torch.dtype, recipe: Recipe | None = None
) -> nn.Linear:
    """A :func:`plain` one in FP8."""
    module = plain(n, k, bias, dtype)
    to_blockwise_fp8_weights(module, recipe)
    return module


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(module: nn.Module, x: Tensor, grad: Tensor) -> Step:
    """Forward and backward of a linear; local parts of what is cut."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    assert x.grad is not None
    parameters = dict(module.named_parameters())
    grads = {name: local(parameter.grad) for name, parameter in parameters.items()}
    return Step(y.detach(), x.grad, grads["weight"], grads.get("bias"))


def local(x: Any) -> Tensor:
    """The local part of what may be a DTensor."""
    made: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return made


def masked(x: Tensor, ranks: int, rank: int) -> Tensor:
    """``x[..., C]`` flattened to rows, with zeros in the columns that other ranks have."""
    x = x.reshape(-1, x.shape[-1])
    made = torch.zeros_like(x)
    each = x.shape[1] // ranks
    mine = slice(rank * each, (rank + 1) * each)
    made[:, mine] = x[:, mine]
    return made


def partial_dgrad(module: Any, grad: Tensor, ranks: int, rank: int, wire: torch.dtype) -> Tensor:
    """What a rank adds to the data gradient of a linear whose outputs are cut."""
    w_col = transpose(quantize_rowwise(module.weight.master.detach(), module.weight.format))
    recipe = module.weight.recipe
    g_row, _ = quantize_both(masked(grad, ranks, rank), recipe.activation_format)
    return gemm(g_row, w_col, None, wire)


def in_order(partials: list[Tensor]) -> Tensor:
    """The fp32 sum from the first rank to the last."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total


def summed_dgrad(module: Any, grad: Tensor, ranks: int, wire: torch.dtype | None = None) -> Tensor:
    """The data gradient of a linear whose outputs are cut: partial sums, added in order."""
    wire = wire or grad.dtype
    total = in_order([partial_dgrad(module, grad, ranks, rank, wire) for rank in range(ranks)])
    return total.to(grad.dtype).view(*grad.shape[:-1], -1)


def summed_fprop(module: Any, x: Tensor, ranks: int, wire: torch.dtype | None = None) -> Tensor:
    """The output of a linear whose inputs are cut: partial sums, added in order, and the bias."""
    recipe = module.weight.recipe
    w_row = quantize_rowwise(module.weight.master.detach(), module.weight.format)
    partials = []
    for rank in range(ranks):
        x_row, _ = quantize_both(masked(x, ranks, rank), recipe.activation_format)
        partials.append(gemm(x_row, w_row, None, wire or x.dtype))
    total = in_order(partials)
    if module.bias is not None:
        total = total + module.bias.detach().float()
    return total.to(x.dtype).view(*x.shape[:-1], -1)


def wgrad_of_part(module: Any, x: Tensor, grad: Tensor, ranks: int, rank: int) -> Tensor:
    """The weight gradient of a linear whose inputs are cut, in columns of one rank."""
    recipe, each = module.weight.recipe, x.shape[-1] // ranks
    columns = slice(rank * each, (rank + 1) * each)
    rows = grad.reshape(-1, grad.shape[-1])
    format = recipe.wgrad_input_format
    if format is None:
        return rows.t() @ x.reshape(-1, x.shape[-1])[:, columns]
    _, x_col = quantize_forms(masked(x, ranks, rank), None, format)
    _, g_col = quantize_forms(rows, None, recipe.activation_format)
    assert g_col is not None and x_col is not None
    return gemm(g_col, x_col, None, module.weight.dtype)[:, columns]


def summed_dbias(grad: Tensor, dim: int, ranks: int) -> Tensor:
    """The gradient of a bias of tokens cut along ``dim``: partial sums, added in order."""
    parts = grad.chunk(ranks, dim=dim)
    sums = [part.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32) for part in parts]
    return in_order(sums).to(grad.dtype)
