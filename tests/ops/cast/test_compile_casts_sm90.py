"""Every kernel of casts compiles for sm_90, here and without a GPU, and spills nothing.

The functions that launch kernels are called with meta tensors; their launches are recorded and
compiled instead of run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import (
    ACTIVATION_FORMATS,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    WEIGHT_FORMATS,
    BlockFormat,
    Quantized,
    ScaleRounding,
    group_columns,
)
from blocktensor.ops.scale_layouts import empty_quantized
from tests.support.casts import BOTH, GLUON_WAYS, SQUARE, WAYS, Way, gluon_takes, kernels
from tests.support.numeric import DTYPES, E4M3, FORMATS

pytest.importorskip("triton")

from blocktensor.ops.cast.gluon_columnwise import plan_columnwise
from blocktensor.ops.cast.triton_128x128 import plan_shard
from blocktensor.ops.cast.triton_cast import plan_1x128
from tests.support import sm90
from tests.support.sm90 import TUNED, Launches, compile_for_sm90

META = torch.device("meta")
BF16, FP16, FP32 = DTYPES
*OLDER, COLUMNWISE_SQUARE, MIXED = WAYS


# None with the Triton that the kernels are tuned with. Others may, a little, at odd shapes in fp32.
SPILLS = 0 if TUNED else 192
launches = sm90.launches


def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "even": lambda dtype: like((4096, 7168), dtype),
    "even.t()": lambda dtype: like((7168, 4096), dtype).t(),
    "300x576": lambda dtype: like((300, 576), dtype),
    "4096x10944": lambda dtype: like((4096, 10944), dtype),
    "129x130": lambda dtype: like((129, 130), dtype),
    "304x130": lambda dtype: like((304, 130), dtype),
    "129x130.t()": lambda dtype: like((130, 129), dtype).t(),
    "unaligned": lambda dtype: like((257, 512), dtype).flatten()[1:-511].view(256, 512),
    "stepped": lambda dtype: like((300, 1152), dtype)[:, ::2],
    "one number": lambda dtype: like((1, 1), dtype).expand(256, 512),
    "one column": lambda dtype: like((128, 1), dtype),
    "wide": lambda dtype: torch.empty_strided((256, 130), (2**25, 1), dtype=dtype, device=META),
}
TRITON, GLUON = kernels("triton"), kernels("gluon")


@pytest.mark.parametrize(
    ("way", "dtype", "view"),
    [
        *itertools.product(OLDER, [FP32], INPUTS),
        *itertools.product([COLUMNWISE_SQUARE], [FP32], ["129x130.t()", "one column", "wide"]),
        *itertools.product([MIXED], [FP32], ["even", "300x576", "129x130"]),
        *itertools.product(WAYS, [BF16], ["even", "129x130", "4096x10944"]),
        *itertools.product(WAYS, [FP16], ["300x576", "even.t()"]),
        (BOTH, BF16, "129x130.t()"),
        (BOTH, BF16, "one column"),
        (MIXED, BF16, "wide"),
    ],
    ids=str,
)
def test_casts(way: Way, dtype: torch.dtype, view: str, launches: Launches) -> None:
    x = INPUTS[view](dtype)
    assert launches.compile(lambda: way(TRITON, x, False), SPILLS) >= 1


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_casts_with_power_of_two_scales(way: Way, dtype: torch.dtype, launches: Launches) -> None:
    x = INPUTS["129x130" if dtype == FP32 else "300x576"](dtype)
    assert launches.compile(lambda: way(TRITON, x, True), SPILLS) >= 1


@pytest.mark.parametrize(("dtype", "shape"), [(FP32, (3, 129, 130)), (BF16, (3, 256, 512))])
def test_square_casts_of_stacks(
    dtype: torch.dtype, shape: tuple[int, ...], launches: Launches
) -> None:
    x = like(shape, dtype)
    for backend in (TRITON, GLUON):
        assert launches.compile(partial(SQUARE, backend, x, False), SPILLS) == 1
    assert launches.compile(lambda: SQUARE(TRITON, x.mT, True), SPILLS) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(14336, 4096), (160, 10), (3, 272, 576)], ids=str)
def test_casts_with_transposes(
    dtype: torch.dtype, shape: tuple[int, ...], launches: Launches
) -> None:
    one_pass = GLUON.quantize_with_transpose
    assert one_pass is not None
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        assert launches.compile(partial(one_pass, like(shape, dtype), format), SPILLS) == 1


GLUON_SHAPES = [(4096, 7168), (300, 576), (304, 130), (300, 130)]


@pytest.mark.parametrize(
    ("way", "dtype", "shape", "power_of_two"),
    [
        *itertools.product(GLUON_WAYS, DTYPES, GLUON_SHAPES, [False]),
        *itertools.product(GLUON_WAYS, DTYPES, [(300, 576)], [True]),
    ],
    ids=str,
)
def test_gluon_casts(
    way: Way,
    dtype: torch.dtype,
    shape: tuple[int, int],
    power_of_two: bool,
    launches: Launches,
) -> None:
    x = like(shape, dtype)
    assert gluon_takes(x, *way.formats(power_of_two))
    assert launches.compile(lambda: way(GLUON, x, power_of_two), SPILLS) == 1


def form(shape: tuple[int, ...], rows: int) -> Quantized:
    """Data and scales in blocks of ``rows`` x 128."""
    return empty_quantized(shape, FORMATS[rows], META)


@pytest.mark.parametrize("shape", [(256, 512), (129, 130), (3, 300, 576), (256, 132)])
def test_transpose(shape: tuple[int, ...], launches: Launches) -> None:
    x = form(shape, 128)
    assert launches.compile(lambda: TRITON.transpose(x), SPILLS) == 1
    flipped = x._replace(data=x.data.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert launches.compile(lambda: TRITON.transpose(flipped), SPILLS) == 1


@pytest.mark.parametrize(
    ("shape", "rows", "dtype"),
    [
        ((256, 512), 1, BF16),
        ((129, 130), 1, FP32),
        ((300, 576), 128, FP16),
        ((3, 129, 130), 128, BF16),
    ],
)
def test_dequantize(
    shape: tuple[int, ...], rows: int, dtype: torch.dtype, launches: Launches
) -> None:
    assert launches.compile(lambda: TRITON.dequantize(form(shape, rows), dtype), SPILLS) == 1


@pytest.mark.parametrize("plan", [plan_columnwise, plan_1x128], ids=lambda plan: plan.__module__)
@pytest.mark.parametrize(
    ("dtype", "k", "experts", "rowwise", "square"),
    [
        *itertools.product(
            [torch.bfloat16, torch.float32], [2048], [8], [True, False], [False, True]
        ),
        (torch.float16, 136, 256, True, False),
        (torch.float16, 136, 256, True, True),
        (torch.float32, 130, 1000, True, False),
        (torch.float32, 130, 1000, True, True),
    ],
    ids=str,
)
def test_grouped_casts(
    plan: object,
    dtype: torch.dtype,
    k: int,
    experts: int,
    rowwise: bool,
    square: bool,
    launches: Launches,
) -> None:
    x = torch.empty((401, k), dtype=dtype, device=META)
    offs = torch.empty(experts, dtype=torch.int32, device=META)
    rounding: ScaleRounding = "power_of_two" if k == 136 else "fp32"
    format = ACTIVATION_FORMATS[rounding]
    columnwise_format = WEIGHT_FORMATS[rounding] if square else format
    row = empty_quantized((401, k), format, META) if rowwise else None
    col = empty_quantized((k, group_columns(401, experts)), columnwise_format, META)
    assert launches.compile(lambda: plan(x, row, col, offs)(), SPILLS) == 1  # type: ignore[operator]


@pytest.mark.parametrize(
    "format", [BLOCKS_128X128, BLOCKS_128X128_POW2], ids=lambda format: format.name
)
@pytest.mark.parametrize("cast", [False, True], ids=["amax", "cast"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("shape", "row"), [((1024, 4096), 0), ((1000, 4096), 100), ((7, 130), 3)], ids=str
)
def test_shards(
    shape: tuple[int, int], row: int, dtype: torch.dtype, cast: bool, format: BlockFormat
) -> None:
    """Nothing spills, even columns load wide."""
    x, amax = like(shape, dtype), like((9, 32), FP32)
    data = like(shape, E4M3) if cast else None
    found = compile_for_sm90(plan_shard(x, amax, data, format, row, 0))
    assert found.spilled_bytes == 0
    assert ("LDG.E.128" in found.sass) == (shape[1] % 128 == 0)
