"""Rows of tokens in FP8, in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, Recipe, quantize
from tests.support.models import POWER_OF_TWO, X_IN_POWERS, randn

ORDER = torch.tensor([4, 0, 0, 3])
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "x[order]": lambda x: x[ORDER],
    "x[order, :]": lambda x: x[ORDER, :],
    "int32": lambda x: x[ORDER.int()],
    "a list": lambda x: x[ORDER.tolist()],
    "index_select": lambda x: x.index_select(0, ORDER),
    "torch.index_select": lambda x: torch.index_select(x, -2, ORDER),
}


def arrived(k: int = 256, rows: int = 5, recipe: Recipe = X_IN_POWERS) -> BlockwiseFP8Tensor:
    return BlockwiseFP8Tensor.from_values(randn(rows, k), recipe=recipe, columnwise=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 130, 256])
def test_rows_keep_their_bytes(way: str, k: int) -> None:
    x = arrived(k).requires_grad_()
    y = WAYS[way](x)
    assert isinstance(y, BlockwiseFP8Tensor)
    assert (y.shape, y.dtype, y.recipe, y.formats) == ((4, k), x.dtype, x.recipe, x.formats)
    assert torch.equal(y.dequantize(), x.dequantize()[ORDER])
    assert x.rowwise_scale is not None and y.rowwise_scale is not None
    assert torch.equal(y.rowwise_scale, x.rowwise_scale[ORDER])
    grad = randn(4, k, seed=1)
    (dx,) = torch.autograd.grad(y.dequantize(), [x], grad)
    plain = randn(5, k).requires_grad_()
    (want,) = torch.autograd.grad(WAYS[way](plain), [plain], grad)
    assert torch.equal(dx, want)


def test_forms_that_hold_columnwise_blocks() -> None:
    """They are dropped where they can be derived; else the pick is refused."""
    x = quantize(randn(5, 256), POWER_OF_TWO)
    y = x[ORDER]
    assert isinstance(y, BlockwiseFP8Tensor) and y.columnwise_data is None
    assert torch.equal(y.dequantize(), x.dequantize()[ORDER])
    assert arrived(recipe=Recipe())[ORDER].shape == (4, 256)
    for given in (quantize(randn(5, 256)), quantize(randn(5, 256), Recipe.accurate())):
        with pytest.raises(NotImplementedError, match=r"aten\.index\.Tensor"):
            given[ORDER]


@pytest.mark.parametrize("index", [ORDER[:0], torch.arange(5)], ids=["none", "all"])
def test_numbers_of_rows(index: Tensor) -> None:
    x = arrived()
    assert torch.equal(x[index].dequantize(), x.dequantize()[index])
    assert torch.equal(x[1:][index[:4]].dequantize(), x[1:].dequantize()[index[:4]])


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, ORDER],
    "elements": lambda x: x[ORDER, ORDER],
    "a mask": lambda x: x[torch.ones(5, dtype=torch.bool)],
    "columns by index_select": lambda x: x.index_select(1, ORDER),
    "a matrix of indices": lambda x: x[ORDER[None]],
    "a transpose": lambda x: x.t()[ORDER],
}


@pytest.mark.parametrize("pick", REFUSED)
def test_other_picks_are_refused(pick: str) -> None:
    with pytest.raises(NotImplementedError, match="dequantize"):
        REFUSED[pick](arrived())
