"""Casts on a GPU give the reference's bytes, scales and strides, whatever the input looks like."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import reference
from blocktensor.ops.cast.choose_backend import cast_backend
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.scale_layouts import empty_scale
from tests.support import numeric
from tests.support.casts import GLUON_WAYS, SQUARE, WAYS, Functions, Way, gluon_takes, kernels
from tests.support.numeric import DTYPES, KINDS, VIEWS, assert_same_forms, to_device, values

pytest.importorskip("triton")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = DTYPES
TRITON, GLUON = kernels("triton"), kernels("gluon")
on_a_gpu = pytest.mark.gpu
every_way = pytest.mark.parametrize("way", WAYS, ids=str)
every_gluon_way = pytest.mark.parametrize("way", GLUON_WAYS, ids=str)
every_rounding = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])


def meaningful_strides(forms: Iterable[Quantized]) -> list[list[int]]:
    tensors = [x for form in forms for x in form[:2] if x.numel()]
    return [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in tensors]


def check(backend: Any, way: Way, x: Tensor, power_of_two: bool) -> None:
    """The cast of ``x`` on the GPU equals the reference's on the CPU."""
    got = way(backend, to_device(x, CUDA), power_of_two)
    want = way(reference, x, power_of_two)
    assert {form.format for form in got} == set(way.formats(power_of_two))
    assert_same_forms(got, want)
    assert meaningful_strides(got) == meaningful_strides(want)


# The sweep. Sizes come from one class at a time, since Triton compiles a kernel for each.


class Case(NamedTuple):
    view: str
    kind: str
    rows: int
    cols: int


SIZES: dict[str, Callable[[int], list[int]]] = {
    "even": lambda largest: list(range(128, largest + 1, 128)),
    "aligned": lambda largest: [n for n in range(16, largest, 16) if n % 128],
    "fours": lambda largest: [n for n in range(4, largest, 4) if n % 8],
    "odd": lambda largest: [n for n in range(2, largest) if n % 16],
}
"""By class, up to a largest."""


def cases(seed: int, sources: Iterable[tuple[str, ...]], count: int) -> list[Case]:
    """``count`` cases from each source: (view, class of rows, class of columns)."""
    draw = random.Random(seed)
    found = []
    for i, (view, *classes) in enumerate(s for s in sources for _ in range(count)):
        rows = cols = 2**20
        while rows * cols > 600_000:
            rows, cols = (
                draw.choice(SIZES[c](draw.choice((300, 300, 300, 2100)))) for c in classes
            )
        found.append(Case(view, KINDS[i % len(KINDS)], rows, cols))
    return found


MAIN = [("contiguous", "even", "even"), ("contiguous", "odd", "aligned")]
MAIN += [("contiguous", "aligned", "aligned"), ("contiguous", "odd", "odd")]
OTHERS = [
    ("columns", "aligned", "aligned"),
    ("transposed", "even", "even"),
    *((view, "odd", "odd") for view in ("transposed", "sliced", "stepped", *VIEWS[-4:])),
]
COMBINATIONS = [(way, dtype, p2) for way in WAYS for dtype in DTYPES for p2 in (False, True)]


def triton_cases(way: Way, dtype: torch.dtype, power_of_two: bool) -> list[Case]:
    """Each combination takes its turn in the views, so that all are met in every way."""
    turn = COMBINATIONS.index((way, dtype, power_of_two))
    sources = MAIN[2 * power_of_two :] + [OTHERS[(3 * turn + i) % len(OTHERS)] for i in range(3)]
    return cases(turn, sources, 16 if power_of_two else 24)


@on_a_gpu
@pytest.mark.parametrize(("way", "dtype", "power_of_two"), COMBINATIONS, ids=str)
def test_triton_bytes(way: Way, dtype: torch.dtype, power_of_two: bool, rng: Generator) -> None:
    for case in triton_cases(way, dtype, power_of_two):
        check(TRITON, way, numeric.view_of(*case, dtype, rng), power_of_two)


GLUON_SOURCES = [
    ("contiguous", "even", "even"),
    *(("contiguous", *classes) for classes in product(("aligned", "fours"), repeat=2)),
    ("columns", "aligned", "even"),
    ("columns", "fours", "fours"),
    ("one row", "even", "aligned"),
]


