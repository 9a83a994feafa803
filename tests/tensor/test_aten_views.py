"""The ops that keep a BlockwiseFP8Tensor in FP8: labels that move no bytes, and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor
from blocktensor.ops import reference
from tests.support.models import (
    ROW,
    SQUARE,
    assert_same,
    complaint,
    pointers,
    quantized,
    randn,
)

TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "transpose(-1, -2)": lambda x: x.transpose(-1, -2),
    "permute": lambda x: x.permute(1, 0),
    "adjoint": lambda x: x.adjoint(),
}


@pytest.mark.parametrize("name", TRANSPOSES)
@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_transposing_swaps_the_labels(block: tuple[int, int], name: str) -> None:
    x = quantized(200, 300, block=block)
    flipped = TRANSPOSES[name](x)
    assert (tuple(flipped.shape), flipped.stride()) == ((300, 200), (1, 300))
    swapped = {"rowwise": "columnwise", "columnwise": "rowwise"}
    assert pointers(flipped) == {
        f"{swapped[side]}_{kind}": pointer
        for (side, kind), pointer in ((k.split("_"), p) for k, p in pointers(x).items())
    }
    back = TRANSPOSES[name](flipped)
    assert_same(back, x)
    assert pointers(back) == pointers(x)
    if block == SQUARE:
        assert torch.equal(flipped.dequantize(), x.dequantize().t())


def test_transposing_a_stack() -> None:
    x = quantized(3, 200, 130, block=SQUARE)
    assert tuple(x.mT.shape) == (3, 130, 200)
    assert torch.equal(x.mT.dequantize(), x.dequantize().mT)
    assert_same(x.transpose(1, 2).permute(0, 2, 1), x)
    for bad in (lambda: x.t(), lambda: x.transpose(0, 1), lambda: x.permute(2, 1, 0)):
        with pytest.raises((NotImplementedError, RuntimeError)):
            bad()


@pytest.mark.parametrize("shape", [(2, 3, 200), (6, 200), (3, 2, 1, 200), (-1, 200), (1, -1, 200)])
def test_views_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = quantized(6, 200)
    for y in (x.view(shape), x.reshape(shape)):
        assert_same(y, BlockwiseFP8Tensor.quantize(randn(6, 200).view(shape)))
        assert pointers(y) == pointers(x)
    assert_same(x.view(shape).flatten(0, -2), x)


@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_detach_and_alias_share_bytes(block: tuple[int, int]) -> None:
    x = quantized(200, 300, block=block).requires_grad_()
    for y in (x.detach(), x.data, torch.ops.aten.alias(x), x.contiguous(), nn.Parameter(x)):
        assert_same(y.detach(), x.detach())
        assert pointers(y) == pointers(x)
    assert not x.detach().requires_grad
    for y in (x.t().detach(), x.t().data, x.detach().t(), torch.ops.aten.alias(x.t())):
        assert_same(y.detach(), x.detach().t())
        assert not y.is_contiguous()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(-1),
        lambda x: x.view(2, 512),
        lambda x: x.flatten(),
        lambda x: x.t().view(256, 2, 2),
        lambda x: x.t().view(2, 128, 4),
        lambda x: BlockwiseFP8Tensor.quantize(x.dequantize(), SQUARE).view(2, 2, 256),
        lambda x: x.view(2, 2, 256).transpose(0, 1),
        lambda x: x.view(2, 2, 256).mT,
        lambda x: x.view(2, 2, 256).permute(2, 0, 1),
    ],
)
def test_reshapes_that_move_blocks_are_refused(run: Callable[[Tensor], Any]) -> None:
    assert ".dequantize()" in complaint(
        NotImplementedError, lambda: run(BlockwiseFP8Tensor.quantize(randn(4, 256)))
    )


@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
def test_products_of_a_transpose_contract_any_number_of_tokens(tokens: int) -> None:
    """Its columnwise form, now rowwise, has zeros after them; other operands need not have any."""
    g, x = quantized(tokens, 40), quantized(tokens, 24)
    weight = quantized(tokens, 24, block=SQUARE)
    a = reference.dequantize(g.t().rowwise(), torch.float32)[:, :tokens]
    for other in (x, weight):
        b = reference.dequantize(other.columnwise(), torch.float32)[:, :tokens]
        torch.testing.assert_close(torch.mm(g.t(), other).float(), a @ b.t(), rtol=0.01, atol=0.01)
    assert torch.equal(g.t().dequantize(torch.float32), a)
