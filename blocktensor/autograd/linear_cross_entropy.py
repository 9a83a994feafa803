"""The loss of an FP8 head in chunks of tokens, so that the logits of all never exist at once.

The gradients are computed in the forward, chunk by chunk, beside the loss: backward only scales
them. The logits of a chunk are rounded to the dtype of the linear, as a head rounds them, and then
taken in fp32. Chunks are whole blocks of tokens, so that every cast, and with it the loss of a
token and the gradient of x, has the bits of ``F.cross_entropy(linear(x, w).float(), target)``.
Weight gradients are summed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks
from ..ops.cast.ops import quantize_forms
from ..ops.formats import BLOCK, Quantized, ceil_div
from ..ops.gemm.ops import gemm, gemm_add_
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .double_backward import raise_on_double_backward
from .high_precision import wgrad
from .linear_plan import LinearPlan, plan_linear
from .main_grad import check_main_grad, where_to_add
from .saved_weight import operand_of_weight

LOGITS = 2**27
"""Most logits of a chunk of the default size; a chunk takes about 14 bytes for each."""


class CrossEntropy(NamedTuple):
    """What ``F.cross_entropy`` is told beside logits and targets."""

    weight: Tensor | None
    reduction: str
    ignore_index: int
    label_smoothing: float

    def total(self, target: Tensor) -> Tensor | None:
        """What the sum of losses is divided by; None for a sum."""
        if self.reduction == "sum":
            return None
        valid = target != self.ignore_index
        if self.weight is None:
            return valid.sum()
        return torch.where(valid, self.weight[target.where(valid, 0)], 0).sum()

    def of(self, logits: Tensor, target: Tensor, total: Tensor | None) -> Tensor:
        """The loss of a chunk, as a part of that of all tokens."""
        loss = F.cross_entropy(
            logits.float(),
            target,
            self.weight,
            reduction="sum",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        return loss if total is None else loss / total


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    loss: CrossEntropy,
    chunk: int | None,
    recipe: Recipe | None,
) -> Tensor:
    """:func:`blocktensor.functional.linear_cross_entropy`."""
    _check(x, w, target, loss, chunk)
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_linear(x, w, bias, recipe)
        if plan.tracing:
            raise NotImplementedError(
                f"linear_cross_entropy of a {type(x).__name__} and a {type(w).__name__}, or while "
                f"a compiler or torch.func traces: pass local, plain tensors in eager mode, or "
                f"compute F.cross_entropy(F.linear(x, w).float(), target)"
            )
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        needs_dbias = bias is not None and torch.is_grad_enabled() and bias.requires_grad
        rows = chunk or max(BLOCK, LOGITS // max(1, w.shape[0]) // BLOCK * BLOCK)
        flat = x.reshape(-1, x.shape[-1]), w, bias, target.reshape(-1)
        made: Tensor = _LinearCrossEntropy.apply(*flat, plan, needs_dbias, loss, rows)
        return made


def _check(x: Tensor, w: Tensor, target: Tensor, loss: CrossEntropy, chunk: int | None) -> None:
    if isinstance(x, BlockwiseFP8Tensor):
        raise TypeError(
            "the input of linear_cross_entropy is FP8 already: pass it in high precision, since "
            "each chunk of tokens is cast for itself"
        )
    checks.high_precision(x, "the input of linear_cross_entropy")
    if target.dtype != torch.int64 or target.shape != x.shape[:-1]:
        raise ValueError(
            f"the target of linear_cross_entropy is {target.dtype} {list(target.shape)}: expected "
            f"the indices of classes, torch.int64 {list(x.shape[:-1])}"
        )
    checks.same_device(x, target, "the input", "the target")
    if loss.reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction={loss.reduction!r}: expected 'mean' or 'sum'; the losses of single tokens "
            f"need F.cross_entropy(linear(x, w), target, reduction='none')"
        )
    if chunk is not None and (type(chunk) is not int or chunk < 1 or chunk % BLOCK):
        raise ValueError(f"chunk_size={chunk!r}: expected a positive multiple of {BLOCK} tokens")
    if loss.weight is not None and loss.weight.shape != w.shape[:1]:
        raise ValueError(
            f"the weight of classes has shape {list(loss.weight.shape)}: expected {[w.shape[0]]}"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        target: Tensor,
        plan: LinearPlan,
        needs_dbias: bool,
        loss: CrossEntropy,
        rows: int,
    ) -> Tensor:
        needs_dx, needs_dw = plan.needs  # ctx.needs_input_grad ignores no_grad
        is_trained = needs_dx or needs_dw or needs_dbias
        ctx.plan, ctx.cache = plan, w.cache if isinstance(w, BlockwiseFP8Weight) else None
        if ctx.cache is not None and ctx.cache.main_grad is not None and needs_dw:
            check_main_grad(plan.tracing)
        operand = operand_of_weight(w, plan.weight_format)
        w_row = operand.need_rowwise()
        w_col = operand.need_columnwise() if needs_dx else None
        total, made = loss.total(target), _zeros((), x)
        if not len(x) and total is not None:
            made = made / total
        dx = torch.empty_like(x) if needs_dx else None
        dw = _zeros(w.shape, x) if needs_dw else None
        dbias = _zeros(w.shape[:1], x) if needs_dbias else None
        for i in range(ceil_div(len(x), rows)):
            part = slice(i * rows, (i + 1) * rows)
            tokens = x[part]
            x_row, x_col = quantize_forms(tokens, plan.format, plan.x_columnwise)
            assert x_row is not None
            logits = gemm(x_row, w_row, bias, plan.out_dtype)
            if not is_trained:
                made += loss.of(logits, target[part], total)
                continue
            of_chunk, grad = _loss_and_gradient(loss, logits, target[part], total)
            made += of_chunk
            g_row, g_col = quantize_forms(grad, *plan.grad_formats)
            if dbias is not None:
                dbias += grad.sum(0, dtype=torch.float32)
            if dx is not None:
                assert g_row is not None
                assert w_col is not None
                dx[part] = gemm(g_row, w_col, None, plan.x_dtype)
            if dw is not None:
                _add_wgrad(dw, grad, tokens, g_col, x_col)
        if dw is not None and (ctx.cache is None or ctx.cache.main_grad is None):
            dw = dw.to(plan.w_dtype)
        ctx.save_for_backward(dx, dw, None if dbias is None else dbias.to(plan.bias_dtype))
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            dx, dw, dbias = ctx.saved_tensors
            if dw is not None and ctx.cache is not None and ctx.cache.main_grad is not None:
                buffer, needed = where_to_add(ctx, ctx.cache.main_grad)
                if buffer is not None:
                    buffer.addcmul_(dw, grad)
                dw = dw.to(ctx.plan.w_dtype) if needed and buffer is None else None
            made = tuple(None if each is None else each * grad for each in (dx, dw, dbias))
        if torch.is_grad_enabled():
            made = raise_on_double_backward(made)
        return *made, None, None, None, None, None


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _loss_and_gradient(
    loss: CrossEntropy, logits: Tensor, target: Tensor, total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and its gradient in the dtype of the logits."""
    leaf = logits.detach().requires_grad_()
    # hooks that offload what a forward saves would move the logits of every chunk
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), keep:
        made = loss.of(leaf, target, total)
        (grad,) = torch.autograd.grad(made, leaf)
    return made.detach(), grad


def _add_wgrad(
    dw: Tensor, grad: Tensor, x: Tensor, g_col: Quantized | None, x_col: Quantized | None
) -> None:
    if x_col is None:  # Recipe(wgrad_input="high_precision")
        dw += wgrad(grad, x, torch.float32)
        return
    assert g_col is not None
    gemm_add_(dw, g_col, x_col)