@on_a_gpu
@every_rounding
@pytest.mark.parametrize("dtype", DTYPES)
@every_gluon_way
def test_gluon_bytes(way: Way, dtype: torch.dtype, power_of_two: bool, rng: Generator) -> None:
    found = cases(GLUON_WAYS.index(way), GLUON_SOURCES, 2 * len(KINDS))
    if dtype == FP32:
        odd = [("contiguous", "fours", "odd"), ("sliced", "fours", "odd")]
        found += cases(2, odd, len(KINDS))
    for case in found:
        x = numeric.view_of(*case, dtype, rng)
        assert gluon_takes(to_device(x, CUDA), *way.formats(power_of_two))
        check(GLUON, way, x, power_of_two)


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 128), (127, 576), (129, 10944), (4096, 576), (4096, 130), (512, 10944)]
)
def test_bytes_of_ragged_shapes_by_whoever_casts_them(shape: Any, dtype: torch.dtype) -> None:
    x = values("bits", *shape, dtype, Generator().manual_seed(0))
    for way in WAYS:
        check(Functions(cast_backend(x.to(CUDA), *way.formats(False))), way, x, False)


@on_a_gpu
@every_gluon_way
def test_gluon_bytes_of_tiles_with_tiny_blocks(way: Way, rng: Generator) -> None:
    """Blocks below 2^-60 in one direction, in the other or in both, beside ordinary ones."""
    for dtype in (BF16, FP32):
        for tiny in (2.0**-62, 2.0**-125, 2.0**-131):
            x = values("normal", 256, 384, dtype, rng)
            x[5:9] *= tiny
            x[:, 200:203] *= tiny
            x[128:, 256:] *= tiny
            x[130:133, 128:] = 0
            check(GLUON, way, x, False)


