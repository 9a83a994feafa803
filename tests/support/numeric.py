"""What tests of numbers share: an e4m3 cast in numpy, awkward values, strided views, comparisons.

Nothing here computes with the code under test: operands only carry its formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized, ScaleRounding

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn
FORMATS = {1: BLOCKS_1X128, 128: BLOCKS_128X128}
"""By the rows of a block."""

# Byte b < 0x7F: exponent b >> 3 (bias 7, 0 means subnormal), significand b & 7.
MAGNITUDES = np.array(
    [(b & 7) * 2.0**-9 if b < 8 else (8 + (b & 7)) * 2.0 ** ((b >> 3) - 10) for b in range(127)]
)
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def e4m3_bytes(x: np.ndarray) -> np.ndarray:
    """The e4m3 bytes nearest to ``x``: ties to the even byte, saturating, NaN to 0x7F."""
    magnitude = np.abs(x)
    below = np.searchsorted(MIDPOINTS, magnitude, side="left")  # a tie gives the lower neighbour
    above = np.searchsorted(MIDPOINTS, magnitude, side="right")  # a tie gives the upper neighbour
    nearest = np.where(below % 2 == 0, below, above)
    return np.where(np.isnan(x), 0x7F, nearest | (np.signbit(x) << 7)).astype(np.uint8)


def up_to_power_of_two(scale: np.float32) -> np.float32:
    significand, exponent = math.frexp(scale)  # 0.5 <= significand < 1
    return np.float32(2.0 ** max(exponent - (significand == 0.5), -126))


ROUNDED: dict[ScaleRounding, Callable[[np.float32], np.float32]] = {
    "fp32": lambda scale: scale,
    "power_of_two": up_to_power_of_two,
}
"""Every rounding of a finite scale above 0, in scalar arithmetic."""


def block_scale(block: np.ndarray, rounding: ScaleRounding) -> np.float32:
    """The scale of one fp32 block."""
    amax = np.abs(block).max()  # NaN if there is one
    scale = amax / np.float32(448)
    if scale == 0:
        return np.float32(1)
    return ROUNDED[rounding](scale) if np.isfinite(scale) else scale


@np.errstate(invalid="ignore", under="ignore")  # Inf / Inf, and tiny quotients
def cast_by_blocks(x: Tensor, block: Any, rounding: ScaleRounding) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales of the cast of a matrix, one block after another."""
    values = x.float().numpy()
    quotients = np.zeros(values.shape, np.float32)
    scales = np.zeros([-(-n // b) for n, b in zip(values.shape, block, strict=True)], np.float32)
    for i, j in np.ndindex(scales.shape):
        inside = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = block_scale(values[inside], rounding)
        quotients[inside] = values[inside] / scales[i, j]
    return e4m3_bytes(quotients), scales


def expand(x: Quantized) -> Tensor:
    """``data * scale`` in float64, of a matrix."""
    rows, cols = x.data.shape
    scale = x.scale.double().repeat_interleave(x.format.cols, 1)
    scale = scale.repeat_interleave(x.format.rows, 0)
    return x.data.double() * scale[:rows, :cols]


def worst_row(got: Tensor, a: Quantized, b: Quantized, bias: Tensor | None = None) -> float:
    """The largest relative error of a row of ``A B^T + bias``, against float64.

    Relative to the row, or to what it would be without cancellation, the root of the sum of squares
    of all products in it.
    """
    x, y = expand(a), expand(b)
    want = x @ y.T
    size = x.square() @ y.square().T
    if bias is not None:
        want += bias.double()
        size += bias.double().square()
    assert got.shape == want.shape
    size = (size + want.square()).sum(1).sqrt().clamp(min=1e-300)
    error = (got.double() - want).norm(dim=1) / size
    return float(error.max()) if error.numel() else 0.0


def operand(rows: int, k: int, block: int, rng: Generator) -> Quantized:
    """A GEMM operand ``[rows, k]`` with ordinary data and scales in blocks of ``block`` x 128.

    On the device of ``rng``. The padding of scales holds NaN.
    """
    data = torch.randn((rows, k), generator=rng, device=rng.device)
    shape = (-(-rows // block), -(-k // 128))
    scale = torch.exp2(torch.randn(shape, generator=rng, device=rng.device))
    data = data.mul_(100).clamp_(-448, 448).to(E4M3)
    return Quantized(data, lay_out(scale, block), FORMATS[block])


def lay_out(scale: Tensor, block: int) -> Tensor:
    """``scale`` with the strides documented in ``ops/scale_layouts.py``, NaN in the padding."""
    rows, cols = scale.shape
    if block == 1:
        out = torch.full((cols, -(-rows // 64) * 64), math.nan, device=scale.device).t()[:rows]
    else:
        out = torch.full((rows, -(-cols // 4) * 4), math.nan, device=scale.device)[:, :cols]
    return out.copy_(scale)


KINDS = ("normal", "bits", "ties", "tiny", "zeros", "edges", "inf", "nan")


def values(kind: str, rows: int, cols: int, dtype: torch.dtype, rng: Generator) -> Tensor:
    """A CPU matrix of one of ``KINDS`` of values."""
    shape = (rows, cols)

    def choose(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), shape, generator=rng)]

    sign = choose(-1, 1)
    if kind == "bits":  # any finite number
        number = torch.int32 if dtype == torch.float32 else torch.int16
        bits = torch.randint(-(2**31), 2**31, shape, generator=rng).to(number)
        return bits.view(dtype).nan_to_num(0.0, 0.0, 0.0)
    if kind == "ties":  # midpoints between e4m3 numbers, in blocks whose scale is a power of two
        x = choose(*MIDPOINTS, *[448.0] * 30) * sign * 2.0 ** (7 - rows % 15)
    elif kind == "tiny":  # scales and quotients that are subnormal or zero
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        x = sign * smallest * choose(*range(40), *(2.0**i for i in range(30)))
    elif kind == "zeros":
        x = sign * choose(*[0.0] * 400, 1e-7, 3.0)
    elif kind == "edges":  # around multiples of 448, where a scale meets a power of two
        x = sign * 448 * choose(0.5, 1, 2) * choose(1 - 2**-8, 1, 1, 1, 1 + 2**-7)
    else:
        x = torch.randn(shape, generator=rng)
        rare = torch.rand(shape, generator=rng) < 0.004
        if kind == "inf":
            x = torch.where(rare, sign * math.inf, x)
        if kind == "nan":
            x = torch.where(rare, torch.copysign(torch.tensor(math.nan), sign), x)
    return x.to(dtype)


VIEWS = (
    "contiguous",
    "columns",
    "transposed",
    "sliced",
    "stepped",
    "one row",
    "one column",
    "one number",
    "overlapping",
)


def view_of(
    view: str, kind: str, rows: int, cols: int, dtype: torch.dtype, rng: Generator
) -> Tensor:
    """A CPU matrix ``[rows, cols]`` of ``values(kind)`` that lies in memory as ``view`` says."""
    places: dict[str, tuple[tuple[int, int], Any]] = {
        "contiguous": ((rows, cols), ...),
        "transposed": ((cols, rows), ...),
        "columns": ((rows, cols + 32), np.s_[:, 16 : cols + 16]),  # as aligned as cols is
        # odd strides, odd offset: no vector loads
        "sliced": ((rows + 4, cols + 9 + cols % 2), np.s_[3 : rows + 3, 6 : cols + 6]),
        "stepped": ((2 * rows, 3 * cols), np.s_[::2, ::3]),
        "one row": ((1, cols), ...),
        "one column": ((rows, 1), ...),
        "one number": ((1, 1), ...),
        "overlapping": ((1, rows + cols), ...),
    }
    size, cut = places[view]
    x = values(kind, *size, dtype, rng)[cut]
    if view == "overlapping":
        return x.as_strided((rows, cols), (1, 1))
    return x.t() if view == "transposed" else x.expand(rows, cols)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device`` with the same strides and offset (``Tensor.to`` may change them)."""
    storage = x.untyped_storage()
    whole = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.itemsize,))
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def assert_same(got: Tensor, want: Tensor) -> None:
    """Same shape, dtype and bits, any NaN for a NaN; e4m3 by its bytes, 0x7F the only NaN."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.dtype == E4M3:
        got, want = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    elif got.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32}[got.itemsize]
        got, want = (
            torch.where(t.isnan(), torch.full_like(t, math.nan), t).contiguous().view(bits)
            for t in (got, want.to(got.device))
        )
    wrong = got != want.to(got.device)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}: "
        f"{got[wrong][0]:#x} for {want.to(got.device)[wrong][0]:#x}"
    )


def assert_same_forms(got: Any, want: Any) -> None:
    """The same casts, alone or in nested tuples, of the same formats, bytes and scales."""
    forms = [tree_leaves(x, is_leaf=lambda part: isinstance(part, Quantized)) for x in (got, want)]
    for ours, theirs in zip(*forms, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert ours.format is theirs.format
        assert_same(ours.data.cpu(), theirs.data.cpu())
        assert_same(ours.scale.cpu(), theirs.scale.cpu())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``."""
    assert got.shape == want.shape
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-300))
