"""How near weight gradients are to exact ones: of casts of outliers, and in high precision.

The error is that of casts: the product of the dequantized operands in float64 has nearly the same.
"""

from __future__ import annotations

import math

import pytest
import torch

from blocktensor import Recipe, functional
from blocktensor.autograd.matmuls import grouped_wgrad_in_high_precision as grouped_wgrad
from blocktensor.autograd.matmuls import wgrad_in_high_precision as wgrad
from tests.support.groups import GROUPS, ends, ranges
from tests.support.models import Trace, randn
from tests.support.numeric import relative_error
from tests.support.outliers import KINDS, TOKENS, K, N, normal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# inputs are bf16 and of each kind; gradients are normal
TABLE = {
    "normal": (28.7, 28.6, 55.6),
    "tokens lognormal": (30.6, 28.7, 55.6),
    "channels x100": (28.7, 28.5, 55.5),
    "tokens x1000": (30.8, 28.7, 55.6),
    "swiglu": (31.1, 29.6, 55.7),
    "heavy tails": (29.4, 28.8, 55.6),
}
"""dB of dw with ``wgrad_input`` "1x128", "128x128" and "high_precision", where dw alone is rounded.

Where elements of a block differ in size, those that count most are those that are cast best: blocks
of either kind gain on outliers, 1x128 ones more, and no input is worse than a normal one.
"""


def sqnr(kind: str, recipe: Recipe, device: torch.device) -> float:
    """Signal to quantization noise of dw, in dB."""
    rng = torch.Generator().manual_seed(0)
    x, grad = KINDS[kind](rng, TOKENS, K), normal(rng, TOKENS, N)
    x, grad = x.bfloat16().to(device), grad.bfloat16().to(device)
    w = torch.zeros(N, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    functional.linear(x, w, recipe=recipe).backward(grad)
    assert w.grad is not None
    exact = grad.double().t() @ x.double()
    return -20 * math.log10(relative_error(w.grad, exact))


@pytest.mark.parametrize("kind", KINDS)
def test_the_table(kind: str, device: torch.device) -> None:
    choices = [Recipe(wgrad_input=choice) for choice in ("1x128", "128x128", "high_precision")]
    for choice, wanted in zip(choices, TABLE[kind], strict=True):
        assert abs(sqnr(kind, choice, device) - wanted) <= 0.1
    assert sqnr(kind, Recipe(scale="power_of_two"), device) >= 27.5


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
    assert torch.equal(made, grouped_wgrad(grad, x, ends(4, 0, 0, 6, device=device), BF16))


def test_groups_in_bf16_are_one_product_without_a_read_on_the_host() -> None:
    with Trace() as trace:
        grouped_wgrad(randn(10, 16), randn(10, 24), ends(4, 6), BF16)
    assert trace.count("aten._grouped_mm") == 1
    assert trace.count("item") == trace.count("_local_scalar_dense") == trace.count("pad") == 0
