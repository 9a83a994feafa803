"""The example that trains models of torchtitan, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import titan_cpu

titan_cpu.skip_without_torchtitan()
pytest.importorskip("rich")

from tests.support.ranks import run
from tests.support.scripts import examples

SMALL = ["--layers", "2", "--steps", "4", "--batch", "2", "--seq", "64"]


def _example(rank: int, world: int, model: str, folder: str) -> dict[str, Any]:
    titan_cpu.start()
    titan_cpu.patch_torchtitan()
    with examples() as load:
        assert load("torchtitan_fp8").main(["--model", model, *SMALL, "--out", folder]) == 0
    found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return found


@pytest.mark.parametrize("model", ["llama3_debugmodel", "deepseek_v3_debugmodel"])
def test_losses_fall_alike(model: str, tmp_path: Path) -> None:
    (found,) = run(_example, 1, model, str(tmp_path))
    runs = found["runs"]
    assert list(runs) == ["bf16", "fp8", "fp8, fused"]
    for made in runs.values():
        assert len(made["losses"]) == 4
        assert made["tokens_per_second"] > 0
        for ours, theirs in zip(made["losses"], runs["bf16"]["losses"], strict=True):
            assert ours == pytest.approx(theirs, rel=0.01)
    assert runs["fp8"]["losses"] != runs["bf16"]["losses"]
    assert runs["fp8, fused"]["losses"] == runs["fp8"]["losses"]
    assert runs["bf16"]["losses"][-1] < runs["bf16"]["losses"][0]
