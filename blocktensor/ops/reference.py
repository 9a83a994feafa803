"""Specify every op bit for bit in plain torch; also the backend for the CPU and other devices.

Notation: a *rowwise* cast of ``x[M, K]`` has its blocks along K; the *columnwise* cast is the
rowwise cast of ``x.t()``, data written ``[K, M]`` contiguous. Value = data * scale.

Formulas follow DeepSeek-V3 (arXiv:2412.19437, section 3.3): scale = amax / 448 per block, and GEMMs
that promote the partial product of every 128 of K to fp32 before scaling it into the sum.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import BLOCK, ROUNDINGS, BlockFormat, Quantized, ceil_div, group_columns, group_rows
from .scale_layouts import columnwise_width, empty_columnwise, empty_quantized


def largest(format: BlockFormat) -> float:
    """Return the largest finite number of a format's dtype; 448 for e4m3."""
    return torch.finfo(format.dtype).max


def scale_from_amax(amax: Tensor, format: BlockFormat) -> Tensor:
    """Return the fp32 scale of a block from its fp32 ``amax`` (any shape).

    It is ``amax / 448`` rounded to nearest, and then as the format says; a power of two is at least
    2^-126. A zero block (or an amax so small that the quotient underflows) gets scale 1; an Inf
    block gets Inf; a NaN block gets the canonical quiet NaN.
    """
    # Divide by a tensor: on CUDA, tensor / python-scalar multiplies by the rounded reciprocal.
    scale = amax / torch.full_like(amax, largest(format))
    if (round := ROUNDINGS[format.scale_rounding].round) is not None:
        scale = torch.where(scale.isfinite(), round(scale), scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.where(scale.isnan(), torch.full_like(scale, float("nan")), scale)


def to_data(x: Tensor, format: BlockFormat) -> Tensor:
    """Round fp32 to the data dtype, to nearest even, saturating; NaN becomes 0x7F in e4m3."""
    limit = largest(format)
    x = x.nan_to_num(nan=float("nan"), posinf=limit, neginf=-limit)  # the sign of NaN is dropped
    return x.clamp(-limit, limit).to(format.dtype)


def _in_blocks(x: Tensor, format: BlockFormat, row: int = 0, col: int = 0) -> Tensor:
    """Return ``x[..., R, C]`` in fp32 as ``[..., blocks, rows, blocks, cols]``, padded with zeros.

    Its first element is ``row`` rows and ``col`` columns into its first block. Its values are on
    the grid of the format, if there is one.
    """
    if format.mxfp4_group is not None:
        x = on_mxfp4_grid(x, format.mxfp4_group)
    rows, cols = row + x.shape[-2], col + x.shape[-1]
    more_rows, more_cols = -rows % format.rows, -cols % format.cols
    if row or col or more_rows or more_cols:
        wide = F.pad(x.float(), (col, more_cols, row, more_rows))
    else:
        wide = x.float().contiguous()
    n_rows, n_cols = ceil_div(rows, format.rows), ceil_div(cols, format.cols)
    return wide.view(*x.shape[:-2], n_rows, format.rows, n_cols, format.cols)


def _amax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax((-3, -1))


def _cast(
    blocks: Tensor, scale: Tensor, format: BlockFormat, x: Tensor, row: int = 0, col: int = 0
) -> Tensor:
    """Return the data of ``x``, which begins at ``row``, ``col`` in the padded ``blocks``."""
    data = to_data(blocks / scale[..., :, None, :, None], format)
    data = data.flatten(-2).flatten(-3, -2)
    return data[..., row : row + x.shape[-2], col : col + x.shape[-1]]


def mxfp4_scale(amax: Tensor) -> Tensor:
    """Return the scale of a group of MXFP4 from its fp32 ``amax`` (any shape).

    It is the smallest power of two, from 2^-127 to 2^125, of which ``amax`` is at most 6 times as
    much; with larger scales the number 6 would not be finite. gpt-oss's and DeepSeek-V4's
    quantizers round ``amax / 6`` up in the same way. The example of the OCP specification,
    ``2^(floor(log2(amax)) - 2)``, saturates numbers between 6 and 8 scales. A group with NaN or Inf
    gets NaN.
    """
    bits = amax.view(torch.int32)
    is_above = (bits & 0x7FFFFF) > 0x400000  # of 6 times a power of two
    exponent = ((bits >> 23) - 2 + is_above.int()).clamp(max=252)  # biased; subnormal below 1
    power = torch.where(exponent > 0, exponent << 23, torch.full_like(exponent, 1 << 22))
    nan = torch.full_like(amax, float("nan"))
    return torch.where(amax.isfinite(), power.view(torch.float32), nan)


def on_mxfp4_grid(x: Tensor, group: tuple[int, int]) -> Tensor:
    """Return ``x[..., R, C]`` in fp32, rounded to the grid of MXFP4.

    Groups of ``group`` rows and columns share a scale, :func:`mxfp4_scale`. Numbers are rounded to
    the nearest e2m1 number times it, to even at ties; zeros keep their sign. Groups at the edges
    may be smaller. A group with NaN or Inf is NaN throughout. Values on the grid of any scales do
    not change.
    """
    rows, cols = x.shape[-2:]
    wide = F.pad(x.float(), (0, -cols % group[1], 0, -rows % group[0]))
    shape = ceil_div(rows, group[0]), group[0], ceil_div(cols, group[1]), group[1]
    groups = wide.view(*x.shape[:-2], *shape)
    scale = mxfp4_scale(_amax(groups))[..., :, None, :, None]
    numbers = (groups / scale).abs().clamp(max=6)
    step = torch.where(numbers < 2, 0.5, torch.where(numbers < 4, 1.0, 2.0))
    made = ((numbers / step).round() * step * scale).copysign(groups)
    return made.flatten(-2).flatten(-3, -2)[..., :rows, :cols]


def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast ``x[..., R, C]`` to data of the same shape and one scale for each block."""
    blocks = _in_blocks(x, format)
    scale = scale_from_amax(_amax(blocks), format)
    made = empty_quantized(x.shape, format, x.device)
    return _filled(made, _cast(blocks, scale, format, x), scale)


def quantize_columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast the transpose of ``x[M, K]``: data ``[K, M]``, blocks along M.

    Columns from M up to :func:`columnwise_width` are zeros, as if x had more rows of zeros.
    """
    zeros = columnwise_width(x.shape[0], format) - x.shape[0]
    cast = quantize_rowwise(F.pad(x.t(), (0, zeros)) if zeros else x.t(), format)
    return cast if format.rows == 1 else _filled(empty_columnwise(x, format), *cast[:2])


def quantize_both(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> tuple[Quantized, Quantized]:
    """Cast ``x[M, K]`` rowwise, and columnwise in ``columnwise_format`` or the same format."""
    return quantize_rowwise(x, format), quantize_columnwise(x, columnwise_format or format)


def quantize_stochastically(
    x: Tensor, format: BlockFormat, generator: torch.Generator, scale: Tensor | None
) -> Quantized:
    """Cast ``x[..., R, C]`` rowwise, rounding up or down at random: the expected value is x.

    A value between two numbers of the format becomes the upper one with a probability proportional
    to its distance from the lower one. Values that equal a number of the format, rounded to the
    dtype of x, become that number.

    Args:
        generator: the source of random numbers, on the device of x.
        scale: the fp32 scales of an earlier cast, or None. A block keeps its scale if its amax is
            at most 2^-8 above ``448 * scale``, and at least half of that.
    """
    blocks = _in_blocks(x, format)
    own = scale_from_amax(_amax(blocks), format)
    if scale is not None:
        fits = (own <= scale * (1 + 2**-8)) & (own >= scale / 2)
        own = torch.where(fits, scale, own)
    wide = own[..., :, None, :, None]
    nearest = to_data(blocks / wide, format)
    rounded = round_stochastically(blocks / wide, format, generator)
    is_number = (nearest.float() * wide).to(x.dtype) == blocks.to(x.dtype)
    data = torch.where(is_number, nearest.float(), rounded.float()).to(format.dtype)
    data = data.flatten(-2).flatten(-3, -2)[..., : x.shape[-2], : x.shape[-1]]
    return _filled(empty_quantized(x.shape, format, x.device), data, own)


def round_stochastically(x: Tensor, format: BlockFormat, generator: torch.Generator) -> Tensor:
    """Round fp32 to the data dtype at random, saturating; the expected value is x."""
    info = torch.finfo(format.dtype)
    x = x.nan_to_num(nan=float("nan"), posinf=info.max, neginf=-info.max)
    x = x.clamp(-info.max, info.max)
    exponent = (x.abs().view(torch.int32) >> 23) - 127
    exponent = exponent.clamp_min(int(math.log2(info.smallest_normal)))
    step = ((exponent + int(math.log2(info.eps)) + 127) << 23).view(torch.float32)
    below = (x / step).floor()
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    rounded = (below + (noise < x / step - below)) * step
    return rounded.copysign(x).to(format.dtype)  # zeros keep their sign


def transpose(x: Quantized) -> Quantized:
    """Transpose a cast in square blocks, from ``[..., N, K]`` to ``[..., K, N]``."""
    made = empty_quantized(x.data.mT.shape, x.format, x.data.device)
    return _filled(made, x.data.mT, x.scale.mT)


def quantize_with_transpose(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    """Return the rowwise cast of ``x[..., N, K]`` in square blocks, and its transpose."""
    rowwise = quantize_rowwise(x, format)
    return rowwise, transpose(rowwise)


def _filled(made: Quantized, data: Tensor, scale: Tensor) -> Quantized:
    made.data.copy_(data)
    made.scale.copy_(scale)
    return made


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """Return ``data * scale`` in fp32, rounded to ``dtype`` and clamped to its finite range.

    The cast may have rounded a value near the limit of a dtype, 65504 in fp16, to a number beyond
    it. Inf from an Inf scale is not clamped.
    """
    rows, cols = x.data.shape[-2:]
    expanded = x.scale.repeat_interleave(x.format.cols, -1)[..., :cols]
    if x.format.rows > 1:
        expanded = expanded.repeat_interleave(x.format.rows, -2)[..., :rows, :]
    return scaled(x.data, expanded, dtype)


def scaled(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`dequantize` of e4m3 data, with a scale for each element."""
    value, limit = data.float() * scale, largest_fp32(dtype)
    value = torch.where(scale.isinf(), value, value.clamp(-limit, limit))
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    return out.copy_(value)


def largest_fp32(dtype: torch.dtype) -> float:
    """Return the largest fp32 number that is finite in ``dtype``."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """Return ``A[M, K] B[N, K]^T``: each block of K rounded to fp32, scaled, then summed in fp32.

    ``bias`` ``[N]`` is added to the fp32 sum before the only rounding to ``out_dtype``. The sum of
    a block is exact before it is rounded, so that no bit depends on the order of additions or on
    other rows: the result is batch invariant.
    """
    m, n, k = len(a.data), len(b.data), min(a.data.shape[1], b.data.shape[1])
    row_scale = a.scale.repeat_interleave(a.format.rows, 0)[:m]  # [M, K/cols]
    col_scale = b.scale.repeat_interleave(b.format.rows, 0)[:n]  # [N, K/cols]
    # fp64 holds sums of 128 products of e4m3 numbers exactly: multiples of 2^-18 below 2^25
    a_wide, b_wide = a.data[:, :k].double(), b.data[:, :k].double()  # one may end with zeros
    acc = torch.zeros((m, n), dtype=torch.float32, device=a.data.device)
    step = math.gcd(a.format.cols, b.format.cols)  # one of each operand
    for first in range(0, k, step):
        inside = slice(first, first + step)
        partial = (a_wide[:, inside] @ b_wide[:, inside].t()).float()  # [M, N]
        partial *= row_scale[:, first // a.format.cols, None]
        partial *= col_scale[:, first // b.format.cols]
        acc += partial
    return (acc if bias is None else acc.add_(bias.float())).to(out_dtype)


def group_ranges(offs: Tensor | None, rows: int) -> list[tuple[int, int]]:
    """Return the first row of each group and the row after its last row.

    Args:
        offs: ``[E]``, the cumulative ends of the groups. An end before the previous group's end
            counts as that end, and an end beyond ``rows`` as ``rows``. None: one group has all.
        rows: the number of rows. Rows from the last end on belong to no group.
    """
    if offs is None:
        return [(0, rows)]
    ranges, begin = [], 0
    for end in offs.tolist():
        end = min(max(begin, end), rows)
        ranges.append((begin, end))
        begin = end
    return ranges


def quantize_grouped(
    x: Tensor, offs: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> tuple[Quantized | None, Quantized | None]:
    """Cast ``x[T, K]`` rowwise, and columnwise with blocks that begin anew in every group.

    Rowwise data is ``[R, K]``, where R is :func:`group_rows` ``(T)``; rows from T on may hold
    anything. Columnwise data is ``[K, P]``, where P is :func:`group_columns` ``(T, E)``: the
    columnwise cast of each group, filled up with zeros to whole blocks of 128 tokens, one after the
    other. Blocks after the last group may hold anything. A cast without a format is None.
    """
    tokens, k = x.shape
    rows = x.new_zeros((group_rows(tokens), k))
    rows[:tokens] = x
    columns = x.new_zeros((group_columns(tokens, len(offs)), k))
    block = 0
    for begin, end in group_ranges(offs, tokens):
        columns[block * BLOCK :][: end - begin] = x[begin:end]
        block += ceil_div(end - begin, BLOCK)
    return (
        None if rowwise is None else quantize_rowwise(rows, rowwise),
        None if columnwise is None else quantize_columnwise(columns, columnwise),
    )


def columnwise_from_rowwise(
    x: Quantized,
    columnwise: BlockFormat,
    offs: Tensor | None = None,
    tokens: int | None = None,
) -> Quantized:
    """Return the columnwise cast of the values of ``x[T, K]``, a cast with power-of-two scales.

    Those values are exact in fp32, and a power of two divides them exactly: elements are not
    rounded again, except those below 2^-6 of their new scale, which e4m3 holds in steps of 2^-9.
    A direct cast may differ there, and where the amax of a block, rounded, has a smaller scale.
    A block with a value that is not finite in fp32 is NaN throughout.

    Args:
        x: blocks of one row, with power-of-two scales.
        columnwise: the format of the result, with power-of-two scales.
        offs: int32 ``[E]``, the ends of groups of rows; the result is as of
            :func:`quantize_grouped` then, else as of :func:`quantize_columnwise`.
        tokens: T, if x has more rows; they may hold anything.
    """
    values = x.data.float() * x.scale.repeat_interleave(x.format.cols, -1)[:, : x.data.shape[1]]
    values = torch.where(values.isfinite(), values, float("nan"))[:tokens]
    if offs is None:
        return quantize_columnwise(values, columnwise)
    _, made = quantize_grouped(values, offs, None, columnwise)
    assert made is not None
    return made


def grouped_gemm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tokens: int | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of group e of ``A[T, K]`` by ``B[e, N, K]^T (+ bias[e, N])``.

    The result is ``[T, N]``. Rows of no group are zeros. Without ``offs`` one group has all rows.
    ``tokens``: T, if A has more rows.

    ``left[T, R] right[e, N, R]^T`` is added if given. The order is: the fp32 sum of :func:`gemm`
    over the blocks of K, then this product, summed over R and rounded to fp32, then the bias. The
    total is rounded to ``out_dtype`` once.
    """
    rows = a.data.shape[0] if tokens is None else tokens
    out = a.data.new_zeros((rows, b.data.shape[1]), dtype=out_dtype)
    for e, (begin, end) in enumerate(group_ranges(offs, rows)):
        if begin < end:
            of_group = Quantized(a.data[begin:end], a.scale[begin:end], a.format)
            expert = Quantized(b.data[e], b.scale[e], b.format)
            total = gemm(of_group, expert, None, torch.float32)
            if left is not None and right is not None:
                total += (left[begin:end].double() @ right[e].double().t()).float()
            if bias is not None:
                total += bias[e].float()
            out[begin:end] = total.to(out_dtype)
    return out


def grouped_gemm_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Tensor:
    """Contract ``A[N, P] B[K, P]^T`` over the tokens of each group e, into ``out[E, N, K]``.

    Both are columnwise casts of :func:`quantize_grouped` from matrices of ``tokens`` rows. A group
    without tokens gives zeros.
    """
    shape = len(offs), a.data.shape[0], b.data.shape[0]
    out = torch.zeros(shape, dtype=out_dtype, device=a.data.device)
    first = 0
    for e, (begin, end) in enumerate(group_ranges(offs, tokens)):
        last = first + ceil_div(end - begin, BLOCK)
        left, right = (
            Quantized(x.data[:, first * BLOCK : last * BLOCK], x.scale[:, first:last], x.format)
            for x in (a, b)
        )
        if first < last:
            out[e] = gemm(left, right, None, out_dtype)
        first = last
    return out


def shard_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """Return the amax of ``x[..., R, C]``, a part of a larger matrix, in each of its blocks.

    The first element of ``x`` is ``row`` rows and ``col`` columns inside its first block. The
    result is fp32 with one number for each block; NaN for a block that holds NaN.
    """
    return _amax(_in_blocks(x, format, row, col))


def quantize_shard(
    x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int, own: Tensor | None = None
) -> Tensor:
    """Cast a part of a matrix to its bytes in a cast of the whole, given the ``amax`` of blocks.

    Args:
        x, row, col: as in :func:`shard_amax`.
        amax: the amax, over all parts, of the blocks of ``x``, in the shape of :func:`shard_amax`.
        format: of the cast.
        own: the :func:`shard_amax` of this part that went into ``amax``, if ``x`` may have changed
            since.

    Returns:
        Data ``[..., R, C]``: the bytes of :func:`quantize_rowwise` of the whole. Blocks whose amax
        in ``x`` is no longer ``own`` are NaN, since the whole has another scale there.
    """
    blocks = _in_blocks(x, format, row, col)
    if own is not None:
        amax = torch.where(_amax(blocks) == own, amax, torch.full_like(amax, float("nan")))
    data = _cast(blocks, scale_from_amax(amax, format), format, x, row, col)
    return data.clone(memory_format=torch.contiguous_format)


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignore_index: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the sum of the cross-entropies of rows of logits, over ``total``.

    Args:
        logits: ``[T, V]`` bf16, fp16 or fp32, converted to fp32. They are overwritten by the
            gradient of the result, rounded to their dtype. Ignored rows become zeros.
        target: int64 ``[T]``, the indices of classes.
        total: a scalar; None for 1.
        ignore_index, label_smoothing: as in ``F.cross_entropy``.
        weight: fp32 ``[V]``, the weights of the classes; None for ones.

    Returns:
        An fp32 scalar.
    """
    leaf = logits.detach().requires_grad_()
    # saved-tensor hooks that offload would move all logits
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), keep:
        made = loss(leaf, target, total, ignore_index, weight, label_smoothing)
        (gradient,) = torch.autograd.grad(made, leaf)
    logits.copy_(gradient.masked_fill_((target == ignore_index)[:, None], 0))
    return made.detach()


def loss(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignore_index: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the result of :func:`loss_and_gradient_` alone."""
    made = F.cross_entropy(
        logits.float(),
        target,
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return made if total is None else made / total
