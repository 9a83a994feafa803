"""Casts that are made of other casts, and casts with their transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocktensor.ops import reference
from blocktensor.ops.cast import ops
from blocktensor.ops.cast.choose_backend import cast_backend
from blocktensor.ops.cast.ops import quantize_transpose, quantize_with_transpose
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2, BlockFormat
from tests.support.casts import gluon_takes
from tests.support.models import Trace, randn
from tests.support.numeric import DTYPES, KINDS, assert_same, to_device, values
from tests.support.reference_ops import decide_anew

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(0, 128), (1, 1), (128, 0), (127, 129), (128, 300), (160, 10), (576, 1096), (300, 576)]


@pytest.mark.parametrize("format", [BLOCKS_128X128, BLOCKS_128X128_POW2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_quantize_transpose(device: str, shape: tuple[int, int], format: BlockFormat) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = randn(*shape, dtype=dtype, device=device)
        for lies in (x, x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]):
            got = quantize_transpose(lies, format)
            want = reference.transpose(reference.quantize_rowwise(x.cpu(), format))
            assert_same(got.data.cpu(), want.data)
            assert_same(got.scale.cpu(), want.scale)
            assert got.scale.stride() == want.scale.stride()
            assert got.format is format


def test_a_stack_is_transposed_matrix_by_matrix() -> None:
    x = randn(3, 130, 70)
    got = quantize_transpose(x, BLOCKS_128X128)
    assert_same(got.data, reference.transpose(reference.quantize_rowwise(x, BLOCKS_128X128)).data)


def noting(name: str, function: Callable[..., Any], ran: list[str]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        ran.append(name)
        return function(*args)

    return run


def test_what_runs() -> None:
    """Whole vectors of rows are cast at once; other matrices are cast, then transposed."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "blocktensor":
                names.append(func.__name__.removesuffix(".default"))
            return func(*args, **kwargs or {})

    for x, want in (
        (randn(160, 70), ["quantize_columnwise"]),
        (randn(70, 150).t(), ["quantize_rowwise"]),
        (randn(150, 70), ["quantize_rowwise", "transpose"]),
    ):
        names: list[str] = []
        with Names():
            quantize_transpose(x, BLOCKS_128X128)
        assert names == ["quantize_transpose"]  # compilers see one op
        ran: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            decide_anew(patch)
            for name in ("quantize_columnwise", "quantize_rowwise", "transpose"):
                patch.setattr(ops, name, noting(name, getattr(ops, name), ran))
            quantize_transpose(x, BLOCKS_128X128)
        assert ran == want


# With the transpose: in one pass where rows are whole vectors, or two

PASS_SHAPES = [
    *((0, 128), (128, 0), (16, 1), (16, 2), (48, 130), (128, 128), (576, 1096), (10944, 64)),
    *((1, 1), (127, 129), (129, 128), (300, 576)),
]
SQUARES = [BLOCKS_128X128, BLOCKS_128X128_POW2]


def check(x: Tensor, format: BlockFormat) -> None:
    """The forms of ``x`` have the bytes and the layout of the reference's."""
    wanted = reference.quantize_with_transpose(x.cpu(), format)
    for got, want in zip(quantize_with_transpose(x, format), wanted, strict=True):
        assert_same(got.data.cpu(), want.data)
        assert_same(got.scale.cpu(), want.scale)
        assert got.data.is_contiguous()
        assert got.scale.stride() == want.scale.stride()
        assert got.format is format


@pytest.mark.parametrize("format", SQUARES, ids=str)
@pytest.mark.parametrize("shape", PASS_SHAPES, ids=str)
def test_casts_of_matrices_with_their_transpose(
    shape: tuple[int, int], format: BlockFormat, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for kind in KINDS:
            x = to_device(values(kind, *shape, dtype, rng), device)
            check(x, format)
        for lies in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]):
            check(lies, format)


@pytest.mark.parametrize("format", SQUARES, ids=str)
@pytest.mark.parametrize("shape", [(3, 128, 256), (2, 272, 130), (2, 130, 70), (0, 128, 128)])
def test_casts_of_stacks_with_their_transpose(
    shape: tuple[int, ...], format: BlockFormat, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(0)
    experts, n, k = shape
    for dtype in DTYPES:
        x = values("normal", experts * n, k, dtype, rng).view(shape)
        x = to_device(x * torch.tensor([1, 1e-3, 64]).to(dtype)[:experts, None, None], device)
        for lies in (x, x.mT.contiguous().mT, torch.cat([x, x], -1)[..., :k]):
            check(lies, format)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_and_empty_blocks(dtype: torch.dtype, device: torch.device) -> None:
    """Of blocks below 2^-60, the elements are multiplied before they are divided."""
    x = randn(256, 384, dtype=torch.float32)
    x[:128, :128] *= 2.0**-90
    x[128:, 128:256] = 0
    x[128:, 256:] *= -0.0
    for format in SQUARES:
        check(to_device(x.to(dtype), device), format)


@pytest.mark.gpu
def test_one_pass_is_taken_where_rows_are_whole_vectors() -> None:
    for shape, passes in (((160, 70), 1), ((150, 70), 2), ((160, 71), 2), ((3, 160, 70), 1)):
        x = randn(*shape, device="cuda")
        one_pass = cast_backend(x, BLOCKS_128X128).function("quantize_with_transpose") is not None
        assert one_pass == gluon_takes(x, BLOCKS_128X128)
        decided = ops._decide_with_transpose(x, BLOCKS_128X128)
        assert (decided is ops._in_two_passes) == (passes == 2)


def test_it_is_one_op() -> None:
    x = randn(160, 70)
    with Trace() as trace:
        quantize_with_transpose(x, BLOCKS_128X128)
    assert trace.ops == ["blocktensor.quantize_with_transpose 128x128"]
