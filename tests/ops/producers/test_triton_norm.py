"""The PTX of norms computes the bits of eager mode, here and without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from blocktensor.ops.producers.norm_reference import normalize
from tests.support.numeric import DTYPES, assert_same, values
from tests.support.ptx import NAMES, U32, as_words, run

pytest.importorskip("triton")

from blocktensor.ops.producers.triton_norm import norm_ptx

KINDS = ["llama", "gemma"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["normal", "edges", "tiny", "zeros"])
def test_ptx(of: str, kind: Any, dtype: torch.dtype) -> None:
    """Every step is one multiplication or addition, which the interpreter rounds as a GPU does."""
    rng = torch.Generator().manual_seed(0)
    x = values(of, 64, 512, dtype, rng)
    weight = values("normal", 1, 512, dtype, rng)[0]
    rstd = torch.rand((64, 1), generator=rng) * 3
    want = normalize(x, rstd, weight, kind)
    per_word = 4 // dtype.itemsize
    words = as_words(x), as_words(weight.expand(x.shape).contiguous())
    by_element = rstd.expand(x.shape)
    with np.errstate(all="ignore"):
        ptx, constraints = norm_ptx(kind, NAMES[dtype], 1)
        once = run(ptx, [*words, as_words(by_element[:, ::per_word])], dtype)
        assert constraints.count("r") == 4
        ptx, constraints = norm_ptx(kind, NAMES[dtype], per_word)
        each = [as_words(by_element[:, i::per_word]) for i in range(per_word)]
        twice = run(ptx, [*words, *each], dtype)
        assert constraints.count("r") == 3 + per_word
    for made in (once, twice):
        got = torch.from_numpy(made.view(np.int32).copy()).view(dtype).view_as(x)
        assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_plus_zero(kind: str, dtype: torch.dtype) -> None:
    """A columnwise cast ends in zeros, which come from nothing in memory."""
    ptx, _ = norm_ptx(kind, NAMES[dtype], 1)
    assert (run(ptx, [np.zeros(4, U32)] * 3, dtype) == 0).all()
