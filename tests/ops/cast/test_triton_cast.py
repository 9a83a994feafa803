"""Casts on a GPU give the reference's bytes, scales and strides, whatever the input looks like."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.cast.choose_backend import cast_backend
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from tests.support.casts import GLUON_WAYS, SQUARE, WAYS, Functions, Way, gluon_takes, kernels
from tests.support.numeric import DTYPES, KINDS, VIEWS, assert_same, to_device, values, view_of

pytest.importorskip("triton")

CUDA = torch.device("cuda")
BF16, FP16, FP32 = DTYPES
TRITON, GLUON = kernels("triton"), kernels("gluon")
on_a_gpu = pytest.mark.gpu
every_rounding = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])


def meaningful_strides(x: Tensor) -> list[int]:
    return (
        []
        if x.numel() == 0
        else [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    )


def tensors(forms: Iterable[Quantized]) -> list[Tensor]:
    return [x for form in forms for x in (form.data, form.scale)]


def assert_all_same(got: Iterable[Quantized], want: Iterable[Quantized]) -> None:
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert_same(ours.cpu(), theirs)


def check(backend: Any, way: Way, x: Tensor, power_of_two: bool) -> None:
    """The cast of ``x`` on the GPU equals the reference's on the CPU."""
    got = way(backend, to_device(x, CUDA), power_of_two)
    want = way(reference, x, power_of_two)
    assert [form.format for form in got] == [form.format for form in want]
    assert {form.format for form in got} == set(way.formats(power_of_two))
    assert_all_same(got, want)
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert meaningful_strides(ours) == meaningful_strides(theirs)


# The sweep. Sizes come from one class at a time, since Triton compiles a kernel for each.


class Case(NamedTuple):
    view: str
    kind: str
    rows: int
    cols: int


