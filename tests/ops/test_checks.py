"""Every refusal: its type and its whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocktensor.ops import checks
from blocktensor.ops.cast import ops as cast_ops
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.gemm import ops as gemm_ops
from tests.support.numeric import E4M3

A = Quantized(torch.zeros(3, 130).to(E4M3), torch.ones(3, 2), BLOCKS_1X128)
B = Quantized(torch.zeros(5, 130).to(E4M3), torch.ones(5, 2), BLOCKS_1X128)
SQUARE = Quantized(A.data, torch.ones(1, 2), BLOCKS_128X128)
STACK = Quantized(torch.zeros(2, 3, 130).to(E4M3), torch.ones(2, 1, 2), BLOCKS_128X128)


def changed(x: Quantized, data: Any = None, scale: Any = None) -> Quantized:
    return Quantized(
        x.data if data is None else data, x.scale if scale is None else scale, x.format
    )


def narrow(x: Quantized, k: int) -> Quantized:
    """The first ``k`` columns, contiguous, with the scales of one block."""
    return changed(x, x.data[:, :k].contiguous(), x.scale[:, :1])


def meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def gemm(*args: Any, **kwargs: Any) -> Callable[[], object]:
    return lambda: gemm_ops.gemm(*args, **kwargs)


def gemm_add(*args: Any) -> Callable[[], object]:
    return lambda: gemm_ops.gemm_add_(*args)


REFUSED_GEMMS = [
    (
        gemm(changed(A, data=A.data.float()), B),
        "operand a has dtype torch.float32: expected torch.float8_e4m3fn",
    ),
    (
        gemm(A, changed(B, data=B.data.to(torch.float8_e5m2))),
        "operand b has dtype torch.float8_e5m2: expected torch.float8_e4m3fn",
    ),
    (
        gemm(changed(A, scale=A.scale.double()), B),
        "the scale of operand a has dtype torch.float64: expected torch.float32",
    ),
    (
        gemm(STACK, B),
        "operand a has 3 dimensions, shape [2, 3, 130]: expected 2; a grouped GEMM "
        "multiplies stacks",
    ),
    (
        gemm(A, changed(B, data=B.data.t().contiguous().t())),
        "operand b [5, 130] has strides (1, 5): FP8 GEMMs read operands contiguous along K; use "
        ".contiguous(), or the columnwise form of a transpose",
    ),
    (
        gemm(A, changed(B, scale=B.scale.t())),
        "the scale of operand b has shape [2, 5] for data [5, 130]: expected [5, 2] (1x128 blocks)",
    ),
    (
        gemm(A, B._replace(format=BLOCKS_128X128)),
        "the scale of operand b has shape [5, 2] for data [5, 130]: expected [1, 2] (128x128 "
        "blocks)",
    ),
    (
        gemm(SQUARE._replace(format=BLOCKS_1X128_POW2), B),
        "the scale of operand a has shape [1, 2] for data [3, 130]: expected [3, 2] (1x128_pow2 "
        "blocks)",
    ),
    (
        gemm(narrow(A, 100), B),
        "cannot contract operand a [3, 100] with operand b [5, 130]: K is 100 in one and 130 in "
        "the other",
    ),
    (
        gemm(A, changed(B, scale=meta(B.scale))),
        "operand b is on cpu and the scale of operand b on meta: move them to one device",
    ),
    (
        gemm(A, changed(B, meta(B.data), meta(B.scale))),
        "operand a is on cpu and operand b on meta: move them to one device",
    ),
    (
        gemm(A, B, out_dtype=torch.float64),
        "output dtype torch.float64: expected torch.bfloat16, torch.float16 or torch.float32",
    ),
    (
        gemm(A, B, bias=torch.zeros(3)),
        "the bias has shape [3]: expected [5], one entry for each output column",
    ),
    (
        gemm(A, B, bias=torch.zeros(5, 1)),
        "the bias has shape [5, 1]: expected [5], one entry for each output column",
    ),
    (
        gemm(A, B, bias=torch.zeros(5, device="meta")),
        "operand a is on cpu and the bias on meta: move them to one device",
    ),
    (
        gemm_add(torch.zeros(3, 5, dtype=torch.bfloat16), A, B),
        "gemm_add_ adds into torch.float32, got an output of torch.bfloat16",
    ),
    (
        gemm_add(torch.zeros(5, 3), A, B),
        "gemm_add_ needs an output [3, 5] with rows contiguous, got [5, 3] with strides (3, 1)",
    ),
    (
        gemm_add(torch.zeros(5, 3).t(), A, B),
        "gemm_add_ needs an output [3, 5] with rows contiguous, got [3, 5] with strides (1, 3)",
    ),
    (
        gemm_add(torch.zeros(3, 5, device="meta"), A, B),
        "operand a is on cpu and the output on meta: move them to one device",
    ),
    (
        gemm_add(torch.zeros(3, 5), changed(A, data=A.data.float()), B),
        "operand a has dtype torch.float32: expected torch.float8_e4m3fn",
    ),
    (
        gemm_add(torch.zeros(3, 5), A, STACK),
        "operand b has 3 dimensions, shape [2, 3, 130]: expected 2; a grouped GEMM "
        "multiplies stacks",
    ),
    (
        gemm_add(torch.zeros(3, 5), A, narrow(B, 128)),
        "cannot contract operand a [3, 130] with operand b [5, 128]: K is 130 in one and 128 in "
        "the other",
    ),
]


@pytest.mark.parametrize(("k", "other"), [(130, 144), (144, 130), (130, 130), (1, 16), (0, 0)])
def test_one_side_may_be_filled_up_with_zeros(k: int, other: int) -> None:
    checks.same_contraction(torch.empty(3, k), torch.empty(5, other))


@pytest.mark.parametrize(("k", "other"), [(130, 131), (130, 128), (128, 144), (144, 160), (0, 1)])
def test_other_contractions_are_refused(k: int, other: int) -> None:
    with pytest.raises(ValueError, match=f"K is {k} in one and {other} in the other"):
        checks.same_contraction(torch.empty(3, k), torch.empty(5, other))


@pytest.mark.parametrize(("call", "text"), REFUSED_GEMMS)
def test_refused_gemms(call: Callable[[], object], text: str) -> None:
    is_about_types = " dtype " in text or "adds into" in text
    for _ in range(2):  # a refusal is not remembered as a decision
        with pytest.raises(TypeError if is_about_types else ValueError) as error:
            call()
        assert str(error.value) == text


def test_an_accepted_kind_lets_no_other_pass() -> None:
    """Checks are made once for each kind of call: with the same shapes, other dtypes, say."""
    gemm_ops.gemm(A, B)
    for call, text in REFUSED_GEMMS[:3]:
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value) == text


def name(value: object) -> str:
    return value.name if isinstance(value, BlockFormat) else str(value)


CASTS = [
    *(
        (cast, format)
        for cast in ("quantize_rowwise", "quantize_columnwise", "quantize_both")
        for format in (BLOCKS_1X128, BLOCKS_1X128_POW2)
    ),
    ("quantize_rowwise", BLOCKS_128X128),
    ("quantize_rowwise", BLOCKS_128X128_POW2),
    ("quantize_columnwise", BLOCKS_128X128),
]
every_cast = pytest.mark.parametrize(("cast", "format"), CASTS, ids=name)


@every_cast
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, E4M3])
def test_refused_dtypes(cast: str, format: BlockFormat, device: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError) as error:
        getattr(cast_ops, cast)(torch.zeros(3, 5).to(device, dtype), format)
    assert str(error.value) == (
        f"the tensor to quantize has dtype {dtype}: blocktensor casts torch.bfloat16, "
        "torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)"
    )


@every_cast
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 5), (2, 3, 4, 5)])
def test_refused_ranks(cast: str, format: BlockFormat, shape: tuple[int, ...]) -> None:
    if format.rows > 1:
        end = f"2 or 3; {format.name} blocks need [N, K] or [E, N, K]"
        if len(shape) == 3:
            shape = (1, *shape)
    else:
        end = "2; flatten leading dimensions with .flatten(0, -2)"
    with pytest.raises(ValueError, match="dimensions") as error:
        getattr(cast_ops, cast)(torch.zeros(shape), format)
    assert str(error.value) == (
        f"the tensor to quantize has {len(shape)} dimensions, shape {list(shape)}: expected {end}"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_columnwise_casts_are_those_of_a_matrix(device: str) -> None:
    stack = torch.zeros(2, 3, 5, device=device)
    with pytest.raises(ValueError, match="dimensions") as error:
        cast_ops.quantize_columnwise(stack, BLOCKS_128X128)
    assert str(error.value) == (
        "the tensor to quantize has 3 dimensions, shape [2, 3, 5]: expected 2; columnwise casts "
        "are those of a matrix [M, K]"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("format", [BLOCKS_128X128, BLOCKS_128X128_POW2], ids=name)
def test_square_blocks_need_no_columnwise_cast(format: BlockFormat, device: str) -> None:
    with pytest.raises(ValueError, match="columnwise") as error:
        cast_ops.quantize_both(torch.zeros(3, 5, device=device), format)
    assert str(error.value) == (
        f"a columnwise cast in {format.name} blocks is the transpose of the rowwise one: use "
        "quantize_transpose(x, format)"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("format", [BLOCKS_1X128, BLOCKS_1X128_POW2], ids=name)
def test_other_blocks_have_no_transpose(format: BlockFormat, device: str) -> None:
    x = Quantized(A.data.to(device), A.scale.to(device), format)
    with pytest.raises(ValueError, match="transpose") as error:
        cast_ops.transpose(x)
    assert str(error.value) == (
        f"a cast in {format.name} blocks has no exact transpose: quantize x.t()"
    )


# What tensors are built from


@pytest.mark.parametrize(
    "x",
    [
        A,
        A._replace(format=BLOCKS_1X128_POW2),
        SQUARE,
        STACK,
        STACK._replace(format=BLOCKS_128X128_POW2),
    ],
)
def test_casts_that_fit(x: Quantized) -> None:
    checks.quantized(x)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (
            changed(A, data=A.data.float()),
            TypeError,
            "FP8 data has dtype torch.float32: expected torch.float8_e4m3fn",
        ),
        (
            changed(A, scale=A.scale.half()),
            TypeError,
            "scales have dtype torch.float16: expected torch.float32",
        ),
        (
            STACK._replace(format=BLOCKS_1X128),
            ValueError,
            "FP8 data has 3 dimensions, shape [2, 3, 130]: expected 2; 1x128 data is [M, K], "
            "128x128 data [N, K] or [E, N, K]",
        ),
        (
            Quantized(STACK.data[0, 0], A.scale, BLOCKS_128X128),
            ValueError,
            "FP8 data has 1 dimensions, shape [130]: expected 2 or 3; 1x128 data is [M, K], "
            "128x128 data [N, K] or [E, N, K]",
        ),
        (
            A._replace(format=BLOCKS_128X128),
            ValueError,
            "scales have shape [3, 2] for data [3, 130] in blocks of (128, 128): expected [1, 2]",
        ),
        (
            changed(STACK, scale=STACK.scale[:1]),
            ValueError,
            "scales have shape [1, 1, 2] for data [2, 3, 130] in blocks of (128, 128): expected "
            "[2, 1, 2]",
        ),
        (
            changed(A, scale=meta(A.scale)),
            ValueError,
            "FP8 data is on cpu and its scales on meta: move them to one device",
        ),
    ],
)
def test_casts_that_do_not_fit(x: Quantized, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        checks.quantized(x)
    assert str(raised.value) == text
