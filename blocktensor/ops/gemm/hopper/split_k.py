"""The sum of the parts of a product along K, for a tile that several programs share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...formats import ceil_div
from ...runtime.launch import Launch

_COLUMNS = 512


@triton.jit
def sum_kernel(
    parts_ptr, bias_ptr, out_ptr, N, part_stride, out_stride, blocks_n, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    # One program sums COLUMNS columns of one row, always in the same order.
    row = (tl.program_id(0) // blocks_n).to(tl.int64)
    cols = tl.program_id(0) % blocks_n * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < N
    source = parts_ptr + row * N + cols
    total = tl.load(source, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * part_stride, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    target = out_ptr + row * out_stride + cols
    if ACCUMULATE:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


def plan_sum(parts: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> Launch:
    """The launch of ``out[M, N] (+)= sum over p of parts[p, :M] (+ bias)``; ``parts`` is fp32."""
    m, n = out.shape
    blocks_n = ceil_div(n, _COLUMNS)
    return Launch(
        sum_kernel,
        (m * blocks_n,),
        (parts, out if bias is None else bias, out, n, parts.stride(0), out.stride(0), blocks_n),
        {
            "PARTS": parts.shape[0],
            "COLUMNS": _COLUMNS,
            "HAS_BIAS": bias is not None,
            "ACCUMULATE": accumulate,
        },
        {"num_warps": 4},
    )
