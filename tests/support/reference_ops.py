"""Other functions in place of the reference's, for tests that watch or replace an op on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blocktensor.autograd import plan
from blocktensor.ops import reference
from blocktensor.ops.op import OPS


def decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tables of decisions for this test, which the next test does not see."""
    for table in (*OPS.values(), plan._PLANS):
        monkeypatch.setattr(table, "_table", {})


def replace_op(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """Run ``function`` where the backend "reference" would run its op of this name."""
    monkeypatch.setattr(reference, name, function)
    decide_anew(monkeypatch)
