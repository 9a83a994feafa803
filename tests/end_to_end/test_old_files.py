"""Frozen weights in files from before the modules moved load as if saved today."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from blocktensor import (
    BlockwiseFP8Tensor,
    Recipe,
)
from blocktensor.tensor.base import FP8Base
from tests.support.models import (
    RECIPES,
    ROW,
    SQUARE,
    assert_same,
    quantized,
)


def saved_as_before(what: Any, frozen: list[BlockwiseFP8Tensor]) -> io.BytesIO:
    """A file of ``what``, in which the tensors ``frozen`` are, as it was before the move."""
    formats, file = [x.formats for x in frozen], io.BytesIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BlockwiseFP8Tensor, "__module__", "blocktensor.tensor")
        patched.delattr(FP8Base, "__reduce_ex__")
        for x in frozen:
            x.__dict__["block_shape"] = x.block_shape
            del x.rowwise_format, x.columnwise_format
        torch.save(what, file)
    for x, of_forms in zip(frozen, formats, strict=True):
        del x.__dict__["block_shape"]
        x.rowwise_format, x.columnwise_format = of_forms
    assert b"blocktensor.tensor." not in file.getvalue()
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)
def test_frozen_tensors(block: tuple[int, int], recipe: Recipe, weights_only: bool) -> None:
    x = quantized(200, 300, block=block, recipe=recipe)
    for saved in (x, x.t()):
        file = saved_as_before({"w": saved}, [saved])
        assert b"cblocktensor.tensor\nBlockwiseFP8Tensor\n" in file.getvalue()
        loaded = torch.load(file, weights_only=weights_only)["w"]
        assert_same(loaded, saved)
        assert loaded.format is saved.format
        assert vars(loaded).keys() == vars(saved).keys()
