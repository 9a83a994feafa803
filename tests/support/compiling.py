"""Shared by the tests of torch.compile: a clean start, and how many graphs there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing compiled before counts; and fresh memory is not filled, which compilers see."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """:func:`fresh`, for every test of a file that imports it."""
    with fresh():
        yield


def graphs() -> int:
    """How many were compiled since; none has a break."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]
