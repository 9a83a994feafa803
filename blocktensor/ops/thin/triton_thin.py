"""Thin matmuls in Triton: each reads its wide matrix once, in groups that the device finds."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cast.groups import padded_groups, rows_of_block
from ..formats import BLOCK, ceil_div, group_blocks
from ..runtime.launch import Launch, Rows
from .layout import empty_gradient, empty_operand

_FEW = 256
"""Blocks of 128 rows or columns below which tiles are smaller, so that all SMs read."""

_SMALL = 32
"""Rows or columns of a small tile."""

_SHORT = 64
"""The numbers that a large tile contracts at a time."""

_LEAST_RANK = 16
_TILE = 2048
"""Numbers of an operand that a program converts."""


# C is specialised: only if it is known to be a multiple of 16, masks leave loads of whole vectors.


@triton.jit(do_not_specialize=["experts", "rank", "vectors"])
def thin_operand_kernel(
    w_ptr, out_ptr, experts, C, rank, vectors, w_stride_e, w_stride_c, w_stride_r,
    RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Experts vary fastest: if they are contiguous in w, programs that run together share sectors.
    padded = vectors * 8
    expert = (tl.program_id(0) % experts).to(tl.int64)
    c = tl.program_id(0) // experts * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    place = c.to(tl.int64)[:, None] * w_stride_c + r[None, :] * w_stride_r
    inside = (c < C)[:, None] & (r < rank)[None, :]
    values = tl.load(w_ptr + expert * w_stride_e + place, mask=inside, other=0.0)
    place = (expert * C + c)[:, None] * padded + r[None, :]
    inside = (c < C)[:, None] & (r < padded)[None, :]
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scaling_bits", "tokens", "groups", "vectors"])
def thin_rows_kernel(
    x_ptr, thin_ptr, out_ptr, offs_ptr, scaling_bits, tokens, C, groups, x_stride_t, x_stride_c,
    vectors, GROUPS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A tile has rows of one block: of 128 rows of one group, or of none, which are zeros.
    tiles: tl.constexpr = 128 // ROWS
    first, left, has_group, group = rows_of_block(
        tl.program_id(0) // tiles, offs_ptr, groups, tokens, GROUPS
    )
    within = tl.program_id(0) % tiles * ROWS
    first += within
    left -= within
    if left <= 0:
        return
    R = vectors * 8
    rows = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    at = (first + tl.minimum(rows, left - 1)).to(tl.int64)
    x_ptrs = x_ptr + at[:, None] * x_stride_t + c.to(tl.int64)[None, :] * x_stride_c
    thin_ptrs = thin_ptr + (group.to(tl.int64) * C + c)[:, None] * R + r[None, :]
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for done in range(0, tl.where(has_group, C, 0), COLUMNS):
        inside = c < C - done
        x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        thin = tl.load(thin_ptrs, mask=inside[:, None] & (r < R)[None, :], other=0.0)
        acc = tl.dot(x, thin, acc)
        x_ptrs += COLUMNS * x_stride_c
        thin_ptrs += COLUMNS * R
    acc *= scaling_bits.to(tl.float32, bitcast=True)
    place = (first + rows).to(tl.int64)[:, None] * R + r[None, :]
    inside = (rows < left)[:, None] & (r < R)[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "vectors", "rank", "tiles"])
def thin_products_kernel(
    wide_ptr, thin_ptr, out_ptr, offs_ptr, tokens, C, vectors, rank, tiles, wide_stride_t,
    wide_stride_c, out_stride_e, out_stride_c, out_stride_r, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_ENDS: tl.constexpr,
):  # fmt: skip
    # COLUMNS columns of one expert, over all rows of its group.
    R = vectors * 8
    expert = tl.program_id(0) // tiles
    begin = 0
    end = tokens
    if HAS_ENDS:
        end = tl.maximum(tl.minimum(tl.load(offs_ptr + expert), tokens), 0)
        begin = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
        begin = tl.maximum(tl.minimum(begin, end), 0)
    c = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    at = (begin + rows).to(tl.int64)
    # wide is read as its transpose
    wide_ptrs = wide_ptr + at[None, :] * wide_stride_t + c.to(tl.int64)[:, None] * wide_stride_c
    thin_ptrs = thin_ptr + at[:, None] * R + r[None, :]
    acc = tl.zeros((COLUMNS, RANK), tl.float32)
    for done in range(begin, end, ROWS):
        inside = rows < end - done
        wide = tl.load(wide_ptrs, mask=(c < C)[:, None] & inside[None, :], other=0.0)
        thin = tl.load(thin_ptrs, mask=inside[:, None] & (r < R)[None, :], other=0.0)
        acc = tl.dot(wide, thin, acc)
        wide_ptrs += tl.cast(ROWS, tl.int64) * wide_stride_t
        thin_ptrs += ROWS * R
    place = c.to(tl.int64)[:, None] * out_stride_c + r[None, :] * out_stride_r
    inside = (c < C)[:, None] & (r < rank)[None, :]
    target = out_ptr + tl.cast(expert, tl.int64) * out_stride_e + place
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


def _options(width: int) -> dict[str, Any]:
    return {"num_warps": 4 if width < 64 else 8, "num_stages": 4, "enable_fp_fusion": True}


def _vectors(thin: Tensor) -> int:
    """Return the number of 16-byte vectors in a row of a thin matrix."""
    return thin.shape[-1] // 8


def _long(width: int) -> int:
    """Return the numbers that a small tile contracts at a time, as many as shared memory holds."""
    return 256 if width <= 32 else 128


def _width(rank: int) -> int:
    """Return the columns of a tile for ``rank``, at least the least that tensor cores take."""
    return max(_LEAST_RANK, triton.next_power_of_2(rank))


def plan_operand(w: Tensor, out: Tensor) -> Launch:
    """Plan the launch of ``out[E, C, R] = w[E, C, r]``."""
    experts, c, rank = w.shape
    width = _width(out.shape[2])
    columns = max(16, _TILE // width)
    return Launch(
        thin_operand_kernel,
        (experts * ceil_div(c, columns),),
        (w, out, experts, c, rank, _vectors(out), *w.stride()),
        {"RANK": width, "COLUMNS": columns},
        _options(width),
    )


def plan_rows(x: Tensor, thin: Tensor, offs: Tensor | None, scaling: float, out: Tensor) -> Launch:
    """Plan the launch of ``out[T, R] = scaling * x[T, C] thin[e, C, R]``."""
    experts, c, rank = thin.shape
    width = _width(rank)
    (bits,) = struct.unpack("i", struct.pack("f", scaling))  # recordings pass integers alone
    groups = 0 if offs is None else experts
    blocks = group_blocks(len(x), groups and groups + 1)
    rows, columns = (BLOCK, _SHORT) if blocks >= _FEW else (_SMALL, _long(width))
    return Launch(
        thin_rows_kernel,
        (blocks * BLOCK // rows,),
        (x, thin, out, out if offs is None else offs, bits, Rows(len(out)), c, groups, *x.stride(),
         _vectors(out)),
        {"GROUPS": padded_groups(groups), "RANK": width, "ROWS": rows, "COLUMNS": columns},
        _options(width),
        sized=(out,),
    )  # fmt: skip


def plan_products(wide: Tensor, thin: Tensor, offs: Tensor | None, out: Tensor) -> Launch:
    """Plan the launch of ``out[E, C, r] = wide[T, C]^T thin[T, R]`` over the rows of each group."""
    experts, c, rank = out.shape
    width = _width(thin.shape[1])
    is_many = experts * ceil_div(c, BLOCK) >= _FEW
    rows, columns = (_SHORT, BLOCK) if is_many else (_long(width), _SMALL)
    tiles = ceil_div(c, columns)
    return Launch(
        thin_products_kernel,
        (experts * tiles,),
        (wide, thin, out, out if offs is None else offs, Rows(len(wide)), c, _vectors(thin), rank,
         tiles, *wide.stride(), *out.stride()),
        {"RANK": width, "ROWS": rows, "COLUMNS": columns, "HAS_ENDS": offs is not None},
        _options(width),
    )  # fmt: skip


def thin_operand(w: Tensor, dtype: torch.dtype) -> Tensor:
    """See :func:`.reference.thin_operand`."""
    out = empty_operand(w, dtype)
    plan_operand(w, out)()
    return out


def thin_rows(x: Tensor, thin: Tensor, offs: Tensor | None, scaling: float) -> Tensor:
    """See :func:`.reference.thin_rows`."""
    out = torch.empty((x.shape[0], thin.shape[2]), dtype=x.dtype, device=x.device)
    plan_rows(x, thin, offs, scaling, out)()
    return out


def thin_products(
    wide: Tensor, thin: Tensor, offs: Tensor | None, rank: int, dtype: torch.dtype, order: str
) -> Tensor:
    """See :func:`.reference.thin_products`."""
    out = empty_gradient(wide, offs, rank, dtype, order)
    plan_products(wide, thin, offs, out)()
    return out
