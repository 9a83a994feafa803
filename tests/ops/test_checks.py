"""Every refusal: its type and its whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocktensor.ops import checks, library
from blocktensor.ops.layouts import empty_rowwise_scale, empty_square_scale
from tests.support.numeric import E4M3, assert_same, operand

CPU = torch.device("cpu")
A = torch.zeros(3, 130).to(E4M3), torch.ones(3, 2)
B = torch.zeros(5, 130).to(E4M3), torch.ones(5, 2)
STACK = torch.zeros(2, 3, 130).to(E4M3), torch.ones(2, 1, 2)


def meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def gemm(*args: Any, **kwargs: Any) -> Callable[[], object]:
    return lambda: library.gemm(*args, **kwargs)


def gemm_add(*args: Any) -> Callable[[], object]:
    return lambda: library.gemm_add_(*args)


REFUSED_GEMMS = [
    (
        gemm(A[0].float(), A[1], *B),
        "operand a has dtype torch.float32: expected torch.float8_e4m3fn",
    ),
    (
        gemm(*A, B[0].to(torch.float8_e5m2), B[1]),
        "operand b has dtype torch.float8_e5m2: expected torch.float8_e4m3fn",
    ),
    (
        gemm(A[0], A[1].double(), *B),
        "the scale of operand a has dtype torch.float64: expected torch.float32",
    ),
    (
        gemm(*STACK, *B),
        "operand a has 3 dimensions, shape [2, 3, 130]: expected 2; stacks of matrices are not "
        "supported here",
    ),
    (
        gemm(*A, B[0].t().contiguous().t(), B[1]),
        "operand b [5, 130] has strides (1, 5): FP8 GEMMs read operands contiguous along K; use "
        ".contiguous(), or the columnwise form of a transpose",
    ),
    (
        gemm(*A, B[0], B[1].t()),
        "the scale of operand b has shape [2, 5] for data [5, 130]: expected [5, 2] (1x128 "
        "blocks) or [1, 2] (128x128 blocks)",
    ),
    (
        gemm(A[0][:, :100].contiguous(), A[1][:, :1], *B),
        "cannot contract operand a [3, 100] with operand b [5, 130]: K is 100 in one and 130 in "
        "the other",
    ),
    (
        gemm(*A, B[0], meta(B[1])),
        "operand b is on cpu and the scale of operand b on meta: move them to one device",
    ),
    (
        gemm(*A, *map(meta, B)),
        "operand a is on cpu and operand b on meta: move them to one device",
    ),
    (
        gemm(*A, *B, out_dtype=torch.float64),
        "output dtype torch.float64: expected torch.bfloat16, torch.float16 or torch.float32",
    ),
    (
        gemm(*A, *B, bias=torch.zeros(3)),
        "the bias has shape [3]: expected [5], one entry for each output column",
    ),
    (
        gemm(*A, *B, bias=torch.zeros(5, 1)),
        "the bias has shape [5, 1]: expected [5], one entry for each output column",
    ),
    (
        gemm(*A, *B, bias=torch.zeros(5, device="meta")),
        "operand a is on cpu and the bias on meta: move them to one device",
    ),
    (
        gemm_add(torch.zeros(3, 5, dtype=torch.bfloat16), *A, *B),
        "gemm_add_ adds into torch.float32, got an output of torch.bfloat16",
    ),
    (
        gemm_add(torch.zeros(5, 3), *A, *B),
        "gemm_add_ needs an output [3, 5] with rows contiguous, got [5, 3] with strides (3, 1)",
    ),
    (
        gemm_add(torch.zeros(5, 3).t(), *A, *B),
        "gemm_add_ needs an output [3, 5] with rows contiguous, got [3, 5] with strides (1, 3)",
    ),
    (
        gemm_add(torch.zeros(3, 5, device="meta"), *A, *B),
        "operand a is on cpu and the output on meta: move them to one device",
    ),
    (
        gemm_add(torch.zeros(3, 5), A[0].float(), A[1], *B),
        "operand a has dtype torch.float32: expected torch.float8_e4m3fn",
    ),
    (
        gemm_add(torch.zeros(3, 5), *A, *STACK),
        "operand b has 3 dimensions, shape [2, 3, 130]: expected 2; stacks of matrices are not "
        "supported here",
    ),
    (
        gemm_add(torch.zeros(3, 5), *A, B[0][:, :128].contiguous(), B[1][:, :1]),
        "cannot contract operand a [3, 130] with operand b [5, 128]: K is 130 in one and 128 in "
        "the other",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED_GEMMS)
def test_refused_gemms(call: Callable[[], object], text: str) -> None:
    is_about_types = " dtype " in text or "adds into" in text
    with pytest.raises(TypeError if is_about_types else ValueError) as error:
        call()
    assert str(error.value) == text


CASTS = ("quantize_rowwise", "quantize_columnwise", "quantize_both", "quantize_square")


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, E4M3])
def test_refused_dtypes(cast: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError) as error:
        getattr(library, cast)(torch.zeros(3, 5).to(dtype), False)
    assert str(error.value) == (
        f"the tensor to quantize has dtype {dtype}: blocktensor casts torch.bfloat16, "
        "torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)"
    )


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("cast", CASTS)
def test_refused_ranks(cast: str, shape: tuple[int, ...]) -> None:
    if cast == "quantize_square":
        end = "2 or 3; 128x128 blocks need [N, K] or [E, N, K]"
        shape = (1, *shape) if len(shape) == 3 else shape
    else:
        end = "2; flatten leading dimensions with .flatten(0, -2)"
    with pytest.raises(ValueError, match="dimensions") as error:
        getattr(library, cast)(torch.zeros(shape), False)
    assert str(error.value) == (
        f"the tensor to quantize has {len(shape)} dimensions, shape {list(shape)}: expected {end}"
    )


# What tensors are built from


def test_block_shapes() -> None:
    checks.block_shape((1, 128))
    checks.block_shape((128, 128))
    with pytest.raises(ValueError, match="block_shape") as error:
        checks.block_shape((128, 1))
    assert str(error.value) == (
        "block_shape (128, 1): expected (1, 128) (activations, gradients) or (128, 128) (weights)"
    )


ROW, SQUARE = (1, 128), (128, 128)


@pytest.mark.parametrize(
    ("data", "scale", "block"),
    [(*A, ROW), (A[0], torch.ones(1, 2), SQUARE), (*STACK, SQUARE)],
)
def test_casts_that_fit(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    checks.cast_data(data, scale, block)


@pytest.mark.parametrize(
    ("data", "scale", "block", "error", "text"),
    [
        (
            A[0].float(),
            A[1],
            ROW,
            TypeError,
            "FP8 data has dtype torch.float32: expected torch.float8_e4m3fn",
        ),
        (
            A[0],
            A[1].half(),
            ROW,
            TypeError,
            "scales have dtype torch.float16: expected torch.float32",
        ),
        (
            *STACK,
            ROW,
            ValueError,
            "FP8 data has 3 dimensions, shape [2, 3, 130]: expected 2; 1x128 data is [M, K], "
            "128x128 data [N, K] or [E, N, K]",
        ),
        (
            STACK[0][0, 0],
            A[1],
            SQUARE,
            ValueError,
            "FP8 data has 1 dimensions, shape [130]: expected 2 or 3; 1x128 data is [M, K], "
            "128x128 data [N, K] or [E, N, K]",
        ),
        (
            *A,
            SQUARE,
            ValueError,
            "scales have shape [3, 2] for data [3, 130] in blocks of (128, 128): expected [1, 2]",
        ),
        (
            STACK[0],
            STACK[1][:1],
            SQUARE,
            ValueError,
            "scales have shape [1, 1, 2] for data [2, 3, 130] in blocks of (128, 128): expected "
            "[2, 1, 2]",
        ),
        (
            A[0],
            meta(A[1]),
            ROW,
            ValueError,
            "FP8 data is on cpu and its scales on meta: move them to one device",
        ),
    ],
)
def test_casts_that_do_not_fit(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error) as raised:
        checks.cast_data(data, scale, block)
    assert str(raised.value) == text


def test_scales_are_laid_out_once() -> None:
    data, scale = operand(5, 300, 1, torch.Generator().manual_seed(0))
    assert checks.laid_out(scale, data, ROW) is scale
    copy = checks.laid_out(scale.contiguous(), data, ROW)
    assert copy.stride() == empty_rowwise_scale(5, 300, CPU).stride()
    assert_same(copy, scale)
    stack = torch.zeros(2, 129, 300).to(E4M3)
    scale = torch.rand(2, 2, 3)
    copy = checks.laid_out(scale, stack, SQUARE)
    assert copy.stride() == empty_square_scale(stack.shape, CPU).stride()
    assert_same(copy, scale)
