"""The order in which ways to store a tensor are tried, if transformers would misread it."""

from __future__ import annotations

import pytest
from torch import nn

from blocktensor.checkpoint.described import _next_way, _Way
from blocktensor.checkpoint.export import Exported
from blocktensor.checkpoint.stored import Stored, whole

OTHERS = [[whole(name, (128, 128))] for name in ("a", "z")]
"""Groups of other tensors, of names before and behind those in question."""


def ways(*stored: Stored) -> list[_Way]:
    """Return the ways of the tensor "m", which are tried until none is left."""
    found = Exported(nn.Module(), {}, (), [], [*OTHERS, list(stored)], False)
    tried = [_Way.FP8]
    while tried[-1] is not _Way.NONE:
        tried.append(_next_way(found, "m", tried[-1]))
    return tried


@pytest.mark.parametrize(
    "stored",
    [
        [whole("n", (128, 128))._replace(of=("m",))],
        [whole("l", (128, 128))._replace(of=("m",))],
        [whole(f"m.{i}", (128, 128))._replace(of=("m",)) for i in range(2)],
        [whole("m", (128, 128)), whole("o", (128, 128))],
    ],
    ids=["renamed behind", "renamed before", "cut", "joined"],
)
def test_a_tensor_under_other_names_may_get_its_own(stored: list[Stored]) -> None:
    assert ways(*stored) == [*_Way]


def test_a_tensor_under_its_own_name_has_no_other() -> None:
    assert ways(whole("m", (128, 128))) == [_Way.FP8, _Way.PLAIN, _Way.NONE]
