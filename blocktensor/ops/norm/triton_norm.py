"""Compute an RMS norm and its gradients on a GPU, with the bytes of ``reference.py``.

A program has a few whole rows. It reads them once for their sums, which it adds in torch's order
(``row_sums.py``), and again, mostly from the cache, for the results. The kernels are compiled
without fused multiply-adds: every product is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import ceil_div, padded_rows
from ..runtime.launch import Launch, Rows
from .reference import NormKind
from .row_sums import VECTOR, threads_of

_LANES = 64
"""Least lanes of a program. A lane adds what one of torch's threads adds; a program takes several
rows if these have fewer lanes."""

_TILE = 1024
"""Columns of a row that are computed at once after the sums."""

_UNROLLED = tl.constexpr(4)
_VECTOR = tl.constexpr(VECTOR)
_RSQRT = tl.constexpr("rsqrt.approx.f32 $0, $1;")  # tl.rsqrt flushes subnormal numbers


@triton.jit
def _part(i, COLS: tl.constexpr, LANES: tl.constexpr):
    # The columns of the lanes' i-th vectors [1, LANES, VECTOR], and which exist.
    lanes = i * LANES + tl.arange(0, LANES)
    c = (lanes[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :])[None, :, :]
    return c, c < COLS


@triton.jit
def _halved(sums, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    # Add the upper half of each row of [ROWS, WIDTH] to the lower half until one is left, [ROWS].
    for _ in tl.static_range(WIDTH.bit_length() - 1):
        sums = tl.sum(tl.reshape(sums, [ROWS, 2, sums.shape[1] // 2]), 1)
    return tl.reshape(sums, [ROWS])


@triton.jit
def _row_sum(parts, ROWS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr):
    # Add the sums of lanes [ROWS, LANES, VECTOR] in torch's order.
    even, odd = tl.split(tl.reshape(parts, [ROWS, LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    sums = ((first + second) + third) + fourth
    of_groups: tl.constexpr = ROWS * GROUPS
    width: tl.constexpr = LANES // GROUPS
    sums = _halved(tl.reshape(sums, [of_groups, width]), of_groups, width)
    return _halved(tl.reshape(sums, [ROWS, GROUPS]), ROWS, GROUPS)


@triton.jit
def _of_scaled(grad, weight, KIND: tl.constexpr):
    # reference._of_scaled
    if KIND == "llama":
        return (grad.to(tl.float32) * weight.to(tl.float32)).to(grad.dtype).to(tl.float32)
    else:
        return grad.to(tl.float32) * (weight.to(tl.float32) + 1.0)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    rows,
    stride,
    EPS: tl.constexpr,
    KIND: tl.constexpr,
    COLS: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # reference.normalized
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = r < rows
    parts = tl.zeros([ROWS, LANES, _VECTOR], tl.float32)
    for i in range(0, tl.cdiv(COLS, _UNROLLED * LANES * _VECTOR)):
        for j in tl.static_range(_UNROLLED):
            c, inside = _part(i * _UNROLLED + j, COLS, LANES)
            at = x_ptr + r[:, None, None] * stride + c
            x = tl.load(at, mask=exists[:, None, None] & inside, other=0.0).to(tl.float32)
            parts += x * x
    # torch divides by the number of elements over the number of rows, both in fp32
    count = tl.cast(tl.cast(rows, tl.int64) * COLS, tl.float32)
    mean = _row_sum(parts, ROWS, LANES, GROUPS) * tl.div_rn(tl.cast(rows, tl.float32), count)
    rstd = tl.inline_asm_elementwise(_RSQRT, "=f,f", [mean + EPS], tl.float32, True, 1)
    tl.store(rstd_ptr + r, rstd, mask=exists)
    for start in range(0, COLS, TILE):
        c = start + tl.arange(0, TILE)[None, :]
        inside = exists[:, None] & (c < COLS)
        x = tl.load(x_ptr + r[:, None] * stride + c, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + c, mask=c < COLS, other=0.0).to(tl.float32)
        scaled = x.to(tl.float32) * rstd[:, None]
        if KIND == "llama":
            scaled = scaled.to(x.dtype).to(tl.float32) * weight
        else:
            scaled = scaled * (weight + 1.0)
        tl.store(out_ptr + r[:, None] * COLS + c, scaled.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_gradients_kernel(
    grad_ptr,
    x_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    terms_ptr,
    rows,
    grad_stride,
    stride,
    KIND: tl.constexpr,
    OF_INPUT: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
    COLS: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # reference.row_gradients
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = r < rows
    rstd = tl.load(rstd_ptr + r, mask=exists, other=0.0)
    of_mean = rstd
    if OF_INPUT:
        parts = tl.zeros([ROWS, LANES, _VECTOR], tl.float32)
        for i in range(0, tl.cdiv(COLS, _UNROLLED * LANES * _VECTOR)):
            for j in tl.static_range(_UNROLLED):
                c, inside = _part(i * _UNROLLED + j, COLS, LANES)
                both = exists[:, None, None] & inside
                grad = tl.load(grad_ptr + r[:, None, None] * grad_stride + c, both, other=0.0)
                x = tl.load(x_ptr + r[:, None, None] * stride + c, mask=both, other=0.0)
                weight = tl.load(weight_ptr + c, mask=inside, other=0.0)
                parts += _of_scaled(grad, weight, KIND) * x.to(tl.float32)
        # torch multiplies by the reciprocal of a number that it should divide by
        of_rstd = _row_sum(parts, ROWS, LANES, GROUPS)
        of_mean = -0.5 * of_rstd * (rstd * rstd * rstd) * (1.0 / COLS)
    for start in range(0, COLS, TILE):
        c = start + tl.arange(0, TILE)[None, :]
        inside = exists[:, None] & (c < COLS)
        grad = tl.load(grad_ptr + r[:, None] * grad_stride + c, mask=inside, other=0.0)
        x = tl.load(x_ptr + r[:, None] * stride + c, mask=inside, other=0.0)
        values = x.to(tl.float32)
        if OF_WEIGHT:
            scaled = values * rstd[:, None]
            if KIND == "llama":
                scaled = scaled.to(x.dtype).to(tl.float32)
            terms = (grad.to(tl.float32) * scaled).to(terms_ptr.dtype.element_ty)
            tl.store(terms_ptr + r[:, None] * COLS + c, terms, mask=inside)
        if OF_INPUT:
            weight = tl.load(weight_ptr + c, mask=c < COLS, other=0.0)
            dx = _of_scaled(grad, weight, KIND) * rstd[:, None] + of_mean[:, None] * (values * 2.0)
            tl.store(dx_ptr + r[:, None] * COLS + c, dx.to(x.dtype), mask=inside)


def _launch(
    kernel: object,
    args: tuple[object, ...],
    x: Tensor,
    sized: tuple[Tensor, ...],
    **constants: object,
) -> None:
    rows, cols = _rows(x), x.shape[-1]
    threads = threads_of(rows, cols)
    assert threads is not None
    lanes = threads.groups * threads.width
    at_once = max(1, _LANES // lanes)
    constants |= {"COLS": cols, "LANES": lanes, "GROUPS": threads.groups}
    constants |= {"ROWS": at_once, "TILE": _TILE // at_once}
    options = {"num_warps": min(8, at_once * lanes // 32), "enable_fp_fusion": False}
    grid = (ceil_div(padded_rows(rows), at_once),)
    Launch(kernel, grid, args, constants, options, sized=sized)()


def _rows(x: Tensor) -> Rows:
    return Rows(x.shape[:-1].numel())


def _stride(x: Tensor) -> int:
    return x.stride(0) if x.ndim == 2 else x.shape[-1]


def normalized(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    """See :func:`~.reference.normalized`; x has contiguous rows."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    args = x, weight, out, rstd, _rows(x), _stride(x)
    _launch(norm_kernel, args, x, (out, rstd), EPS=float(eps), KIND=kind)
    return out, rstd


def row_gradients(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: NormKind,
    of_input: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """See :func:`~.reference.row_gradients`; all operands have contiguous rows."""
    dx = terms = None
    if of_input:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if of_weight:
        dtype = x.dtype if kind == "llama" else torch.float32
        terms = torch.empty(x.shape, dtype=dtype, device=x.device)
    made = [x if each is None else each for each in (dx, terms)]  # x is not written
    args = grad, x, rstd, weight, *made, _rows(x), _stride(grad), _stride(x)
    wanted = {"OF_INPUT": of_input, "OF_WEIGHT": of_weight}
    sized = tuple(each for each in (dx, terms) if each is not None)
    _launch(norm_gradients_kernel, args, x, sized, KIND=kind, **wanted)
    return dx, terms
