"""What tensor parallel linears compute, in one process: whole, and as sums over parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from blocktensor import Recipe, to_blockwise_fp8_weights
from blocktensor.ops.cast.ops import quantize_both, quantize_rowwise, transpose
from blocktensor.ops.gemm.ops import gemm


class Step(NamedTuple):
    """The results of a forward and a backward."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    dbias: Tensor | None


def converted(
    n: int, k: int, bias: bool, dtype: torch.dtype, recipe: Recipe | None = None
) -> nn.Linear:
    """A linear of the same values on every rank, in FP8."""
    torch.manual_seed(0)
    module = nn.Linear(k, n, bias=bias).to(dtype)
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
    grads = {name: _local(parameter.grad) for name, parameter in parameters.items()}
    return Step(y.detach(), x.grad, grads["weight"], grads.get("bias"))


def _local(x: Tensor | None) -> Tensor:
    assert x is not None
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def summed_dgrad(
    module: nn.Linear, grad: Tensor, ranks: int, wire: torch.dtype | None = None
) -> Tensor:
    """The data gradient of a linear whose outputs are cut: partial sums, added in order."""
    master, recipe = module.weight.master.detach(), module.weight.recipe
    total = torch.zeros((), dtype=torch.float32)
    grad_rows = grad.reshape(-1, grad.shape[-1])
    for w, g in zip(master.chunk(ranks), grad_rows.chunk(ranks, dim=1), strict=True):
        w_col = transpose(quantize_rowwise(w, recipe.weight_format))
        g_row, _ = quantize_both(g.contiguous(), recipe.activation_format)
        total = total + gemm(g_row, w_col, None, wire or grad.dtype).float()
    return total.to(grad.dtype).view(*grad.shape[:-1], -1)


def summed_fprop(
    module: nn.Linear, x: Tensor, ranks: int, wire: torch.dtype | None = None
) -> Tensor:
    """The output of a linear whose inputs are cut: partial sums, added in order, and the bias."""
    master, recipe = module.weight.master.detach(), module.weight.recipe
    total = torch.zeros((), dtype=torch.float32)
    rows = x.reshape(-1, x.shape[-1])
    for w, part in zip(master.chunk(ranks, dim=1), rows.chunk(ranks, dim=1), strict=True):
        x_row, _ = quantize_both(part.contiguous(), recipe.activation_format)
        w_row = quantize_rowwise(w.contiguous(), recipe.weight_format)
        total = total + gemm(x_row, w_row, None, wire or x.dtype).float()
    if module.bias is not None:
        total = total + module.bias.detach().float()
    return total.to(x.dtype).view(*x.shape[:-1], -1)


def summed_dbias(grad: Tensor, dim: int, ranks: int) -> Tensor:
    """The gradient of a bias of tokens cut along ``dim``: partial sums, added in order."""
    total = torch.zeros((), dtype=torch.float32)
    for part in grad.chunk(ranks, dim=dim):
        total = total + part.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
    return total.to(grad.dtype)
