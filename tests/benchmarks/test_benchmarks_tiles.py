"""What a measurement of tiles writes where the choice of tiles reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tiles
from blocktensor.ops.devices import Card
from blocktensor.ops.gemm.hopper.tiles import FILE


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the file, in place of it; an H100 measures."""
    made = tmp_path / "tiles.json"
    made.write_text(FILE.read_text())
    monkeypatch.setattr(tiles, "FILE", made)
    monkeypatch.setattr(tiles, "card", lambda device: Card("H100", 132))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    return made


def test_a_card_writes_its_part_alone(copy: Path) -> None:
    before = json.loads(copy.read_text())
    speeds = before["H100"]["speeds"]
    rows = [
        {"kernel": name, **speed, "block_us": 0.5, "mean_error": 0.1}
        for name, speed in speeds.items()
    ]
    tiles.publish(rows)
    after = json.loads(copy.read_text())
    assert list(after) == list(before)
    assert after["H200"] == before["H200"]
    assert after["H100"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert after["H100"]["command"] == "python -m benchmarks tiles"
    wanted = {name: {**speed, "block_us": 0.5} for name, speed in speeds.items()}
    assert after["H100"]["speeds"] == wanted


def test_a_kernel_has_a_line(copy: Path) -> None:
    known = json.loads(copy.read_text())
    rows = [{"kernel": name, **speed} for name, speed in known["H100"]["speeds"].items()]
    tiles.publish(rows)
    again = copy.read_text()
    assert len([line for line in again.splitlines() if "block_us" in line]) == sum(
        len(part["speeds"]) for part in known.values()
    )
