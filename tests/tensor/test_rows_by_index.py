"""Rows of tokens in FP8, picked by index: the bytes of a cast of these rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, quantize
from tests.support.models import POWER_OF_TWO, RECIPES, complaint, randn
from tests.support.numeric import assert_same

T, K = 70, 200
ORDER = torch.randperm(T, generator=torch.Generator().manual_seed(0))
SOME = torch.tensor([3, 3, 0, -1, 69])

PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a permutation": lambda x: x[ORDER],
    "and all columns": lambda x: x[ORDER, :],
    "index_select": lambda x: x.index_select(0, ORDER),
    "int32": lambda x: x.index_select(-2, ORDER.int()),
    "repeated, from the end": lambda x: x[SOME],
    "a mask": lambda x: x[torch.arange(T) % 3 == 1],
    "a list": lambda x: x[[0, 2]],
    "none": lambda x: x[ORDER[:0]],
}


@pytest.mark.parametrize("pick", PICKS)
def test_picked_rows_are_the_cast_of_picked_rows(pick: str) -> None:
    for recipe in RECIPES:
        x = randn(T, K)
        got = PICKS[pick](BlockwiseFP8Tensor.quantize(x, recipe=recipe, columnwise=False))
        wanted = BlockwiseFP8Tensor.quantize(PICKS[pick](x), recipe=recipe, columnwise=False)
        assert type(got) is BlockwiseFP8Tensor
        assert (got.shape, got.dtype, got.recipe) == (wanted.shape, wanted.dtype, recipe)
        assert_same(got.rowwise_data, wanted.rowwise_data)
        assert_same(got.rowwise_scale, wanted.rowwise_scale)
        assert got.rowwise_scale.stride() == wanted.rowwise_scale.stride()
        assert_same(got.dequantize(), wanted.dequantize())


def test_gradients_are_those_of_plain_rows() -> None:
    plain, x = (randn(T, K, grad=True) for _ in range(2))
    fp8 = quantize(x)
    rows = BlockwiseFP8Tensor(fp8.operand.rowwise, shape=fp8.shape, dtype=fp8.dtype)
    rows.requires_grad_()
    grad = randn(T, K, seed=1)
    rows[ORDER].backward(grad)
    plain[ORDER].backward(grad)
    assert rows.grad is not None
    assert plain.grad is not None
    assert torch.equal(rows.grad, plain.grad)


REFUSED: dict[str, Callable[[BlockwiseFP8Tensor], Tensor]] = {
    "columns": lambda x: x[:, ORDER],
    "columns, selected": lambda x: x.index_select(1, ORDER),
    "values": lambda x: x[SOME, SOME],
    "a matrix of indices": lambda x: x[ORDER.view(7, 10)],
    "gather": lambda x: x.gather(0, ORDER[:, None]),
}


@pytest.mark.parametrize("way", REFUSED)
def test_other_indices_are_refused(way: str) -> None:
    x = BlockwiseFP8Tensor.quantize(randn(T, K), recipe=POWER_OF_TWO, columnwise=False)
    text = complaint(NotImplementedError, lambda: REFUSED[way](x))
    assert "call .dequantize() first" in text.replace("\n", " ")


def test_rows_whose_columnwise_form_would_be_lost_are_refused() -> None:
    x = quantize(randn(4, 128))
    assert_expected_inline(
        complaint(NotImplementedError, lambda: x[torch.tensor([1])]),
        """\
aten.index.Tensor of BlockwiseFP8Tensor(shape=[4, 128], dtype=torch.bfloat16,
block_shape=(1, 128), scale='fp32', forms=rowwise+columnwise, device='cpu'), whose
columnwise blocks hold several rows each: index the tensor that it was cast from, or
.dequantize(), or cast rowwise alone (BlockwiseFP8Tensor.quantize(x,
columnwise=False))""",
    )
