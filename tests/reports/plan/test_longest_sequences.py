"""The guide's table of the longest sequences that fit on one card is what ``plan`` says today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from blocktensor import plan
from blocktensor.reports.plan.models import model_of

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "saved_tensors.md"
ROW = re.compile(r"\| (\S+), (full|LoRA) \| (80|141) GB \| (.*) \|")
CARDS: dict[str, Any] = {"80": "H100", "141": "H200"}
COMMON: dict[str, Any] = {"master": "bf16", "loss": "chunks", "convert_head": True}
OURS: dict[str, dict[str, Any]] = {
    "full": {"saved_tensors_in_fp8": True, "fuse": True, "recompute": True},
    "LoRA": {"saved_tensors_in_fp8": True, "lora": 16},
}
ROWS = [match.groups() for match in map(ROW.match, PAGE.read_text().splitlines()) if match]


def test_the_table_has_all_rows() -> None:
    assert len(ROWS) == 3 * 2 * 2


@pytest.mark.parametrize(("name", "trains", "card", "cells"), ROWS)
def test_the_longest_sequences_that_fit(name: str, trains: str, card: str, cells: str) -> None:
    _, model = model_of(name)
    bf16 = {"lora": 16} if trains == "LoRA" else {}
    again = {"checkpointing": "blocks"}
    columns = [
        ("bf16", bf16),
        ("bf16", bf16 | again),
        ("fp8", OURS[trains]),
        ("fp8", OURS[trains] | again),
    ]
    for cell, (precision, settings) in zip(cells.split(" | "), columns, strict=True):
        thousands = int(cell.split("k")[0])
        for longer in (0, 1):
            sequence = 1024 * (thousands + longer)
            report = plan(model, sequence=sequence, card=CARDS[card], **COMMON, **settings)
            assert getattr(report, precision).fits(report.setup.card) is (longer == 0)
