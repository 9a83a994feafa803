"""dgrad as one op: the bits of the ops it is made of, and what a registered op must hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BLOCKS_128X128_POW2, Quantized
from blocktensor.ops.gemm.dgrad_ops import dgrad_of_master, dgrad_of_rowwise
from tests.support.numeric import assert_same, operand, values

OPS = torch.ops.blocktensor
SHAPES = ((5, 300, 130), (128, 128, 256), (1, 1, 1), (0, 5, 3), (5, 0, 7), (3, 7, 0))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
DTYPES = (torch.bfloat16, torch.float32)


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Quantized, Tensor]:
    """The gradient ``[M, N]`` in FP8 and the weight ``[N, K]``."""
    m, n, k = shape
    rng = torch.Generator().manual_seed(0)
    return operand(m, n, 1, rng), values("normal", n, k, dtype, rng)


def samples(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """The arguments of the registered ops, by name."""
    g, w = operands(shape, dtype)
    w_fp8 = reference.quantize_rowwise(w, BLOCKS_128X128_POW2)
    given = g.data, g.scale, BLOCKS_1X128.name
    return {
        "dgrad_of_rowwise": (*given, w_fp8.data, w_fp8.scale, BLOCKS_128X128_POW2.name, dtype),
        "dgrad_of_master": (*given, w, BLOCKS_128X128_POW2.name, dtype),
    }


def wanted(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    g, w = operands(shape, dtype)
    columnwise = reference.transpose(reference.quantize_rowwise(w, BLOCKS_128X128_POW2))
    return reference.gemm(g, columnwise, None, dtype)


@every_shape
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_product_with_the_columnwise_form(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    (g, w), want = operands(shape, dtype), wanted(shape, dtype)
    w_fp8 = reference.quantize_rowwise(w, BLOCKS_128X128_POW2)
    assert_same(dgrad_of_rowwise(g, w_fp8, dtype), want)
    assert_same(dgrad_of_master(g, w, BLOCKS_128X128_POW2, dtype), want)
    assert_same(dgrad_of_master(g, w.t().contiguous().t(), BLOCKS_128X128_POW2, dtype), want)
    for name, args in samples(shape, dtype).items():
        assert_same(getattr(OPS, name)(*args), want)


def test_the_rounding_of_scales_is_that_of_the_weights_format() -> None:
    g, w = operands((5, 300, 130), torch.float32)
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        w_fp8 = reference.quantize_rowwise(w, format)
        want = reference.gemm(g, reference.transpose(w_fp8), None, torch.float32)
        assert_same(dgrad_of_rowwise(g, w_fp8, torch.float32), want)
        assert_same(dgrad_of_master(g, w, format, torch.float32), want)
    assert not torch.equal(want, dgrad_of_master(g, w, BLOCKS_128X128, torch.float32))


def test_a_weight_in_blocks_that_cannot_be_transposed_is_refused() -> None:
    g, w = operands((5, 300, 130), torch.float32)
    with pytest.raises(ValueError, match="a cast in 1x128 blocks has no exact transpose"):
        dgrad_of_master(g, w, BLOCKS_1X128, torch.float32)
    with pytest.raises(ValueError, match="a cast in 1x128 blocks has no exact transpose"):
        dgrad_of_rowwise(g, reference.quantize_rowwise(w, BLOCKS_1X128), torch.float32)


@every_shape
@pytest.mark.parametrize("name", ["dgrad_of_rowwise", "dgrad_of_master"])
def test_opcheck(name: str, shape: tuple[int, int, int]) -> None:
    args = samples(shape, torch.bfloat16)[name]
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    passed = torch.library.opcheck(getattr(OPS, name).default, args, test_utils=checks)
    assert passed == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("name", ["dgrad_of_rowwise", "dgrad_of_master"])
def test_flops(name: str) -> None:
    with FlopCounterMode(display=False) as counter:
        getattr(OPS, name)(*samples((5, 300, 130), torch.bfloat16)[name])
    assert counter.get_total_flops() == 2 * 5 * 300 * 130  # not again for the product inside


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("name", ["dgrad_of_rowwise", "dgrad_of_master"])
def test_on_a_gpu(name: str, shape: tuple[int, int, int]) -> None:
    args = samples(shape, torch.bfloat16)[name]
    on_gpu = [a.cuda() if isinstance(a, Tensor) else a for a in args]
    got = getattr(OPS, name)(*on_gpu).cpu()
    want = wanted(shape, torch.bfloat16)
    assert got.shape == want.shape
    assert (got.float() - want.float()).norm() <= 2**-7 * want.float().norm()
