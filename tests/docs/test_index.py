"""The first pages: README.md is short, and docs/index.md states speeds that were measured."""

from __future__ import annotations

import json
import re

from tests.docs.code_blocks import ROOT

ROW = re.compile(r"^\| (\d+) x \((\d+) x (\d+)\) \| ([\d.]+)x \| ([\d.]+)x \|$", re.MULTILINE)
SPEEDS = ("eager_speedup", "graph_speedup")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_speeds_of_the_index_are_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/linear.json").read_text("utf-8"))["rows"]
    measured = {
        (*(str(row[size]) for size in "mnk"), *(f"{row[how]:.2f}" for how in SPEEDS))
        for row in rows
    }
    shown = ROW.findall((ROOT / "docs/index.md").read_text("utf-8"))
    assert len(shown) == 4
    assert set(shown) <= measured
