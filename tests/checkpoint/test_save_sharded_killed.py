"""A sharded save whose ranks are killed: the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from tests.support.checkpoint_folders import NEW, NEXT, OLD, files, found, save, seed_in

POINTS = int(os.environ.get("BLOCKTENSOR_KILLS", "2"))
"""How many kills of either rank."""

SAVER = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from blocktensor import save_fp8
from tests.support.checkpoint_models import filled
torch.set_num_threads(1)
folder, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
models = [filled(seed) for seed in (1, 2)]
for model in models:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
save_fp8(models[0], folder)
print("ready", flush=True)
while True:
    for model in models[::-1]:
        save_fp8(model, folder, overwrite=True, max_shard_bytes=70_000)
        print("saved", flush=True)
"""


def saver(tmp_path: Path, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SAVER, str(folder), str(tmp_path / "store"), str(rank)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_loses_nothing(tmp_path: Path, killed: int) -> None:
    folder = tmp_path / "fp8"
    for point in range(POINTS):
        (tmp_path / "store").unlink(missing_ok=True)
        folder = tmp_path / f"{point}" / "fp8"
        ranks = [saver(tmp_path, folder, rank) for rank in (0, 1)]
        try:
            assert ranks[0].stdout is not None
            assert ranks[0].stdout.readline() == b"ready\n"
            for _ in range(point % 2):
                ranks[0].stdout.readline()
            time.sleep(0.013 * point)  # in the middle of a save
            ranks[killed].kill()
            ranks[killed].wait()
            ranks[1 - killed].wait(60)  # it raises
        finally:
            for process in ranks:
                process.kill()
                process.communicate()  # and close its pipe
        assert seed_in(folder) in (OLD, NEW), point
        save(NEXT, folder)
        assert seed_in(folder) == NEXT
        assert found(folder) == files(3), point
        assert found(folder.parent) == {"fp8"}
