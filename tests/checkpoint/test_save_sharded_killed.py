"""A sharded save whose ranks are killed: the old checkpoint or the new one, whole."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

import pytest
from torch.distributed.fsdp import fully_shard

pytest.importorskip("safetensors")

from blocktensor import save_fp8
from tests.support import ranks
from tests.support.checkpoint_models import (
    INDEX,
    NEW,
    NEXT,
    OLD,
    SHARD,
    TAG,
    files,
    filled,
    save,
    seed_in,
)
from tests.support.sharded import mesh_of

KILLS = int(os.environ.get("BLOCKTENSOR_KILLS", "4"))
"""Of either rank in turn."""


def _save_for_ever(folder: Path) -> None:
    models = [filled(seed) for seed in (OLD, NEW)]
    for model in models:
        fully_shard(model, mesh=mesh_of(2, "cpu"))
    for model in itertools.cycle(models):
        save_fp8(model, folder, overwrite=True, max_shard_bytes=SHARD)


def test_a_killed_rank_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE", 60.0)  # the other rank raises, and does not wait
    for kill in range(KILLS):
        folder = tmp_path / f"{kill}" / "fp8"
        folder.parent.mkdir()
        group = ranks._Group(2, "cpu")
        group.begin(_save_for_ever, folder)
        while not ((folder / INDEX).exists() or any(pipe.poll() for pipe in group._pipes)):
            time.sleep(0.001)
        time.sleep(0.017 * (kill // 2))  # somewhere in a save
        group._processes[kill % 2].kill()
        with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*rank 1:"):
            group.answers()
        group.close()
        assert seed_in(folder) in (OLD, NEW)
        save(NEXT, folder)
        assert seed_in(folder) == NEXT
        assert {re.sub(TAG, "", name) for name in os.listdir(folder)} == files(3)
