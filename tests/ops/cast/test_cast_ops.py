"""Casts that are made of other casts."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blocktensor.ops import reference
from blocktensor.ops.cast.ops import quantize_transpose
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BLOCKS_128X128_POW2, BlockFormat
from tests.support.models import randn
from tests.support.numeric import assert_same

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
        assert names == want


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="a cast in 1x128 blocks has no exact transpose"):
        quantize_transpose(randn(128, 128), BLOCKS_1X128)
