"""The specification of every op, in plain torch: any device, bit for bit, and the CPU backend.

Notation: a *rowwise* cast of ``x[M, K]`` has 1x128 blocks along K; the *columnwise* cast is the
rowwise cast of ``x.t()``, data written ``[K, M]`` contiguous. Value = data * scale.

Formulas follow DeepSeek-V3 (arXiv:2412.19437, section 3.3): scale = amax / 448 per block, and GEMMs
that promote the partial product of every 128 of K to fp32 before scaling it into the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layouts import (
    BLOCK,
    Form,
    empty_rowwise_form,
    empty_square_form,
    num_blocks,
    rows_per_scale,
)

E4M3_MAX = 448.0
"""Largest finite e4m3 value."""


def scale_from_amax(amax: Tensor, power_of_two: bool) -> Tensor:
    """The fp32 scale of a block from its fp32 ``amax`` (any shape).

    ``amax / 448``, rounded to nearest, or that rounded up to a power of two, never below 2^-126.
    A zero block (or an amax so small that the quotient underflows) gets scale 1; an Inf block gets
    Inf; a NaN block gets the canonical quiet NaN.
    """
    # Divide by a tensor: on CUDA, tensor / python-scalar multiplies by the rounded reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    if power_of_two:
        rounded_up = (scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000
        scale = torch.where(scale.isfinite(), rounded_up.view(torch.float32), scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.where(scale.isnan(), torch.full_like(scale, float("nan")), scale)


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 to e4m3: round to nearest even, saturating at ±448; every NaN becomes byte 0x7F."""
    x = x.nan_to_num(nan=float("nan"), posinf=E4M3_MAX, neginf=-E4M3_MAX)  # one sign of NaN
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _whole_blocks(x: Tensor, more_rows: int) -> Tensor:
    """``x`` in fp32, contiguous, columns zero-padded to whole blocks, rows by ``more_rows``."""
    more_cols = -x.shape[-1] % BLOCK
    if more_rows or more_cols:
        return F.pad(x.float(), (0, more_cols, 0, more_rows))
    return x.float().contiguous()


def _filled(form: Form, data: Tensor, scale: Tensor) -> Form:
    form[0].copy_(data)
    form[1].copy_(scale)
    return form


def quantize_rowwise(x: Tensor, power_of_two: bool) -> Form:
    """Cast ``x[M, K]`` in 1x128 blocks: data e4m3 ``[M, K]``, scale fp32 ``[M, ceil(K/128)]``."""
    m, k = x.shape
    blocks = _whole_blocks(x, 0).view(m, num_blocks(k), BLOCK)  # [M, K/128, 128]
    scale = scale_from_amax(blocks.abs().amax(-1), power_of_two)  # [M, K/128]
    data = to_e4m3(blocks / scale.unsqueeze(-1)).flatten(1)[:, :k]
    return _filled(empty_rowwise_form(m, k, x.device), data, scale)


def quantize_columnwise(x: Tensor, power_of_two: bool) -> Form:
    """Cast ``x[M, K]`` in 128x1 blocks: data ``[K, M]`` contiguous, scale ``[K, ceil(M/128)]``."""
    return quantize_rowwise(x.t(), power_of_two)


