"""Pick rows of BlockwiseFP8Tensors: tokens, in the order of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.cast.rows import picked
from ..base import implements
from ..fp8_tensor import ATEN_OPS, BlockwiseFP8Tensor
from ..operand import Operand
from ..refusals import refuse, refuse_to_pick

aten = torch.ops.aten


@implements(ATEN_OPS, aten.index_select.default)
def _index_select(func: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return _rows(func, x, index if dim % x.ndim == 0 else None)


@implements(ATEN_OPS, aten.index.Tensor)
def _index(func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    return _rows(func, x, indices[0] if indices[1:] in ([], [None]) else None)


@implements(ATEN_OPS, aten.gather.default)
def _gather(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _rows(func, x, None)


def _rows(func: Any, x: Tensor, index: Tensor | None) -> BlockwiseFP8Tensor:
    """Return the rows ``index`` of tokens; refuse other picks.

    Blocks of one row lie within it. Columnwise blocks lie along the rows, so that the result holds
    none: they are derived later.
    """
    if isinstance(x, BlockwiseFP8Tensor) and x.format.transposes and x.ndim > 2:
        refuse_to_pick(func, x, ".dequantize()")
    if not isinstance(x, BlockwiseFP8Tensor) or not _picks_rows(x, index):
        refuse(func)
    assert index is not None
    operand = Operand(picked(x.rowwise(), index), None)
    return x.like(operand, (index.shape[0], x.shape[1]), None)


def _picks_rows(x: BlockwiseFP8Tensor, index: Tensor | None) -> bool:
    row = x.rowwise_format
    return (
        index is not None
        and index.ndim == 1
        and index.dtype in (torch.int64, torch.int32)
        and x.ndim == 2
        and x.rowwise_data is not None
        and row.rows == 1
        and (row.power_of_two or x.columnwise_data is None)
        and x.source is None
        and x.prepared is None
    )