def size(kind: str, draw: random.Random) -> int:
    largest = draw.choice((300, 300, 300, 2100))
    if kind == "even":
        return 128 * draw.randint(1, largest // 128)
    if kind == "aligned":  # a multiple of 16, not of 128
        return 16 * draw.choice([n for n in range(1, largest // 16) if n % 8])
    if kind == "fours":  # a multiple of 4, not of 8
        return 4 * draw.choice([n for n in range(1, largest // 4) if n % 2])
    assert kind == "odd"
    return draw.choice([n for n in range(2, largest) if n % 16])


def cases(seed: int, sources: list[tuple[str, str, str]], count: int) -> list[Case]:
    """``count`` cases from each source: (view, class of rows, class of columns)."""
    draw = random.Random(seed)
    found = []
    for i, (view, row_class, col_class) in enumerate(s for s in sources for _ in range(count)):
        rows = cols = 2**20
        while rows * cols > 600_000:
            rows, cols = size(row_class, draw), size(col_class, draw)
        found.append(Case(view, KINDS[i % len(KINDS)], rows, cols))
    return found


MAIN = [
    ("contiguous", "even", "even"),
    ("contiguous", "odd", "aligned"),
    ("contiguous", "aligned", "aligned"),
    ("contiguous", "odd", "odd"),
]
OTHERS = [
    ("columns", "aligned", "aligned"),
    ("transposed", "even", "even"),
    ("transposed", "odd", "odd"),
    ("sliced", "odd", "odd"),
    ("stepped", "odd", "odd"),
    ("one row", "odd", "odd"),
    ("one column", "odd", "odd"),
    ("one number", "odd", "odd"),
    ("overlapping", "odd", "odd"),
]
COMBINATIONS = [(way, dtype, p2) for way in WAYS for dtype in DTYPES for p2 in (False, True)]


def triton_cases(way: Way, dtype: torch.dtype, power_of_two: bool) -> list[Case]:
    """Each combination takes its turn in the views, so that all are met in every way."""
    turn = COMBINATIONS.index((way, dtype, power_of_two))
    sources = MAIN[2 * power_of_two :] + [OTHERS[(3 * turn + i) % len(OTHERS)] for i in range(3)]
    return cases(turn, sources, 16 if power_of_two else 24)


def test_the_sweep_is_wide() -> None:
    for way in WAYS:
        sweeps = [triton_cases(*c) for c in COMBINATIONS if c[0] == way]
        assert {case.view for sweep in sweeps for case in sweep} == set(VIEWS)
        for plain, power_of_two in zip(sweeps[::2], sweeps[1::2], strict=True):
            assert len(plain) + len(power_of_two) >= 200
            assert (
                {case.kind for case in plain} == {case.kind for case in power_of_two} == set(KINDS)
            )


@on_a_gpu
@pytest.mark.parametrize(("way", "dtype", "power_of_two"), COMBINATIONS, ids=str)
def test_triton_bytes(way: Way, dtype: torch.dtype, power_of_two: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    for case in triton_cases(way, dtype, power_of_two):
        x = view_of(*case, dtype, rng)
        check(TRITON, way, x, power_of_two)


GLUON_SOURCES = [
    ("contiguous", "even", "even"),
    ("contiguous", "aligned", "aligned"),
    ("contiguous", "fours", "aligned"),
    ("contiguous", "aligned", "fours"),
    ("contiguous", "fours", "fours"),
    ("columns", "aligned", "even"),
    ("columns", "fours", "fours"),
    ("one row", "even", "aligned"),
]


@on_a_gpu
@every_rounding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", GLUON_WAYS, ids=str)
def test_gluon_bytes(way: Way, dtype: torch.dtype, power_of_two: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    for case in cases(GLUON_WAYS.index(way), GLUON_SOURCES, 2 * len(KINDS)):
        x = view_of(*case, dtype, rng)
        assert gluon_takes(to_device(x, CUDA), *way.formats(power_of_two))
        check(GLUON, way, x, power_of_two)


@on_a_gpu
@every_rounding
@pytest.mark.parametrize("way", GLUON_WAYS, ids=str)
def test_gluon_bytes_of_fp32_with_odd_columns(way: Way, power_of_two: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    for case in cases(2, [("contiguous", "fours", "odd"), ("sliced", "fours", "odd")], len(KINDS)):
        check(GLUON, way, view_of(*case, FP32, rng), power_of_two)


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 128), (127, 576), (129, 10944), (4096, 576), (4096, 130), (512, 10944)]
)
def test_bytes_of_ragged_shapes_by_whoever_casts_them(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = values("bits", *shape, dtype, torch.Generator().manual_seed(0))
    for way in WAYS:
        check(Functions(cast_backend(x.to(CUDA), *way.formats(False))), way, x, False)


@on_a_gpu
@pytest.mark.parametrize("way", GLUON_WAYS, ids=str)
def test_gluon_bytes_of_tiles_with_tiny_blocks(way: Way) -> None:
    """Blocks below 2^-60 in one direction, in the other or in both, beside ordinary ones."""
    rng = torch.Generator().manual_seed(0)
    for dtype in (BF16, FP32):
        for tiny in (2.0**-62, 2.0**-125, 2.0**-131):
            x = values("normal", 256, 384, dtype, rng)
            x[5:9] *= tiny
            x[:, 200:203] *= tiny
            x[128:, 256:] *= tiny
            x[130:133, 128:] = 0
            check(GLUON, way, x, False)


@on_a_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_sizes_of_zero_and_one(way: Way) -> None:
    rng = torch.Generator().manual_seed(0)
    for rows, cols in [(0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (1, 128), (300, 1), (128, 1)]:
        check(TRITON, way, values("normal", rows, cols, BF16, rng), False)
        if way in GLUON_WAYS and rows % 4 == 0:
            dtype = FP32 if cols % 2 else BF16
            check(GLUON, way, values("normal", rows, cols, dtype, rng), False)


@on_a_gpu
@every_rounding
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_stacks(dtype: torch.dtype, power_of_two: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    for kind in KINDS:
        for experts, rows, cols in [(3, 256, 128), (2, 132, 300), (4, 129, 576), (0, 5, 5)]:
            x = values(kind, experts * rows, cols, dtype, rng).view(experts, rows, cols)
            for backend in (TRITON, GLUON):
                check(backend, SQUARE, x, power_of_two)
                check(backend, SQUARE, x[1:], power_of_two)
            check(TRITON, SQUARE, x.mT, power_of_two)


# Far into memory


@on_a_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_strides_beyond_32_bits(way: Way) -> None:
    x = torch.zeros(130 * 2**24 + 200, dtype=BF16, device=CUDA)
    x = x.as_strided((130, 200), (2**24, 1))
    rng = torch.Generator().manual_seed(0)
    x.copy_(values("bits", 130, 200, BF16, rng))
    for source in (x, x.t()):
        assert_all_same(way(TRITON, source, False), way(reference, source.cpu(), False))


@on_a_gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_more_than_2_to_the_31_elements(backend: str) -> None:
    """The first and the last rows, which lie in blocks of their own."""
    m, k = 2**20 + 144, 2112
    x = torch.randn((m, k), dtype=BF16, device=CUDA)
    assert x.numel() > 2**31
    row, col = kernels(backend).quantize_both(x, BLOCKS_1X128)
    for rows, blocks in ((slice(128), slice(1)), (slice(2**20, m), slice(2**13, None))):
        got = (
            Quantized(row.data[rows], row.scale[rows], BLOCKS_1X128),
            Quantized(col.data[:, rows], col.scale[:, blocks], BLOCKS_1X128),
        )
        assert_all_same(got, reference.quantize_both(x[rows].cpu(), BLOCKS_1X128))


@on_a_gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_a_square_cast_of_more_than_2_to_the_31_elements(backend: str) -> None:
    x = torch.randn((2**20 + 130, 2112), dtype=BF16, device=CUDA)
    got = kernels(backend).quantize_rowwise(x, BLOCKS_128X128)
    want = reference.quantize_rowwise(x[-130:].cpu(), BLOCKS_128X128)
    assert_same(got.data[-130:].cpu(), want.data)
    assert_same(got.scale[-2:].cpu(), want.scale)


# Where and when


@on_a_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_casts_run_on_the_current_stream(way: Way) -> None:
    backend = GLUON if way in GLUON_WAYS else TRITON
    x = values("normal", 256, 512, BF16, torch.Generator().manual_seed(0))
    late = torch.zeros_like(x, device=CUDA)
    way(backend, late, False)  # compiles
    on_device = x.to(CUDA)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        late.copy_(on_device)
        got = way(backend, late, False)
    stream.synchronize()
    assert_all_same(got, way(reference, x, False))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_casts_run_on_the_device_of_their_input(way: Way) -> None:
    x = values("normal", 256, 512, BF16, torch.Generator().manual_seed(0))
    for backend in (TRITON, GLUON) if way in GLUON_WAYS else (TRITON,):
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            got = way(backend, x.to(device), False)
            assert torch.cuda.current_device() == 0
            assert {made.device for made in tensors(got)} == {torch.device(device)}
            assert_all_same(got, way(reference, x, False))
