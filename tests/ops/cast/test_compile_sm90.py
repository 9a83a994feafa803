"""Every Triton and Gluon kernel compiles for sm_90, here and without a GPU, and spills nothing.

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

from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2, Quantized
from blocktensor.ops.scale_layouts import empty_quantized
from tests.support.casts import BOTH, GLUON_WAYS, SQUARE, WAYS, Way, gluon_takes, kernels
from tests.support.numeric import DTYPES, FORMATS

pytest.importorskip("triton")

from blocktensor.ops.gemm import triton_gemm
from blocktensor.ops.runtime.launch import Launch
from tests.support.sm90 import TUNED, compile_for_sm90

META = torch.device("meta")
BF16, FP16, FP32 = DTYPES
*OLDER, COLUMNWISE_SQUARE, MIXED = WAYS
Compile = Callable[[Callable[[], object]], int]


# None with the Triton that the kernels are tuned with. Others may, a little, at odd shapes in fp32.
SPILLS = 0 if TUNED else 192


@pytest.fixture
def compile_launches(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compile whatever a function launches; how many launches that were."""
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: launches.append(launch))

    def compile_all(function: Callable[[], object]) -> int:
        launches.clear()
        function()
        for launch in launches:
            resources = compile_for_sm90(launch)
            assert resources.spilled_bytes <= SPILLS, f"{launch.kernel} {launch.constants}"
            assert 0 < resources.registers <= 255
        return len(launches)

    return compile_all


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
def test_casts(way: Way, dtype: torch.dtype, view: str, compile_launches: Compile) -> None:
    x = INPUTS[view](dtype)
    assert compile_launches(lambda: way(TRITON, x, False)) >= 1


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_casts_with_power_of_two_scales(
    way: Way, dtype: torch.dtype, compile_launches: Compile
) -> None:
    x = INPUTS["129x130" if dtype == FP32 else "300x576"](dtype)
    assert compile_launches(lambda: way(TRITON, x, True)) >= 1


@pytest.mark.parametrize(("dtype", "shape"), [(FP32, (3, 129, 130)), (BF16, (3, 256, 512))])
def test_square_casts_of_stacks(
    dtype: torch.dtype, shape: tuple[int, ...], compile_launches: Compile
) -> None:
    x = like(shape, dtype)
    for backend in (TRITON, GLUON):
        assert compile_launches(partial(SQUARE, backend, x, False)) == 1
    assert compile_launches(lambda: SQUARE(TRITON, x.mT, True)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(14336, 4096), (160, 10), (3, 272, 576)], ids=str)
def test_casts_with_transposes(
    dtype: torch.dtype, shape: tuple[int, ...], compile_launches: Compile
) -> None:
    one_pass = GLUON.quantize_with_transpose
    assert one_pass is not None
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        assert compile_launches(partial(one_pass, like(shape, dtype), format)) == 1


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
    compile_launches: Compile,
) -> None:
    x = like(shape, dtype)
    assert gluon_takes(x, *way.formats(power_of_two))
    assert compile_launches(lambda: way(GLUON, x, power_of_two)) == 1


def form(shape: tuple[int, ...], rows: int) -> Quantized:
    """Data and scales in blocks of ``rows`` x 128."""
    return empty_quantized(shape, FORMATS[rows], META)


@pytest.mark.parametrize("shape", [(256, 512), (129, 130), (3, 300, 576), (256, 132)])
def test_transpose(shape: tuple[int, ...], compile_launches: Compile) -> None:
    x = form(shape, 128)
    assert compile_launches(lambda: TRITON.transpose(x)) == 1
    if gluon_takes(x.data, BLOCKS_128X128):
        assert compile_launches(lambda: GLUON.transpose(x)) == 1
    flipped = x._replace(data=x.data.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert compile_launches(lambda: TRITON.transpose(flipped)) == 1


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
    shape: tuple[int, ...], rows: int, dtype: torch.dtype, compile_launches: Compile
) -> None:
    assert compile_launches(lambda: TRITON.dequantize(form(shape, rows), dtype)) == 1


@pytest.mark.parametrize(
    ("m", "n", "k", "a_rows", "b_rows", "dtype"),
    [
        (4096, 7168, 2048, 1, 128, BF16),
        (4096, 7168, 2048, 1, 1, FP32),
        (4096, 576, 10944, 1, 128, BF16),
        (4096, 576, 10944, 128, 1, FP32),
        (4096, 2112, 7168, 128, 128, FP16),
        (300, 130, 130, 1, 128, BF16),
        (300, 129, 1, 1, 1, FP32),
        (64, 576, 10944, 1, 128, BF16),
        (64, 7168, 2048, 1, 1, FP32),
        (3, 130, 129, 128, 1, BF16),
        (1, 7168, 2048, 1, 128, BF16),
        (1, 1, 1, 1, 1, FP32),
    ],
)
def test_gemm(
    m: int,
    n: int,
    k: int,
    a_rows: int,
    b_rows: int,
    dtype: torch.dtype,
    compile_launches: Compile,
) -> None:
    operands = form((m, k), a_rows), form((n, k), b_rows)
    assert compile_launches(lambda: triton_gemm.gemm(*operands, None, dtype)) == 1


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 7168, 2048), (3, 130, 129)])
def test_gemm_with_bias_or_accumulation(m: int, n: int, k: int, compile_launches: Compile) -> None:
    operands = form((m, k), 1), form((n, k), 128)
    assert compile_launches(lambda: triton_gemm.gemm(*operands, like((n,), BF16), BF16)) == 1
    wide = like((m, n + 1), FP32)[:, :n]
    assert compile_launches(lambda: triton_gemm.gemm_add_(wide, *operands)) == 1
