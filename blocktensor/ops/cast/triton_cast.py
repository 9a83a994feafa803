"""Cast to e4m3: the Triton kernel for 1x128 blocks, and the launchers of all casts.

Every launcher has the signature and, byte for byte, the result of its namesake in
``ops/reference.py``. Inputs may have any strides; outputs are laid out by ``ops/scale_layouts.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import (
    BLOCK,
    ROW_STEP,
    BlockFormat,
    Quantized,
    ceil_div,
    num_blocks,
    padded_rows,
)
from ..runtime.launch import Launch, Rows
from ..scale_layouts import empty_quantized
from .groups import Casts, blocks_of, padded_groups, rows_of_block
from .numerics import divisor, is_wide, magnitude_bits, method_for, quotient, scale_from_bits
from .producer import NONE, Producer
from .triton_128x128 import plan_128x128


@triton.jit
def _more(ptr, stride_m, first_m, first_k, m, k, inside, EVEN: tl.constexpr):
    # The tile of another tensor, whose rows have unit stride
    source = ptr + first_m * stride_m + first_k + (m[:, None] * stride_m + k[None, :])
    if EVEN:
        return tl.load(source)
    else:
        return tl.load(source, mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=["rows", "row_scale_ld", "col_scale_ld", "blocks_k", "groups", "columns"]
)
def cast_1x128_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, rows, cols, stride_m, stride_k, out_ld,
    row_scale_ld, col_scale_ld, blocks_k, offs_ptr, groups, columns,
    y_ptr, z_ptr, y_stride_m, z_stride_m, row_ptr_1, row_scale_ptr_1, col_ptr_1, col_scale_ptr_1,
    TILE_M: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SQUARE: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, POWER_OF_TWO: tl.constexpr, METHOD: tl.constexpr,
    GROUPS: tl.constexpr, COMPUTE: tl.constexpr, DETAIL: tl.constexpr,
    SOURCES: tl.constexpr, PARTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    # One program casts a tile [TILE_M, 128], read once, along either or both directions. A
    # columnwise cast needs TILE_M = 128 (a whole block). Its columns from the rows of x up to
    # `columns` are zeros. With SQUARE, the tile is one block of the columnwise form; col_scale_ld
    # is the distance of neighbours along K then, else along M. out_ld = columns, a separate
    # argument so that its divisibility by 16 is specialised. With GROUPS, a block lies in one of
    # `groups` groups and fills one whole block of the columnwise form. With COMPUTE (producer.py),
    # the tile is computed from tiles of x, y and z, and the second of two PARTS has other outputs.
    tile = tl.program_id(0)
    part = 0
    if PARTS == 2:
        part = tile % 2
        tile = tile // 2
        if part == 1:
            row_ptr, row_scale_ptr = row_ptr_1, row_scale_ptr_1
            col_ptr, col_scale_ptr = col_ptr_1, col_scale_ptr_1
    tile_m = tile // blocks_k
    tile_k = tile % blocks_k
    m = tl.arange(0, TILE_M)
    k = tl.arange(0, 128)
    if WIDE:  # offsets inside a tile pass 2^31
        m = m.to(tl.int64)
        k = k.to(tl.int64)
    col_m = tile_m.to(tl.int64) * TILE_M
    if GROUPS:
        first_m, rows_left, has_group, _ = rows_of_block(tile_m, offs_ptr, groups, rows, GROUPS)
        first_m = first_m.to(tl.int64)
        col_left = tl.where(has_group & (tile_m * TILE_M < columns), 128, 0)
    else:
        first_m = col_m
        rows_left = rows - tile_m * TILE_M
        col_left = columns - tile_m * TILE_M
    cols_left = cols - tile_k * 128
    inside = (m < rows_left)[:, None] & (k < cols_left)[None, :]
    first_k = tile_k.to(tl.int64) * 128

    source = x_ptr + first_m * stride_m + first_k * stride_k
    offsets = m[:, None] * stride_m + k[None, :] * stride_k
    if EVEN:
        x = tl.load(source + offsets)
    else:
        x = tl.load(source + offsets, mask=inside, other=0.0)
    if COMPUTE is not None:
        y, z = x, x
        if SOURCES > 1:
            y = _more(y_ptr, y_stride_m, first_m, first_k, m, k, inside, EVEN)
        if SOURCES > 2:  # of part 0 alone
            z = _more(z_ptr, z_stride_m, first_m, first_k, m, k, inside & (part == 0), False)
        x = COMPUTE(x, y, z, part, DETAIL, x_ptr.dtype.element_ty)
    bits = magnitude_bits(x)
    x = x.to(tl.float32)

    if ROWWISE or SQUARE:
        row_amax = tl.max(bits, 1)
    if ROWWISE:
        scale = scale_from_bits(row_amax, METHOD, POWER_OF_TWO)  # [TILE_M]
        tl.store(
            row_scale_ptr + tile_k.to(tl.int64) * row_scale_ld + first_m + m,
            scale,
            mask=m < rows_left,
        )
        pre, r, e = divisor(row_amax, scale, METHOD, POWER_OF_TWO)
        q = quotient(x, pre[:, None], r[:, None], e[:, None], METHOD, POWER_OF_TWO)
        q = q.to(tl.float8e4nv)
        row_ld = cols * WIDTHS
        target = row_ptr + first_m * row_ld + first_k + (m[:, None] * row_ld + k[None, :])
        if EVEN:
            tl.store(target, q)
        else:
            tl.store(target, q, mask=inside)
    if COLUMNWISE:
        if SQUARE:
            amax = tl.max(row_amax, 0)
            scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
            place = col_scale_ptr + tile_k.to(tl.int64) * col_scale_ld + tile_m
            tl.store(place, scale, mask=col_left > 0)
            pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
            q = quotient(x, pre, r, e, METHOD, POWER_OF_TWO)
        else:
            amax = tl.max(bits, 0)
            scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)  # [128]
            tl.store(
                col_scale_ptr + tile_m.to(tl.int64) * col_scale_ld + first_k + k,
                scale,
                mask=(k < cols_left) & (col_left > 0),
            )
            pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
            q = quotient(x, pre[None, :], r[None, :], e[None, :], METHOD, POWER_OF_TWO)
        q = q.to(tl.float8e4nv)
        target = col_ptr + first_k * out_ld + col_m + (k[:, None] * out_ld + m[None, :])
        if EVEN:
            tl.store(target, tl.trans(q))
        else:
            tl.store(target, tl.trans(q), mask=(k < cols_left)[:, None] & (m < col_left)[None, :])


def _vectorised(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.stride(-2) % 8 == 0


def is_awkward(x: Tensor) -> bool:
    """Return whether a tile of ``x`` is read in single elements or with 64-bit offsets."""
    return not _vectorised(x) or is_wide(*x.stride(), *x.shape)


def _warps_1x128(x: Tensor, columnwise: bool, grouped: bool, even: bool) -> int:
    if not columnwise:
        return 8 if even else 4
    # other tiles would spill registers
    if x.dtype != torch.float32:
        return 8 if grouped or _vectorised(x) else 16
    return 16 if grouped or x.stride(-1) == 1 else 32


def plan_1x128(
    x: Tensor,
    row: Quantized | None,
    col: Quantized | None,
    offs: Tensor | None = None,
    producer: Producer = NONE,
) -> Launch:
    """Plan the launch that casts ``x[M, K]`` into the outputs that are not None.

    With ``offs``, by groups. With ``producer``, cast what it computes from ``x``.
    """
    m, k = x.shape
    form = row or col
    assert form is not None
    groups = 0 if offs is None or col is None else offs.shape[0]  # rowwise blocks ignore groups
    tile_m = BLOCK if col else 32
    tiles_m = (
        blocks_of(x, groups, row is not None)
        if col
        else ceil_div(padded_rows(len(form.data)), tile_m)
    )
    columns = col.data.shape[1] if col else 0
    even = offs is None and m % max(tile_m, ROW_STEP) == 0 and k % BLOCK == 0
    (row_data, row_scale), (col_data, col_scale) = (
        (out[:2] if out else (x, x)) for out in (row, col)
    )
    blocks_k = num_blocks(k)
    square = col is not None and col.format.transposes
    strides_of_more = [y.stride(0) for y in producer.more]
    return Launch(
        cast_1x128_kernel,
        (tiles_m * blocks_k * producer.parts,),
        # two unit strides (K = 1) would make the compiler choose a layout that spills
        (x, row_data, row_scale, col_data, col_scale, Rows(m), k,
         x.stride(0), x.stride(1) * (k > 1), columns, row_scale.stride(1),
         col_scale.stride(0 if square else 1), blocks_k, x if offs is None else offs, groups,
         columns, *producer.arguments(x, (row_data, row_scale, col_data, col_scale))),
        {
            "TILE_M": tile_m,
            "ROWWISE": row is not None,
            "COLUMNWISE": col is not None,
            "SQUARE": square,
            "EVEN": even,
            "WIDE": is_wide(*x.stride(), *strides_of_more, columns, k * producer.widths),
            "POWER_OF_TWO": form.format.power_of_two,
            "METHOD": method_for(x.dtype),
            "GROUPS": padded_groups(groups),
            **producer.constants(),
        },
        {
            "num_warps": _warps_1x128(x, col is not None, offs is not None, even),
            "enable_fp_fusion": True,
        },
        sized=producer.sized(row) if offs is None else (),
    )  # fmt: skip


def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """See :func:`blocktensor.ops.reference.quantize_rowwise`."""
    out = empty_quantized(x.shape, format, x.device)
    (plan_1x128(x, out, None) if format.rows == 1 else plan_128x128(x, out, format))()
    return out


def _splits(x: Tensor, row: Quantized, col: Quantized, offs: Tensor | None) -> bool:
    # with scalar loads or 64-bit offsets, both casts of a tile would spill registers
    mixed = offs is None and row.format is not col.format
    return is_awkward(x) and (x.dtype == torch.float32 or mixed)


casts = Casts(plan_1x128, plan_1x128, _splits)
