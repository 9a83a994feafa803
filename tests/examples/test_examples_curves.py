"""The two tables that hold the results of all long runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import Load

STEPS = 150
RAW: dict[str, Any] = {
    "seed": 3,
    "heldout": [[150, 2.5]],
    "loss": [float(i) for i in range(STEPS)],
    "norm": [1.0] * 110 + [7.0, 2.0, 2.0] + [2.0] * (STEPS - 113),
}


@pytest.fixture
def evidence(load: Load) -> Any:
    pytest.importorskip("matplotlib")
    return load("evidence_report")


def test_a_point_is_the_mean_loss_and_the_largest_norm_of_its_steps(evidence: Any) -> None:
    from common import curves  # type: ignore[import-not-found]

    found = curves.condensed(RAW)
    assert found["loss"] == [9.5, 29.5, 49.5, 69.5, 89.5, 109.5, 129.5, 144.5]
    assert found["norm"] == [1, 1, 1, 1, 1, 7, 2, 2]
    assert found["median_norm"] == 2  # of steps from 100 on
    assert curves.steps_of(found)[:2] == [10, 30]
    assert (found["seed"], found["heldout"]) == (3, [[150, 2.5]])


def test_tables_give_back_what_was_added(evidence: Any, tmp_path: Path) -> None:
    from common import curves

    folder = tmp_path / "results"
    assert curves.read_results(folder) == {}
    ablation = {"runs": [{"name": "bf16"}], "device": "H200"}
    curves.add_result(folder, "b", RAW)
    curves.add_result(folder, "a", ablation)
    curves.add_result(folder, "b", {**RAW, "seed": 4})  # made again
    want = {"a": ablation, "b": curves.condensed({**RAW, "seed": 4})}
    assert curves.read_results(folder) == want
    assert sorted(path.name for path in folder.iterdir()) == ["curves.csv", "runs.json"]
