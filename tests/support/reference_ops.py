"""Other functions in place of the reference's, for tests that watch or replace an op on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blocktensor.autograd import plan
from blocktensor.ops import reference
from blocktensor.ops.cast import choose_backend as choose_cast
from blocktensor.ops.cast import grouped_ops as grouped_cast
from blocktensor.ops.cast import ops as cast
from blocktensor.ops.gemm import ops as gemm
from blocktensor.ops.grouped_gemm import ops as grouped_gemm
from blocktensor.ops.runtime.specialize import Specialized

TABLES: tuple[Specialized[Any], ...] = (
    cast._rowwise,
    cast._columnwise,
    cast._both,
    cast._transpose,
    cast._dequantize,
    grouped_cast._both,
    grouped_cast._columnwise,
    gemm._gemm,
    gemm._gemm_add_,
    grouped_gemm._gemm,
    grouped_gemm._wgrad,
    grouped_gemm._wgrad_add_,
    plan._PLANS,
)


def decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tables of decisions for this test, which the next test does not see."""
    for table in TABLES:
        monkeypatch.setattr(table, "_table", {})


def replace_op(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """Run ``function`` where the backend "reference" would run its op of this name."""
    monkeypatch.setattr(reference, name, function)
    # a backend's functions are looked up once, and decisions keep what they found
    for module in (choose_cast, gemm, grouped_gemm):
        monkeypatch.setattr(module, "loaded", lambda backend: backend.load())
    decide_anew(monkeypatch)
