"""Shared by the tests of torch.compile: a clean start, and how many graphs there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Nothing compiled before counts; and fresh memory is not filled, which compilers see."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many were compiled since; none has a break."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]
