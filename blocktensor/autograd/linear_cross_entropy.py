"""Compute the loss of an FP8 head in chunks of tokens, without the logits of all tokens at once.

The forward computes the gradients with the loss, chunk by chunk; backward only scales them. The
logits of a chunk are rounded to the dtype of the linear, as a head rounds them, and then taken in
fp32. Chunks are whole blocks of tokens, so that every cast has the same bits as without chunks. The
loss of a token and the gradient of x have the same bits as by
``F.cross_entropy(linear(x, w).float(), target)``. On a GPU a kernel writes the gradient of logits
over them, equal up to the order of fp32 sums. Weight gradients are summed in fp32 and rounded once.

Gradients of a mean over many tokens and words are too small for fp16, and a loss scale multiplies
them too late, in backward. So with fp16 the gradients of a chunk are multiplied by a power of two,
and backward keeps what it scales in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks, reference
from ..ops.cast.ops import quantize_forms
from ..ops.cross_entropy import ops
from ..ops.formats import BLOCK, Quantized, ceil_div
from ..ops.gemm.ops import gemm
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .backward import FP8Function, Gradients, given_out, run_backward
from .matmuls import wgrad_in_high_precision
from .plan import Plan, plan_matmul
from .saved_weight import operand_of_weight

CHUNK_BYTES = 2**32
"""Most bytes of temporary memory for the logits of a chunk of the default size."""


class CrossEntropy(NamedTuple):
    """The arguments of ``F.cross_entropy`` other than logits and targets."""

    reduction: str
    ignore_index: int
    weight: Tensor | None
    label_smoothing: float

    def total(self, target: Tensor) -> Tensor | None:
        """Return what the sum of losses is divided by; None for ``reduction="sum"``."""
        if self.reduction == "sum":
            return None
        counts = target != self.ignore_index
        if self.weight is None:
            return counts.sum()
        # a target that is no class raises or becomes nan later
        of_tokens = self.weight[target.clamp(0, len(self.weight) - 1)]
        return of_tokens.where(counts, 0.0).sum()

    def unit(self, total: Tensor | None, like: Tensor) -> Tensor:
        """Return the power of two that scales gradients of logits to the range of fp16.

        Args:
            total: what the sum of losses is divided by.
            like: a tensor on the device of the logits.
        """
        divisor = torch.ones((), device=like.device) if total is None else total
        if self.weight is not None:
            divisor = divisor / self.weight.abs().max()
        exponent = 14 + divisor.log2().floor()
        return exponent.nan_to_num(0, 0, 0).clamp(-100, 100).exp2()

    def loss_and_gradient_(self, logits: Tensor, target: Tensor, total: Tensor | None) -> Tensor:
        """Return the share of a chunk in the loss, and write its gradient over the logits."""
        return ops.loss_and_gradient_(logits, target, total, *self._options)

    def of(self, logits: Tensor, target: Tensor, total: Tensor | None) -> Tensor:
        """Return the share of a chunk in the loss of all tokens."""
        return reference.loss(logits, target, total, *self._options)

    def of_all(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of all logits, as torch computes it."""
        return F.cross_entropy(
            logits,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    @property
    def _options(self) -> tuple[int, Tensor | None, float]:
        return self.ignore_index, self.weight, self.label_smoothing


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    loss: CrossEntropy,
    chunk: int | None,
    recipe: Recipe | None,
) -> Tensor:
    """Run :func:`blocktensor.functional.linear_cross_entropy`."""
    _check(x, w, target, loss, chunk)
    weight = None if loss.weight is None else loss.weight.contiguous()
    loss = loss._replace(weight=weight, label_smoothing=float(loss.label_smoothing))
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_matmul(x, w, bias, recipe)
        if plan.tracing:
            raise NotImplementedError(
                f"linear_cross_entropy of a {type(x).__name__} and a {type(w).__name__}, or while "
                f"a compiler or torch.func traces: pass local, plain tensors in eager mode, or "
                f"compute F.cross_entropy(F.linear(x, w).float(), target)"
            )
        if plan.plain_dgrad or plan.saves_rows:
            raise NotImplementedError(
                "linear_cross_entropy with a recipe whose backward reads dequantized operands or "
                "runs in high precision: compute F.cross_entropy(F.linear(x, w).float(), target), "
                "or convert the head with backward='fp8' and another wgrad_input"
            )
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        needs_dbias = bias is not None and torch.is_grad_enabled() and bias.requires_grad
        rows = chunk or _tokens_of_a_chunk(x, w)
        flat = x.reshape(-1, x.shape[-1]), w, bias, target.reshape(-1)
        made: Tensor = _LinearCrossEntropy.apply(*flat, plan, needs_dbias, loss, rows)
        return given_out(made, ())


