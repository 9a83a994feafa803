"""Weight gradients in high precision: products of matrices and of groups, in every dtype."""

from __future__ import annotations

import pytest
import torch

from blocktensor import functional
from blocktensor.autograd.products import grouped_wgrad_in_high_precision as grouped_wgrad
from blocktensor.autograd.products import wgrad_in_high_precision as wgrad
from tests.support.groups import GROUPS, ends, ranges
from tests.support.models import Trace, randn
from tests.support.numeric import relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("out", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_sums_are_in_fp32_and_rounded_once(
    dtype: torch.dtype, out: torch.dtype, device: torch.device
) -> None:
    grad, x = (randn(2, 300, n, seed=n, dtype=dtype, device=device) for n in (9, 13))
    made = wgrad(grad, x, out)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((9, 13), out, True)
    exact = grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    assert relative_error(made, exact) <= {BF16: 3e-3, FP16: 4e-4, FP32: 1e-5}[out]


def test_the_input_takes_the_dtype_of_the_gradient() -> None:
    """As autocast rounds it for a linear that is not converted."""
    grad, x = randn(40, 9), randn(40, 13, dtype=FP32)
    assert torch.equal(wgrad(grad, x, FP32), wgrad(grad, x.bfloat16(), FP32))
    fp8 = functional.quantize(grad)
    assert torch.equal(wgrad(fp8, x, FP32), wgrad(fp8.dequantize(), x, FP32))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("n", "k"), [(16, 24), (9, 24), (16, 13), (9, 13)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_groups(groups: str, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of any width; without tokens zeros, and rows of no group reach nothing."""
    rows, sizes = GROUPS[groups]
    grad, x = (randn(rows, c, seed=c, dtype=dtype, device=device) for c in (n, k))
    grad[sum(sizes) :] = x[sum(sizes) :] = float("nan")
    made = grouped_wgrad(grad, x, ends(*sizes, device=device), FP32)
    assert (made.shape, made.dtype) == ((len(sizes), n, k), FP32)
    for e, inside in enumerate(ranges(ends(*sizes))):
        exact = grad[inside].double().t() @ x[inside].double()
        assert relative_error(made[e], exact) <= 3e-3 if exact.any() else not made[e].any()


def test_ends_that_decrease_or_lie_beyond_the_tokens(device: torch.device) -> None:
    grad, x = (randn(10, c, seed=c, device=device) for c in (16, 24))
    offs = torch.tensor([4, 2, -7, 10**6], dtype=torch.int32, device=device)
    made = grouped_wgrad(grad, x, offs, BF16)
    want = grouped_wgrad(grad, x, ends(4, 0, 0, 6, device=device), BF16)
    assert torch.equal(made, want)


def test_groups_in_bf16_are_one_product_without_a_read_on_the_host() -> None:
    with Trace() as trace:
        grouped_wgrad(randn(10, 16), randn(10, 24), ends(4, 6), BF16)
    assert trace.count("aten._grouped_mm") == 1
    assert trace.count("item") == trace.count("_local_scalar_dense") == trace.count("pad") == 0
