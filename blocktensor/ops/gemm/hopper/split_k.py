"""The sum of the splits of a product along K, for a tile that several programs share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...formats import ceil_div
from ...runtime.launch import Launch

_COLUMNS = 512


@triton.jit
def sum_kernel(
    splits_ptr, bias_ptr, out_ptr, N, split_stride, out_stride, blocks_n, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    # One program sums COLUMNS columns of one row, always in the same order.
    row = (tl.program_id(0) // blocks_n).to(tl.int64)
    cols = tl.program_id(0) % blocks_n * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < N
    source = splits_ptr + row * N + cols
    total = tl.load(source, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(source + split * split_stride, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    target = out_ptr + row * out_stride + cols
    if ACCUMULATE:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


def plan_sum(splits: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> Launch:
    """The launch of ``out[M, N] (+)= sum over p of splits[p, :M] (+ bias)``; ``splits`` is fp32."""
    m, n = out.shape
    blocks_n = ceil_div(n, _COLUMNS)
    return Launch(
        sum_kernel,
        (m * blocks_n,),
        (splits, out if bias is None else bias, out, n, splits.stride(0), out.stride(0), blocks_n),
        {
            "SPLITS": splits.shape[0],
            "COLUMNS": _COLUMNS,
            "HAS_BIAS": bias is not None,
            "ACCUMULATE": accumulate,
        },
        {"num_warps": 4, "enable_fp_fusion": True},
    )
