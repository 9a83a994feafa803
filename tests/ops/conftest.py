"""Fixtures of tests of ops."""

from __future__ import annotations

import pytest
from torch import Generator

from tests.support.backends import pretend

__all__ = ["pretend"]


@pytest.fixture
def rng() -> Generator:
    return Generator().manual_seed(0)