def quantize_both(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rowwise data and scale, then columnwise data and scale, of ``x[M, K]``."""
    return *quantize_rowwise(x, power_of_two), *quantize_columnwise(x, power_of_two)


def quantize_square(x: Tensor, power_of_two: bool) -> Form:
    """Cast ``x[..., N, K]`` in 128x128 blocks: data alike, scale ``[..., N/128, K/128]`` (ceil)."""
    *lead, n, k = x.shape
    padded = _whole_blocks(x, -n % BLOCK)
    blocks = padded.view(*lead, num_blocks(n), BLOCK, num_blocks(k), BLOCK)
    scale = scale_from_amax(blocks.abs().amax((-3, -1)), power_of_two)  # [..., N/128, K/128]
    data = to_e4m3(blocks / scale[..., :, None, :, None]).view(padded.shape)[..., :n, :k]
    return _filled(empty_square_form(x.shape, x.device), data, scale)


def transpose_square(data: Tensor, scale: Tensor) -> Form:
    """Exact transpose of a 128x128 cast: bytes ``[..., N, K]`` to ``[..., K, N]``, scales too."""
    flipped = data.transpose(-1, -2)
    form = empty_square_form(flipped.shape, data.device)
    return _filled(form, flipped, scale.transpose(-1, -2))


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale`` in fp32, rounded to ``dtype``; 1x128 or 128x128 by the scale's shape."""
    rows, cols = data.shape[-2:]
    expanded = scale.repeat_interleave(BLOCK, -1)[..., :cols]
    if rows_per_scale(rows, scale) == BLOCK:
        expanded = expanded.repeat_interleave(BLOCK, -2)[..., :rows, :]
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    return out.copy_(data.float() * expanded)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``out[M, N] = A[M, K] B[N, K]^T``: each 128 of K in fp32, scaled, then summed in fp32.

    Scales are 1x128 ``[rows, K/128]`` or 128x128 ``[rows/128, K/128]`` for either operand, told
    apart by shape. ``bias`` ``[N]`` joins the fp32 sum before the one rounding to ``out_dtype``.
    """
    return _gemm_fp32(a, a_scale, b, b_scale, bias).to(out_dtype)


def gemm_add_(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """``out[M, N] += A B^T`` with the product summed in fp32 first; ``out`` is fp32."""
    out += _gemm_fp32(a, a_scale, b, b_scale, None)


def _gemm_fp32(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    row_scale = a_scale.repeat_interleave(rows_per_scale(m, a_scale), 0)[:m]  # [M, K/128]
    col_scale = b_scale.repeat_interleave(rows_per_scale(n, b_scale), 0)[:n]  # [N, K/128]
    a_wide, b_wide = a.float(), b.float()
    acc = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    for block in range(num_blocks(k)):
        inside = slice(block * BLOCK, (block + 1) * BLOCK)
        with torch.autocast(a.device.type, enabled=False):  # the caller's would round to bf16
            partial = a_wide[:, inside] @ b_wide[:, inside].t()  # [M, N]
        partial *= row_scale[:, block, None]
        acc.addcmul_(partial, col_scale[:, block])
    return acc if bias is None else acc.add_(bias.float())


def _blocks_of_part(x: Tensor, row: int, col: int) -> Tensor:
    """``x[..., R, C]`` in fp32 as ``[..., blocks, 128, blocks, 128]``, zeros where it is not."""
    rows, cols = row + x.shape[-2], col + x.shape[-1]
    padded = F.pad(x.float(), (col, -cols % BLOCK, row, -rows % BLOCK))
    return padded.view(*x.shape[:-2], num_blocks(rows), BLOCK, num_blocks(cols), BLOCK)


def part_amax(x: Tensor, row: int, col: int) -> Tensor:
    """The amax of the 128x128 blocks that ``x[..., R, C]``, a part of a larger matrix, lies in.

    Its first element is ``row`` rows and ``col`` columns into its first block. fp32, a row a block
    row; NaN where a block holds one.
    """
    return _blocks_of_part(x, row, col).abs().amax((-3, -1))


def quantize_part(x: Tensor, amax: Tensor, power_of_two: bool, row: int, col: int) -> Tensor:
    """Cast a part of a matrix as the whole matrix would be, given the ``amax`` of whole blocks.

    Args:
        x, row, col: as in :func:`part_amax`.
        amax: of the blocks that ``x`` lies in, over all parts; the shape that part_amax gives.
        power_of_two: how scales are rounded.

    Returns:
        e4m3 ``[..., R, C]``: the bytes that :func:`quantize_square` of the whole gives there.
    """
    blocks = _blocks_of_part(x, row, col)
    scale = scale_from_amax(amax, power_of_two)[..., :, None, :, None]
    data = to_e4m3(blocks / scale).flatten(-2).flatten(-3, -2)
    inside = data[..., row : row + x.shape[-2], col : col + x.shape[-1]]
    return inside.clone(memory_format=torch.contiguous_format)
