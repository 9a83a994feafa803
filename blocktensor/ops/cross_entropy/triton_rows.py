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


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(
    logits_ptr,
    target_ptr,
    total_ptr,
    losses_ptr,
    cols,
    stride,
    ignore_index,
    COLS: tl.constexpr,
    TOTAL: tl.constexpr,
):
    # One program computes the loss of a row by a running maximum, then writes the gradient over the
    # row.
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
    largest = float("-inf")
    powers = 0.0  # the sum of exp(x - largest); NaN if there is a NaN or +inf
    for first in range(0, cols, COLS):
        x = tl.load(logits_ptr + first + c, mask=first + c < cols, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        powers = powers * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = larger
    tl.store(losses_ptr + row, tl.log(powers) - (chosen - largest))

    scale = 1.0
    if TOTAL:
        scale = tl.div_rn(scale, tl.load(total_ptr).to(tl.float32))
    reciprocal = tl.where(exists, 1.0 / powers, float("nan"))
    for first in range(0, cols, COLS):
        place = logits_ptr + first + c
        x = tl.load(place, mask=first + c < cols, other=0.0).to(tl.float32)
        gradient = tl.exp(x - largest) * reciprocal - (first + c == target).to(tl.float32)
        gradient = (gradient * scale).to(logits_ptr.dtype.element_ty)
        tl.store(place, gradient, mask=first + c < cols)


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
    logits: Tensor, target: Tensor, total: Tensor | None, ignore_index: int
) -> Tensor:
    """See :func:`~..reference.loss_and_gradient_`; rows of unit stride."""
    rows, cols = logits.shape
    losses = torch.empty((rows,), dtype=torch.float32, device=logits.device)
    made = torch.empty((), dtype=torch.float32, device=logits.device)
    given, has_total = made if total is None else total, {"TOTAL": total is not None}
    block = min(_COLS, triton.next_power_of_2(max(128, cols)))
    Launch(
        cross_entropy_kernel,
        (rows,),
        (logits, target, given, losses, cols, logits.stride(0), ignore_index),
        {"COLS": block, **has_total},
        {"num_warps": 8, "enable_fp_fusion": True},
    )()
    Launch(
        sum_losses_kernel,
        (1,),
        (losses, given, made, rows),
        {"ROWS": _ROWS, **has_total},
        {"num_warps": 4, "enable_fp_fusion": True},
    )()
    return made
