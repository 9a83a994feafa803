"""Compute the passes of an RMS norm on a GPU, with the bytes of ``reference.py``.

The kernels are compiled without fused multiply-adds: every product is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import ceil_div
from ..runtime.launch import Launch
from .reference import NormKind

_TILE = {"ROWS": 4, "COLS": 1024}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _tile(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    # Rows and columns of this program's tile, and which of them exist.
    tiles = tl.cdiv(cols, COLS)
    r = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    return r[:, None], c[None, :], (r < rows)[:, None] & (c < cols)[None, :]


@triton.jit
def _scaled(grad, weight, KIND: tl.constexpr):
    # reference._scaled
    if KIND == "llama":
        return (grad.to(tl.float32) * weight.to(tl.float32)).to(grad.dtype).to(tl.float32)
    else:
        return grad.to(tl.float32) * (weight.to(tl.float32) + 1.0)


@triton.jit
def norm_squares_kernel(x_ptr, out_ptr, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    # reference.squares
    r, c, inside = _tile(rows, cols, ROWS, COLS)
    x = tl.load(x_ptr + r * stride + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + r * cols + c, x * x, mask=inside)


@triton.jit
def norm_values_kernel(
    x_ptr,
    rstd_ptr,
    weight_ptr,
    out_ptr,
    rows,
    cols,
    stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    # reference.normalize
    r, c, inside = _tile(rows, cols, ROWS, COLS)
    x = tl.load(x_ptr + r * stride + c, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
    scaled = x.to(tl.float32) * rstd
    if KIND == "llama":
        scaled = scaled.to(x.dtype).to(tl.float32) * weight
    else:
        scaled = scaled * (weight + 1.0)
    tl.store(out_ptr + r * cols + c, scaled.to(x.dtype), mask=inside)


@triton.jit
def norm_terms_kernel(
    grad_ptr, x_ptr, rstd_ptr, weight_ptr, out_ptr, of_weight_ptr, rows, cols, grad_stride,
    stride, KIND: tl.constexpr, OF_WEIGHT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # reference.gradient_terms
    r, c, inside = _tile(rows, cols, ROWS, COLS)
    grad = tl.load(grad_ptr + r * grad_stride + c, mask=inside, other=0.0)
    x = tl.load(x_ptr + r * stride + c, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < cols, other=0.0)
    values = x.to(tl.float32)
    tl.store(out_ptr + r * cols + c, _scaled(grad, weight, KIND) * values, mask=inside)
    if OF_WEIGHT:
        scaled = values * tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
        if KIND == "llama":
            scaled = scaled.to(x.dtype).to(tl.float32)
        terms = grad.to(tl.float32) * scaled
        of_weight = of_weight_ptr + r * cols + c
        tl.store(of_weight, terms.to(of_weight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_input_kernel(
    grad_ptr, x_ptr, rstd_ptr, of_mean_ptr, weight_ptr, out_ptr, rows, cols, grad_stride, stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # reference.input_gradient
    r, c, inside = _tile(rows, cols, ROWS, COLS)
    grad = tl.load(grad_ptr + r * grad_stride + c, mask=inside, other=0.0)
    x = tl.load(x_ptr + r * stride + c, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < cols, other=0.0)
    rstd = tl.load(rstd_ptr + r, mask=r < rows, other=0.0)
    of_mean = tl.load(of_mean_ptr + r, mask=r < rows, other=0.0)
    dx = _scaled(grad, weight, KIND) * rstd + of_mean * (x.to(tl.float32) * 2.0)
    tl.store(out_ptr + r * cols + c, dx.to(x.dtype), mask=inside)


def _launch(kernel: object, args: tuple[object, ...], x: Tensor, **constants: object) -> None:
    rows, cols = x.shape
    tiles = ceil_div(rows, _TILE["ROWS"]) * ceil_div(cols, _TILE["COLS"])
    Launch(kernel, (tiles,), args, {**constants, **_TILE}, _OPTIONS)()


def squares(x: Tensor) -> Tensor:
    """See :func:`~.reference.squares`; x ``[T, K]`` with rows of unit stride."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch(norm_squares_kernel, (x, out, *x.shape, x.stride(0)), x)
    return out


def normalize(x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """See :func:`~.reference.normalize`; x ``[T, K]`` with rows of unit stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    args = x, rstd, weight, out, *x.shape, x.stride(0)
    _launch(norm_values_kernel, args, x, KIND=kind)
    return out


def gradient_terms(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """See :func:`~.reference.gradient_terms`; ``[T, K]`` with rows of unit stride."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dtype = x.dtype if kind == "llama" else torch.float32
    terms = torch.empty(x.shape, dtype=dtype, device=x.device) if of_weight else None
    _launch(
        norm_terms_kernel,
        (
            grad,
            x,
            rstd,
            weight,
            out,
            out if terms is None else terms,
            *x.shape,
            grad.stride(0),
            x.stride(0),
        ),
        x,
        KIND=kind,
        OF_WEIGHT=of_weight,
    )
    return out, terms


def input_gradient(
    grad: Tensor, x: Tensor, rstd: Tensor, of_mean: Tensor, weight: Tensor, kind: NormKind
) -> Tensor:
    """See :func:`~.reference.input_gradient`; ``[T, K]`` with rows of unit stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    args = grad, x, rstd, of_mean, weight, out, *x.shape, grad.stride(0), x.stride(0)
    _launch(norm_input_kernel, args, x, KIND=kind)
    return out
