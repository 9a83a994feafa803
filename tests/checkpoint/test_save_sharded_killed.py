"""A sharded save whose ranks are killed: the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

POINTS = os.environ.get("BLOCKTENSOR_KILLS", "2")
"""How many kills of either rank."""

# Ranks are forked, so that a process imports torch once for all of them.
DRIVER = """
import os, re, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from blocktensor import save_fp8
from tests.support.checkpoint_models import NEW, NEXT, OLD, TAG, files, filled, save, seed_in

def save_for_ever(folder, rank, ready):
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    models = [filled(seed) for seed in (OLD, NEW)]
    for model in models:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    save_fp8(models[0], folder, max_shard_bytes=70_000)
    os.write(ready, b".")
    while True:
        for model in models[::-1]:
            save_fp8(model, folder, overwrite=True, max_shard_bytes=70_000)

torch.set_num_threads(1)
root, points, killed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for point in range(points):
    folder = root / f"{point}" / "fp8"
    folder.parent.mkdir()
    read, ready = os.pipe()
    ranks = []
    for rank in (0, 1):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                save_for_ever(folder, rank, ready)
            finally:
                os._exit(1)  # the other rank is gone
    os.read(read, 1)
    time.sleep(0.017 * point)  # somewhere in a save
    os.kill(ranks[killed], signal.SIGKILL)
    signal.alarm(60)  # the other rank raises, and does not wait
    for rank in ranks:
        os.waitpid(rank, 0)
    signal.alarm(0)
    print(seed_in(folder) in (OLD, NEW), flush=True)
    save(NEXT, folder)
    assert seed_in(folder) == NEXT
    left = {re.sub(TAG, "", name) for name in os.listdir(folder)}
    assert left == files(3), left
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_loses_nothing(tmp_path: Path, killed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), POINTS, str(killed)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * int(POINTS)
