"""The grouped linear of a stack without matrices: zeros, and gradients of zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, functional
from tests.support.groups import ends
from tests.support.models import randn

N, K = 144, 192


def none_of(*shape: int) -> nn.Parameter:
    return nn.Parameter(BlockwiseFP8Weight(torch.empty(0, *shape, dtype=torch.bfloat16)))


@pytest.mark.parametrize("rows", [0, 5])
def test_every_row_is_of_no_group(rows: int) -> None:
    """As of torch's own grouped product."""
    plain = torch.empty(0, N, K, dtype=torch.bfloat16, requires_grad=True)
    for w in (plain, none_of(N, K)):
        x = torch.full((rows, K), float("nan"), dtype=torch.bfloat16, requires_grad=True)
        y = torch._grouped_mm(x, w.transpose(1, 2), offs=ends())
        y.backward(torch.ones_like(y))
        assert torch.equal(y, torch.zeros(rows, N, dtype=torch.bfloat16)) or w is plain
        assert (y.shape, y.dtype) == ((rows, N), torch.bfloat16)
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert w.grad is not None
        assert (w.grad.shape, w.grad.dtype) == ((0, N, K), torch.bfloat16)
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_several_stacks_biases_and_autocast() -> None:
    ws = [none_of(N, K), none_of(256, K)]
    bias = torch.zeros(0, N, dtype=torch.bfloat16, requires_grad=True)
    x = randn(3, K, grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        ys: tuple[Tensor, ...] = functional.grouped_linear(x, ws, ends(), [bias, None])
    for y, n in zip(ys, (N, 256), strict=True):
        assert torch.equal(y, torch.zeros(3, n, dtype=torch.float16))
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape
    assert all(w.grad is not None for w in ws)


def test_fp8_rows_and_rows_of_another_width() -> None:
    rows = BlockwiseFP8Tensor.from_values(randn(3, K), columnwise=False)
    assert torch.equal(functional.grouped_linear(rows, none_of(N, K), ends()), torch.zeros(3, N))
    with pytest.raises(ValueError, match=r"K is 384 in one and 192 in the other"):
        functional.grouped_linear(randn(3, 2 * K), none_of(N, K), ends())
