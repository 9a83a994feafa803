"""Derive the columnwise form of tokens from rowwise bytes: the Triton kernel and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, BlockFormat, Quantized, num_blocks
from ..runtime.launch import Launch, Rows
from ..scale_layouts import empty_columnwise, laid_out
from .groups import blocks_of, padded_groups, rows_of_block
from .numerics import INF_BITS, divisor, is_wide, magnitude_bits, scale_from_bits

NAN_BITS = tl.constexpr(0x7FC00000)
TWO_127 = tl.constexpr(2.0**127)
TWO_20 = tl.constexpr(2.0**20)
TWO_15 = tl.constexpr(2.0**15)


@triton.jit
def _known(amax_bits):
    # NaN for a block with a value that fp32 does not hold
    return tl.where(amax_bits < INF_BITS, amax_bits, NAN_BITS)


@triton.jit
def _block(tile_m, rows, columns, offs_ptr, groups, GROUPS: tl.constexpr):
    # The first row of a block, the rows that it has, and the columns to write of their transpose
    if GROUPS:
        first, rows_left, has_group, _ = rows_of_block(tile_m, offs_ptr, groups, rows, GROUPS)
        col_left = tl.where(has_group & (tile_m * 128 < columns), 128, 0)
        return first.to(tl.int64), rows_left, col_left
    else:
        return tile_m.to(tl.int64) * 128, rows - tile_m * 128, columns - tile_m * 128


@triton.jit(do_not_specialize=["rows", "scale_ld", "col_scale_ld", "blocks_k", "groups", "columns"])
def columnwise_kernel(
    data_ptr, scale_ptr, col_ptr, col_scale_ptr, rows, cols, stride_m, scale_ld, out_ld,
    col_scale_ld, blocks_k, offs_ptr, groups, columns, SQUARE: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # One program reads the bytes [128, 128] of a block of rows, and writes their columnwise form.
    # Arguments are as in cast_1x128_kernel.
    tile = tl.program_id(0)
    tile_m = tile // blocks_k
    tile_k = tile % blocks_k
    m = tl.arange(0, 128)
    k = tl.arange(0, 128)
    if WIDE:  # offsets inside a tile pass 2^31
        m = m.to(tl.int64)
    col_m = tile_m.to(tl.int64) * 128
    first_m, rows_left, col_left = _block(tile_m, rows, columns, offs_ptr, groups, GROUPS)
    if GROUPS:
        if col_left == 0:
            return
    cols_left = cols - tile_k * 128
    first_k = tile_k.to(tl.int64) * 128
    source = data_ptr + first_m * stride_m + first_k + (m[:, None] * stride_m + k[None, :])
    scales = scale_ptr + tile_k.to(tl.int64) * scale_ld + first_m + m
    if EVEN:
        data = tl.load(source)
        scale = tl.load(scales)
    else:
        inside = (m < rows_left)[:, None] & (k < cols_left)[None, :]
        data = tl.load(source, mask=inside, other=0)
        scale = tl.load(scales, mask=m < rows_left, other=1.0)

    x = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if SQUARE:  # magnitudes of bytes are ordered like numbers, with NaN above all
        largest = tl.max(data & 0x7F, 1).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        amax = _known(tl.max(magnitude_bits(largest.to(tl.float32) * scale), 0))
        col_scale = scale_from_bits(amax, "corrected", True)
        place = col_scale_ptr + tile_k.to(tl.int64) * col_scale_ld + tile_m
        tl.store(place, col_scale, mask=col_left > 0)
        _, r, _ = divisor(amax, col_scale, "corrected", True)
        shift = scale * r
        # of zeros: finite, so that they stay zeros
        q = x * tl.where(shift > TWO_127, TWO_127, shift)[:, None]
    else:
        x = x * scale[:, None]
        amax = _known(tl.max(magnitude_bits(x), 0))
        col_scale = scale_from_bits(amax, "corrected", True)  # [128]
        tl.store(
            col_scale_ptr + tile_m.to(tl.int64) * col_scale_ld + first_k + k,
            col_scale,
            mask=k < cols_left,
        )
        _, r, _ = divisor(amax, col_scale, "corrected", True)
        q = x * r[None, :]
    q = q.to(tl.float8e4nv)
    target = col_ptr + first_k * out_ld + col_m + (k.to(tl.int64)[:, None] * out_ld + m[None, :])
    if EVEN:
        tl.store(target, tl.trans(q))
    else:
        tl.store(target, tl.trans(q), mask=(k < cols_left)[:, None] & (m < col_left)[None, :])


@triton.jit
def _words(ptr, row, word, stride_m, rows_left, words_left, EVEN: tl.constexpr):
    source = ptr + (row[:, None] * stride_m + word[None, :])
    if EVEN:
        return tl.load(source)
    else:
        return tl.load(
            source, mask=(row < rows_left)[:, None] & (word < words_left)[None, :], other=0
        )


@triton.jit
def _larger_halves(a, b):
    return tl.inline_asm_elementwise(
        "{max.u16x2 $0, $1, $2;}", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _largest_of_rows(words, scale):
    # Bits of the largest magnitude of each row; bytes are ordered like numbers, with NaN above all
    pairs = _larger_halves(words & 0x007F007F, (words & 0x7F007F00) >> 8)
    largest = tl.max(tl.maximum(pairs & 0x7F, pairs >> 16), 1).to(tl.int8)
    return magnitude_bits(largest.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale)


@triton.jit
def _pair(x):
    # x in fp16, in both halves of a word
    half = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return half | (half << 16)


@triton.jit
def _times(words, factor):
    # Words of e4m3 numbers, multiplied by a power of two for each row. A factor above 1 is of a row
    # of small numbers, at most 448 times 2^9 unless all are zeros; fp16 holds it in two factors.
    # Products are exact in fp16 but for those that round to zero.
    factor = tl.where(factor > TWO_20, TWO_20, factor)
    first = tl.where(factor > TWO_15, TWO_15, factor)
    second = tl.where(factor > TWO_15, factor * 2.0**-15, 1.0)
    return tl.inline_asm_elementwise(
        """{.reg .b16 a, b; .reg .b32 low, high;
        mov.b32 {a, b}, $1;
        cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b;
        mul.rn.f16x2 low, low, $2; mul.rn.f16x2 high, high, $2;
        mul.rn.f16x2 low, low, $3; mul.rn.f16x2 high, high, $3;
        cvt.rn.satfinite.e4m3x2.f16x2 a, low; cvt.rn.satfinite.e4m3x2.f16x2 b, high;
        mov.b32 $0, {a, b};}""",
        "=r,r,r,r",
        [words, _pair(first)[:, None], _pair(second)[:, None]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _permuted(a, b, SELECTOR: tl.constexpr):
    # Four of the eight bytes of two words
    return tl.inline_asm_elementwise(
        "{prmt.b32 $0, $1, $2, " + SELECTOR + ";}",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _column(words, C: tl.constexpr):
    # The fp32 values of one of the four bytes of each word
    if C < 2:
        pairs = tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a;}",
            "=r,r",
            [words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        pairs = tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, b;}",
            "=r,r",
            [words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    half = (pairs >> (16 * (C % 2))).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _packed(x0, x1, x2, x3):
    # Four fp32 numbers, rounded to the bytes of a word
    return tl.inline_asm_elementwise(
        """{.reg .b16 a, b; .reg .f32 x, y, z, w;
        mov.b32 x, $1; mov.b32 y, $2; mov.b32 z, $3; mov.b32 w, $4;
        cvt.rn.satfinite.e4m3x2.f32 a, y, x; cvt.rn.satfinite.e4m3x2.f32 b, w, z;
        mov.b32 $0, {a, b};}""",
        "=r,r,r,r,r",
        [
            x0.to(tl.int32, bitcast=True),
            x1.to(tl.int32, bitcast=True),
            x2.to(tl.int32, bitcast=True),
            x3.to(tl.int32, bitcast=True),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows", "scale_ld", "col_scale_ld", "blocks_k", "groups", "columns"])
def words_kernel(
    data_ptr, scale_ptr, col_ptr, col_scale_ptr, rows, words, stride_m, scale_ld, out_ld,
    col_scale_ld, blocks_k, offs_ptr, groups, columns, SQUARE: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # columnwise_kernel for bytes in whole words. `words`, `stride_m` and `out_ld` count words. Rows
    # 4i to 4i+3 are four tensors, so that a thread holds the same columns of all, and a word of
    # four rows of one column is made of its own words.
    tile = tl.program_id(0)
    tile_m = tile // blocks_k
    tile_k = tile % blocks_k
    i = tl.arange(0, 32)
    w = tl.arange(0, 32)
    m = i * 4
    first_m, rows_left, col_left = _block(tile_m, rows, columns, offs_ptr, groups, GROUPS)
    if GROUPS:
        if col_left == 0:
            return
    words_left = words - tile_k * 32
    if WIDE:
        m = m.to(tl.int64)
    source = data_ptr + first_m * stride_m + tile_k.to(tl.int64) * 32
    scales = scale_ptr + tile_k.to(tl.int64) * scale_ld + first_m
    x0 = _words(source, m, w, stride_m, rows_left, words_left, EVEN)
    x1 = _words(source, m + 1, w, stride_m, rows_left, words_left, EVEN)
    x2 = _words(source, m + 2, w, stride_m, rows_left, words_left, EVEN)
    x3 = _words(source, m + 3, w, stride_m, rows_left, words_left, EVEN)
    s0 = tl.load(scales + m, mask=m < rows_left, other=1.0)
    s1 = tl.load(scales + m + 1, mask=m + 1 < rows_left, other=1.0)
    s2 = tl.load(scales + m + 2, mask=m + 2 < rows_left, other=1.0)
    s3 = tl.load(scales + m + 3, mask=m + 3 < rows_left, other=1.0)

    target = col_ptr + (tile_k.to(tl.int64) * 128 + w.to(tl.int64)[:, None] * 4) * out_ld
    target += tile_m.to(tl.int64) * 32 + i[None, :]
    inside = (w < words_left)[:, None] & (i * 4 < col_left)[None, :]
    if SQUARE:
        bits = tl.maximum(
            tl.maximum(_largest_of_rows(x0, s0), _largest_of_rows(x1, s1)),
            tl.maximum(_largest_of_rows(x2, s2), _largest_of_rows(x3, s3)),
        )
        amax = _known(tl.max(bits, 0))
        col_scale = scale_from_bits(amax, "corrected", True)
        place = col_scale_ptr + tile_k.to(tl.int64) * col_scale_ld + tile_m
        tl.store(place, col_scale, mask=col_left > 0)
        _, r, _ = divisor(amax, col_scale, "corrected", True)
        q0, q1 = _times(x0, s0 * r), _times(x1, s1 * r)
        q2, q3 = _times(x2, s2 * r), _times(x3, s3 * r)
        low_a, high_a = _permuted(q0, q1, "0x5140"), _permuted(q0, q1, "0x7362")
        low_b, high_b = _permuted(q2, q3, "0x5140"), _permuted(q2, q3, "0x7362")
        _store(target, _permuted(low_a, low_b, "0x5410"), inside, EVEN)
        _store(target + out_ld, _permuted(low_a, low_b, "0x7632"), inside, EVEN)
        _store(target + 2 * out_ld, _permuted(high_a, high_b, "0x5410"), inside, EVEN)
        _store(target + 3 * out_ld, _permuted(high_a, high_b, "0x7632"), inside, EVEN)
    else:
        place = col_scale_ptr + tile_m.to(tl.int64) * col_scale_ld + tile_k.to(tl.int64) * 128
        for C in tl.static_range(4):
            y0, y1 = _column(x0, C) * s0[:, None], _column(x1, C) * s1[:, None]
            y2, y3 = _column(x2, C) * s2[:, None], _column(x3, C) * s3[:, None]
            bits = tl.maximum(
                tl.maximum(magnitude_bits(y0), magnitude_bits(y1)),
                tl.maximum(magnitude_bits(y2), magnitude_bits(y3)),
            )
            amax = _known(tl.max(bits, 0))  # [32], of every fourth column
            col_scale = scale_from_bits(amax, "corrected", True)
            tl.store(place + w * 4 + C, col_scale, mask=w < words_left)
            _, r, _ = divisor(amax, col_scale, "corrected", True)
            r = r[None, :]
            _store(target + C * out_ld, _packed(y0 * r, y1 * r, y2 * r, y3 * r), inside, EVEN)


@triton.jit
def _store(target, words, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(target, tl.trans(words))
    else:
        tl.store(target, tl.trans(words), mask=inside)


def plan_columnwise_from_rowwise(
    x: Quantized, col: Quantized, offs: Tensor | None, tokens: int | None = None
) -> Launch:
    """Plan the launch that writes the columnwise form of ``x[M, K]`` into ``col``."""
    data, scale, _ = x
    m, k = data.shape
    if tokens is not None:
        m = tokens
    groups = 0 if offs is None else offs.shape[0]
    columns, square = col.data.shape[1], col.format.transposes
    in_words = not (k | data.stride(0) | data.data_ptr()) % 4
    kernel, unit, dtype = columnwise_kernel, 1, torch.int8
    if in_words:
        kernel, unit, dtype = words_kernel, 4, torch.int32
    return Launch(
        kernel,
        (blocks_of(data, groups, False) * num_blocks(k),),
        (data.view(dtype), scale, col.data.view(dtype) if in_words else col.data, col.scale,
         Rows(m), k // unit, data.stride(0) // unit, scale.stride(1), columns // unit,
         col.scale.stride(0 if square else 1), num_blocks(k), scale if offs is None else offs,
         groups, columns),
        {
            "SQUARE": square,
            "EVEN": offs is None and m % BLOCK == 0 and k % BLOCK == 0,
            "WIDE": is_wide(data.stride(0), columns),
            "GROUPS": padded_groups(groups),
        },
        {"num_warps": 4 if in_words else 8, "enable_fp_fusion": True},
    )  # fmt: skip


def columnwise_from_rowwise(
    x: Quantized,
    columnwise: BlockFormat,
    offs: Tensor | None = None,
    tokens: int | None = None,
) -> Quantized:
    """See :func:`blocktensor.ops.reference.columnwise_from_rowwise`."""
    if x.data.stride(1) != 1:
        x = x._replace(data=x.data.contiguous())
    if x.scale.stride(0) != 1:
        x = x._replace(scale=laid_out(*x).scale)
    col = empty_columnwise(x.data, columnwise, offs)
    plan_columnwise_from_rowwise(x, col, offs, tokens)()
    return col
