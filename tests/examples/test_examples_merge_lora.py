"""The example that merges adapters: its figures, and that they say what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
pytest.importorskip("peft")

EXAMPLE = "merge_lora"


def test_each_way_to_merge(
    example: ModuleType, stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Little is learned, and rounding to nearest takes most of it back."""
    steps = ["--steps", "8", "--base-steps", "20", "--rank", "4", "--lr", "1e-4"]
    assert example.main([*steps, "--device", "cpu", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "result.json").read_text())
    results = {(r["base"], r["merged"]): r for r in report["results"]}
    assert list(results) == [
        ("FP8", "FP8, nearest"),
        ("FP8", "FP8, stochastic"),
        ("FP8", "bf16"),
        ("bf16", "bf16"),
        ("bf16", "FP8, nearest"),
    ]
    for result in results.values():
        assert result["loss_adapter"] < result["loss_before"]
    kept = {key: result["update_kept"] for key, result in results.items()}
    assert kept["FP8", "FP8, nearest"] < 0.5
    for key in (("FP8", "FP8, stochastic"), ("FP8", "bf16"), ("bf16", "bf16")):
        assert 0.8 < kept[key] < 1.2
    errors = {key: result["logit_error"] for key, result in results.items()}
    assert errors["FP8", "bf16"] < errors["FP8", "FP8, nearest"]
    assert "stochastic" in capsys.readouterr().out
