"""The guide's table of adapters on large models is what ``plan`` says today.

By default one model is compared; ``LARGE_MODELS=all`` compares all, in a minute.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from blocktensor import plan
from blocktensor.reports.plan.models import model_of
from blocktensor.reports.plan.report import TrainingPlan

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "plan.md"
ROW = re.compile(r"\| (\S+) \((\d+)B\) \| (1|8, FSDP2|8, expert parallel) \| (.*) \|")
SETTINGS: dict[str, Any] = {
    **{"card": "H200", "checkpointing": "blocks", "convert_head": True, "loss": "chunks"},
    **{"lora": 8, "lora_experts": True, "sequence": 4096},
}
ROWS: dict[str, list[tuple[str, ...]]] = defaultdict(list)
for match in filter(None, map(ROW.match, PAGE.read_text("utf-8").splitlines())):
    ROWS[match[1]].append(match.groups()[1:])
SHOWN = [*ROWS] if os.environ.get("LARGE_MODELS") == "all" else ["gpt-oss-120b"]


def cells(report: TrainingPlan) -> str:
    """Return the last four cells of a row."""
    peaks = [x.peak_bytes / 2**30 for x in (report.fp8, report.bf16)]
    longest = f"{report.longest_fp8 // 1024}k" if report.fits else "does not fit"
    speed = f"{report.fp8.tokens_per_second:,.0f}" if report.fits else ""
    bf16 = "" if report.bf16.fits("H200") else ", does not fit"
    return f"{peaks[0]:.0f} | {longest} | {speed} | {peaks[1]:.0f}{bf16}"


def test_the_table_has_all_rows() -> None:
    assert [len(rows) for rows in ROWS.values()] == [3, 3, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("name", SHOWN)
def test_a_large_model_fits_as_the_guide_says(name: str) -> None:
    _, model = model_of(name)
    for billions, how, shown in ROWS[name]:
        is_cut = how.endswith("expert parallel")
        report = plan(model, gpus=int(how[0]), expert_parallel=is_cut, **SETTINGS)
        assert f"{report.parameters / 1e9:.0f}" == billions
        assert cells(report) == shown
