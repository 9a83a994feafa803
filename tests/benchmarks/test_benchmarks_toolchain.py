"""The comparison of two Tritons: each product over a peer that does not depend on Triton."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import toolchain


def test_rows_are_ratios_to_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(case: Any, rounds: int) -> dict[str, Any]:
        asked.append((case.kind, rounds))
        return {"blocktensor": 1100.0, "cublas": 1000.0, "vs_bf16": 1.5}

    monkeypatch.setattr(toolchain.gemm, "measure_case", measured)
    monkeypatch.setattr(toolchain.grouped, "measure_case", measured)
    rows = list(toolchain.measure(rounds=2))
    assert len(rows) == toolchain.total() == len(asked)
    over = {(row["peer"], row["over_peer"]) for row in rows}
    assert over == {("cublas", 1.1), ("bf16", 1.5)}
    assert {rounds for _, rounds in asked} == {2}
    assert (
        len(list(toolchain.measure(**toolchain.QUICK))) == toolchain.total(**toolchain.QUICK) == 1
    )
