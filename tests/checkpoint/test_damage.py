"""Checkpoints damaged at random: an error and an unchanged model, or what the files really say.

``CHECKPOINT_FUZZ`` is the number of checkpoints to damage.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import load_file

from blocktensor import CheckpointError, load_fp8
from tests.support.checkpoint_models import INDEX, TARGETS, assert_same, bits, folder, state

__all__ = ["folder"]

CASES = int(os.environ.get("CHECKPOINT_FUZZ", "150"))


def damaged(draw: random.Random, name: str, data: bytes) -> bytes:
    """A file with other bytes at one place, in its header if it is one of tensors."""
    header = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else len(data)
    at, size = draw.randrange(draw.choice([header, len(data)])), draw.choice([1, 2, 7, 8, 64])
    part = data[at : at + size]
    flipped = bytes([part[0] ^ 1 << draw.randrange(8)]) + part[1:]
    middle = draw.choice([flipped, flipped, b"", part + part, bytes(size), draw.randbytes(size)])
    return data[:at] + middle + draw.choice([data[at + size :]] * 6 + [b""])


def test_damaged_files(folder: Path) -> None:
    draw, refused, files = random.Random(0), 0, sorted(path.name for path in folder.iterdir())
    for _ in range(CASES):
        name, model = draw.choice(files), TARGETS[draw.choice(["plain", "frozen"])]()
        before, data = state(model), (folder / name).read_bytes()
        (folder / name).write_bytes(damaged(draw, name, data))
        try:
            report = load_fp8(model, folder)
        except (CheckpointError, NotImplementedError):
            assert_same(state(model), before)
            refused += 1
        else:
            places = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
            stored = {k: x for file in set(places) for k, x in load_file(folder / file).items()}
            for key in report.fp8:
                held, scales, _ = model.get_parameter(key).rowwise()
                assert torch.equal(bits(held), bits(stored[key]))
                assert torch.equal(scales, stored[f"{key}_scale_inv"].float())
                assert bool((scales > 0).all()) and bool(scales.isfinite().all())
        (folder / name).write_bytes(data)
    assert CASES // 4 < refused < CASES