@on_a_gpu
@every_way
def test_sizes_of_zero_and_one(way: Way, rng: Generator) -> None:
    for rows, cols in [(0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (1, 128), (300, 1), (128, 1)]:
        check(TRITON, way, values("normal", rows, cols, BF16, rng), False)
        if way in GLUON_WAYS and rows % 4 == 0:
            dtype = FP32 if cols % 2 else BF16
            check(GLUON, way, values("normal", rows, cols, dtype, rng), False)


@on_a_gpu
@every_rounding
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_stacks(dtype: torch.dtype, power_of_two: bool, rng: Generator) -> None:
    for kind in KINDS:
        for experts, rows, cols in [(3, 256, 128), (2, 132, 300), (4, 129, 576), (0, 5, 5)]:
            x = values(kind, experts * rows, cols, dtype, rng).view(experts, rows, cols)
            for view in (x, x[1:], x.mT):
                check(TRITON, SQUARE, view, power_of_two)
                if gluon_takes(to_device(view, CUDA), *SQUARE.formats(power_of_two)):
                    check(GLUON, SQUARE, view, power_of_two)


@on_a_gpu
@every_way
def test_strides_beyond_32_bits(way: Way) -> None:
    x = torch.zeros(130 * 2**24 + 200, dtype=BF16, device=CUDA)
    x = x.as_strided((130, 200), (2**24, 1))
    x.copy_(values("bits", 130, 200, BF16, Generator().manual_seed(0)))
    for source in (x, x.t()):
        assert_same_forms(way(TRITON, source, False), way(reference, source.cpu(), False))


@on_a_gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_more_than_2_to_the_31_elements(backend: str) -> None:
    m, k = 2**20 + 192, 2112
    x = torch.randn((m, k), dtype=BF16, device=CUDA)
    assert x.numel() > 2**31
    row, col = kernels(backend).quantize_both(x, BLOCKS_1X128)
    for rows, blocks in ((slice(128), slice(1)), (slice(2**20, m), slice(2**13, None))):
        got = (
            Quantized(row.data[rows], row.scale[rows], BLOCKS_1X128),
            Quantized(col.data[:, rows], col.scale[:, blocks], BLOCKS_1X128),
        )
        assert_same_forms(got, reference.quantize_both(x[rows].cpu(), BLOCKS_1X128))
    data, scale, format = kernels(backend).quantize_rowwise(x, BLOCKS_128X128)
    want = reference.quantize_rowwise(x[-192:].cpu(), BLOCKS_128X128)
    assert_same_forms(Quantized(data[-192:], scale[-2:], format), want)


SHAPES = [
    (128, 128),
    (256, 640),
    (1920, 384),
    (16, 48),
    (304, 576),
    (112, 2000),
    (300, 580),
    (308, 576),
    (4, 4),
    (256, 1004),
    (129, 130),
    (300, 577),
    (7, 1100),
    (2049, 67),
    (1, 1),
    (1, 300),
    (300, 1),
    (128, 1),
    (0, 5),
    (5, 0),
]


def any_bytes(shape: tuple[int, ...], rng: Generator) -> Tensor:
    return torch.randint(256, shape, generator=rng, dtype=torch.uint8).view(numeric.E4M3)


def any_scale(shape: tuple[int, ...], block: int, rng: Generator) -> Tensor:
    """Scales of all sizes, some of them bad, NaN in the padding."""
    scale = torch.exp2(torch.randint(-40, 40, shape, generator=rng))
    bad = torch.rand(shape, generator=rng) < 0.1
    scale = torch.where(bad, torch.tensor([math.nan, math.inf]).take(scale.long() % 2), scale)
    if len(shape) == 2:
        return numeric.lay_out(scale, block)
    return empty_scale((shape[0], shape[1] * 128, shape[2] * 128), BLOCKS_128X128, CPU).copy_(scale)


def on_gpu(x: Quantized) -> Quantized:
    return Quantized(to_device(x.data, CUDA), to_device(x.scale, CUDA), x.format)


def check_transpose(data: Tensor, scale: Tensor) -> None:
    x = Quantized(data, scale, BLOCKS_128X128)
    got = TRITON.transpose(on_gpu(x))
    assert_same_forms(got, reference.transpose(x))
    assert got.data.is_contiguous()
    if scale.numel():
        assert got.scale.stride() == empty_scale(got.data.shape, BLOCKS_128X128, CPU).stride()


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "stack"])
@on_a_gpu
def test_transpose(lead: tuple[int, ...], rng: Generator) -> None:
    for n, k in SHAPES:
        scale = any_scale((*lead, -(-n // 128), -(-k // 128)), 128, rng)
        check_transpose(any_bytes((*lead, n, k), rng), scale)
        check_transpose(any_bytes((*lead, k, n), rng).mT, scale)


@on_a_gpu
def test_transpose_of_slices_on_block_boundaries(rng: Generator) -> None:
    data, scale = any_bytes((3, 640, 500), rng), any_scale((3, 5, 4), 128, rng)
    check_transpose(data[1:], scale[1:])
    check_transpose(data[1], scale[1])
    check_transpose(data[:, 128:500], scale[:, 1:4])
    check_transpose(data[..., 256:], scale[..., 2:])
    check_transpose(data[::2, :128, 128:384], scale[::2, :1, 1:3])


def check_dequantize(data: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> None:
    x = Quantized(data, scale, numeric.FORMATS[block])
    got = TRITON.dequantize(on_gpu(x), dtype)
    assert got.is_contiguous()
    numeric.assert_same(got.cpu(), reference.dequantize(x, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 128])
@on_a_gpu
def test_dequantize(block: int, dtype: torch.dtype, rng: Generator) -> None:
    for m, k in SHAPES:
        data, scale = any_bytes((m, k), rng), any_scale((-(-m // block), -(-k // 128)), block, rng)
        check_dequantize(data, scale, block, dtype)
    wide, scale = any_bytes((300, 640), rng), any_scale((-(-300 // block), 5), block, rng)
    check_dequantize(wide[:, 128:500], scale[:, 1:4], block, dtype)
    check_dequantize(wide.t().contiguous().t(), scale, block, dtype)
    if block == 128:
        data, scale = any_bytes((3, 300, 576), rng), any_scale((3, 3, 5), 128, rng)
        check_dequantize(data, scale, 128, dtype)
        check_dequantize(data[1:, 128:], scale[1:, 1:], 128, dtype)
        check_dequantize(data.mT, scale.mT, 128, dtype)
        check_dequantize(data[:, :1], scale[:, :1], 128, dtype)