def _tokens_of_a_chunk(x: Tensor, w: Tensor) -> int:
    most = CHUNK_BYTES // max(1, w.shape[0] * (x.element_size() + ops.more_bytes(x)))
    return max(BLOCK, most // BLOCK * BLOCK)


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
    if not isinstance(loss.ignore_index, int):
        kind = type(loss.ignore_index).__name__
        raise TypeError(f"ignore_index is a {kind}: expected the index of a class, an int")
    if not isinstance(loss.label_smoothing, (int, float)):
        kind = type(loss.label_smoothing).__name__
        raise TypeError(f"label_smoothing is a {kind}: expected a number from 0 to 1")
    if not 0 <= loss.label_smoothing <= 1:  # nan, too
        raise ValueError(f"label_smoothing={loss.label_smoothing!r}: expected a number from 0 to 1")
    if loss.weight is not None:
        _check_class_weights(loss.weight, x, w)


def _check_class_weights(weight: Tensor, x: Tensor, w: Tensor) -> None:
    checks.tensor(weight, "weight")
    if weight.shape != w.shape[:1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: expected the weights of the classes, "
            f"{list(w.shape[:1])}; the weight of the head is w"
        )
    if weight.dtype != torch.float32:
        raise TypeError(
            f"the weights of the classes have dtype {weight.dtype}: expected torch.float32, as the "
            f"loss is computed; pass weight.float()"
        )
    checks.same_device(x, weight, "the input", "the weights of the classes")
    if weight.requires_grad:
        raise NotImplementedError(
            "linear_cross_entropy computes no gradient of the weights of the classes: pass "
            "weight.detach()"
        )


class _LinearCrossEntropy(FP8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        target: Tensor,
        plan: Plan,
        needs_dbias: bool,
        loss: CrossEntropy,
        rows: int,
    ) -> Tensor:
        needs_dx, needs_dw = plan.needs  # ctx.needs_input_grad ignores no_grad
        is_trained = needs_dx or needs_dw or needs_dbias
        ctx.plan = plan
        w_row, w_col = _forms_of_weight(w, plan, needs_dx)
        total, loss_value = loss.total(target), _zeros((), x)
        if not len(x) and total is not None:
            loss_value = loss_value / total
        unit, divisor = None, total
        if plan.out_dtype == torch.float16 and is_trained:
            unit = loss.unit(total, x)
            divisor = 1 / unit if total is None else total / unit
        dx_dtype = plan.x_dtype if unit is None else torch.float32
        # the matmul rounds the gradient of a single chunk, once
        sum_dtype = plan.w_dtype if len(x) <= rows and unit is None else torch.float32
        dx = torch.empty_like(x, dtype=dx_dtype) if needs_dx else None
        dw = None
        dbias = _zeros(w.shape[:1], x) if needs_dbias else None
        for i in range(ceil_div(len(x), rows)):
            chunk = slice(i * rows, (i + 1) * rows)
            tokens = x[chunk]
            x_row, x_col = quantize_forms(tokens, plan.format, plan.x_columnwise)
            assert x_row is not None
            logits = gemm(x_row, w_row, bias, plan.out_dtype, plan.batch_invariant)
            if not is_trained:
                loss_value += loss.of(logits, target[chunk], total)
                continue
            loss_value += loss.loss_and_gradient_(logits, target[chunk].contiguous(), divisor)
            grad: Tensor | None = logits
            del logits
            assert grad is not None
            g_row, g_col = quantize_forms(grad, *plan.grad_formats)
            if dbias is not None:
                dbias += grad.sum(0, dtype=torch.float32)
            if not plan.saves_x:
                grad = None  # its forms are enough
            if dx is not None:
                assert g_row is not None
                assert w_col is not None
                dx[chunk] = gemm(g_row, w_col, None, dx_dtype)
            del g_row
            if needs_dw:
                dw = _sum_wgrad(dw, grad, tokens, g_col, x_col, sum_dtype)
            del grad, g_col, x_row, x_col  # else they would outlive this chunk
        if needs_dw and dw is None:  # there are no tokens
            dw = _zeros(w.shape, x)
        if dw is not None and unit is None:
            dw = dw.to(plan.w_dtype)
        if dbias is not None and unit is None:
            dbias = dbias.to(plan.bias_dtype)
        ctx.save_for_backward(dx, dw, dbias, unit)
        return loss_value if unit is None else loss_value / unit

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, ctx.plan.are_tensors)


def _gradients(
    ctx: Any, saved: Sequence[Tensor | None], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return the gradients of the arguments of :meth:`_LinearCrossEntropy.forward`."""
    plan, (grad,), (*made, unit) = ctx.plan, grads, saved
    grads.clear()
    dx, dw, dbias = (x if needed else None for x, needed in zip(made, asked, strict=False))
    grad = grad if unit is None else grad / unit
    dtypes = plan.x_dtype, plan.w_dtype, plan.bias_dtype
    dx, dw, dbias = (
        None if x is None else (x * grad).to(dtype)
        for x, dtype in zip((dx, dw, dbias), dtypes, strict=True)
    )
    return dx, dw, dbias, None, None, None, None, None


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _forms_of_weight(w: Tensor, plan: Plan, both: bool) -> tuple[Quantized, Quantized | None]:
    """Return the rowwise form of the weight, and the columnwise one if it is needed.

    Raises:
        RuntimeError: FSDP2 has gathered the weight for a backward, and it has changed since.
    """
    if isinstance(w, BlockwiseFP8Tensor) and w.generation is not None:
        w.generation.read()
    if both and isinstance(w, BlockwiseFP8Weight):
        return w._both_forms()
    operand = operand_of_weight(w, plan.weight_format)
    return operand.need_rowwise(), operand.need_columnwise() if both else None


def _sum_wgrad(
    dw: Tensor | None,
    grad: Tensor | None,
    x: Tensor,
    g_col: Quantized | None,
    x_col: Quantized | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``dw`` of the chunks so far: in fp32, or in ``dtype`` if this is the first."""
    if x_col is None:  # Recipe(wgrad_input="high_precision")
        assert grad is not None
        of_chunk = wgrad_in_high_precision(grad, x, dtype)
    else:
        assert g_col is not None
        of_chunk = gemm(g_col, x_col, None, dtype)
    return of_chunk if dw is None else dw.add_(of_chunk)
