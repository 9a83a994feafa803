"""dgrad as one op: the bits of the ops it is made of, and what a registered op must hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocktensor.ops import dgrad, reference
from tests.numeric import assert_same, operand, values

OPS = torch.ops.blocktensor
SHAPES = ((5, 300, 130), (128, 128, 256), (1, 1, 1), (0, 5, 3), (5, 0, 7), (3, 7, 0))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
DTYPES = (torch.bfloat16, torch.float32)


def samples(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    m, n, k = shape
    rng = torch.Generator().manual_seed(0)
    g, w = operand(m, n, 1, rng), values("normal", n, k, dtype, rng)
    return {
        "dgrad_of_rowwise": (*g, *reference.quantize_square(w, True), dtype),
        "dgrad_of_master": (*g, w, True, dtype),
    }


def wanted(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    g, g_scale, w, w_scale, _ = samples(shape, dtype)["dgrad_of_rowwise"]
    return reference.gemm(g, g_scale, *reference.transpose_square(w, w_scale), None, dtype)


@every_shape
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_product_with_the_columnwise_form(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    args = samples(shape, dtype)
    assert_same(dgrad.of_rowwise(*args["dgrad_of_rowwise"]), wanted(shape, dtype))
    assert_same(dgrad.of_master(*args["dgrad_of_master"]), wanted(shape, dtype))
    g, g_scale, w, *rest = args["dgrad_of_master"]
    assert_same(dgrad.of_master(g, g_scale, w.t().contiguous().t(), *rest), wanted(shape, dtype))


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
