"""Compute the loss of logits and its gradient on a GPU: a program reads its row twice.

The second read is from cache. Results equal ``reference.py`` up to the order of fp32 sums and the
last bits of exp and log.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import Launch

_COLS = 8192
_ROWS = 1024


@triton.jit
def _class_weights(weight_ptr, c, cols, WEIGHTED: tl.constexpr):
    # The weights of classes; 0 for those that do not exist.
    if WEIGHTED:
        return tl.load(weight_ptr + c, mask=(c >= 0) & (c < cols), other=0.0)
    else:
        return ((c >= 0) & (c < cols)).to(tl.float32)


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(
    logits_ptr,
    target_ptr,
    total_ptr,
    weight_ptr,
    losses_ptr,
    cols,
    stride,
    ignore_index,
    COLS: tl.constexpr,
    TOTAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    # One program computes the loss of a row by a running maximum, then writes the gradient over the
    # row. With w(c), the weights of classes, y, the target, and log p, the log-softmax, the loss is
    # (1 - SMOOTHING) * -w(y) log p(y) + SMOOTHING / cols * sum of -w(c) log p(c).
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(target_ptr + row)
    c = tl.arange(0, COLS)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        for first in range(0, cols, COLS):
            zeros = tl.zeros((COLS,), logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + first + c, zeros, mask=first + c < cols)
        return
    # before the reductions, whose barriers keep it ahead of the stores of other warps
    exists = (target >= 0) & (target < cols)  # a class that does not has a loss of NaN
    chosen = tl.load(logits_ptr + target, mask=exists, other=float("nan")).to(tl.float32)
    of_target = (1.0 - SMOOTHING) * _class_weights(weight_ptr, target, cols, WEIGHTED)
    of_each = SMOOTHING / tl.cast(cols, tl.float32)
    largest = float("-inf")
    powers = 0.0  # the sum of exp(x - largest); NaN if there is a NaN or +inf
    weights = 0.0 if WEIGHTED else tl.cast(cols, tl.float32)  # the sum of w(c)
    for first in range(0, cols, COLS):
        x = tl.load(logits_ptr + first + c, mask=first + c < cols, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        powers = powers * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = larger
        if WEIGHTED and SMOOTHING > 0:
            weights += tl.sum(_class_weights(weight_ptr, first + c, cols, WEIGHTED), 0)
    factor = of_target + of_each * weights  # the sum of all factors of -log p
    loss = factor * tl.log(powers) - of_target * (chosen - largest)
    if SMOOTHING == 0:  # after the next loop it would cost registers
        tl.store(losses_ptr + row, loss)

    scale = 1.0
    if TOTAL:
        scale = tl.div_rn(scale, tl.load(total_ptr).to(tl.float32))
    reciprocal = tl.where(exists, factor / powers, float("nan"))
    below = 0.0  # the sum of w(c) (largest - x(c))
    for first in range(0, cols, COLS):
        place = logits_ptr + first + c
        x = tl.load(place, mask=first + c < cols, other=0.0).to(tl.float32)
        gradient = tl.exp(x - largest) * reciprocal
        if SMOOTHING > 0:
            weight = _class_weights(weight_ptr, first + c, cols, WEIGHTED)
            below += tl.sum(weight * (largest - x), 0)
            gradient -= of_each * weight
        gradient -= tl.where(first + c == target, of_target, 0.0)
        gradient = (gradient * scale).to(logits_ptr.dtype.element_ty)
        tl.store(place, gradient, mask=first + c < cols)
    if SMOOTHING > 0:
        tl.store(losses_ptr + row, loss + of_each * below)


@triton.jit(do_not_specialize=["rows"])
def sum_losses_kernel(
    losses_ptr, total_ptr, sum_ptr, rows, ROWS: tl.constexpr, TOTAL: tl.constexpr
):
    # One program, so that the order of the sum is always the same.
    r = tl.arange(0, ROWS)
    parts = tl.zeros((ROWS,), tl.float32)
    for first in range(0, rows, ROWS):
        parts += tl.load(losses_ptr + first + r, mask=first + r < rows, other=0.0)
    made = tl.sum(parts, 0)
    if TOTAL:
        made = tl.div_rn(made, tl.load(total_ptr).to(tl.float32))
    tl.store(sum_ptr, made)


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignore_index: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """See :func:`~..reference.loss_and_gradient_`; rows of unit stride."""
    rows, cols = logits.shape
    losses = torch.empty((rows,), dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    given, has_total = loss if total is None else total, {"TOTAL": total is not None}
    most = _COLS // 4 if label_smoothing else _COLS  # else registers would spill
    block = min(most, triton.next_power_of_2(max(128, cols)))
    Launch(
        cross_entropy_kernel,
        (rows,),
        (
            logits,
            target,
            given,
            losses if weight is None else weight,
            losses,
            cols,
            logits.stride(0),
            ignore_index,
        ),
        {
            "COLS": block,
            **has_total,
            "WEIGHTED": weight is not None,
            "SMOOTHING": label_smoothing,
        },
        {"num_warps": 8, "enable_fp_fusion": True},
    )()
    Launch(
        sum_losses_kernel,
        (1,),
        (losses, given, loss, rows),
        {"ROWS": _ROWS, **has_total},
        {"num_warps": 4, "enable_fp_fusion": True},
    )()
    return loss
