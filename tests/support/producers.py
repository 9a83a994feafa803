"""What tests of producers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from blocktensor.ops import reference as casts
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from tests.support.numeric import assert_same

Formats = tuple[BlockFormat | None, BlockFormat | None]
FORMATS: tuple[Formats, ...] = (
    (BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_128X128),
    (None, BLOCKS_1X128),
    (None, BLOCKS_128X128),
    (BLOCKS_1X128, None),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2),
    (BLOCKS_1X128_POW2, BLOCKS_128X128_POW2),
)
SIZES = (0, 1, 127, 128, 129, 130, 136, 256, 300, 512, 576, 1096, 10944)


def by_casts(h: Tensor, formats: Formats) -> tuple[Any, Any]:
    """The forms of ``h``, each by a cast of its own."""
    row, col = formats
    return (
        None if row is None else casts.quantize_rowwise(h, row),
        None if col is None else casts.quantize_columnwise(h, col),
    )


def assert_same_forms(got: Iterable[Quantized | None], want: Iterable[Quantized | None]) -> None:
    """The same forms are there, of the same formats, bytes and scales."""
    for ours, theirs in zip(got, want, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert ours.format is theirs.format
        assert_same(ours.data.cpu(), theirs.data.cpu())
        assert_same(ours.scale.cpu(), theirs.scale.cpu())
