"""A save that is killed or that fails: the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.fsdp import fully_shard

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, save_fp8
from tests.support import ranks
from tests.support.checkpoint_models import (
    INDEX,
    NEW,
    NEXT,
    OLD,
    SHARD,
    SINGLE,
    TAG,
    content,
    files,
    filled,
    folder,
    found,
    save,
    seed_in,
    untagged,
)
from tests.support.disk_steps import Killed, disk_steps
from tests.support.sharded import mesh_of

__all__ = ["folder"]

KINDS = ("three shards", "one shard", "other names", "one file", "empty", "absent")


def start(kind: str, folder: Path) -> None:
    """Make what a save finds."""
    if kind == "empty":
        folder.mkdir()
    elif kind != "absent":
        save(OLD, folder, size=1 << 30 if kind in ("one shard", "one file") else SHARD)
    if kind == "one file":  # as safetensors writes it, alone
        (folder / INDEX).unlink()
        (folder / "config.json").unlink()
        (folder / "model-00001-of-00001.safetensors").rename(folder / SINGLE)
    elif kind == "other names":  # of which a new save takes only some
        name, other = "model-00002-of-00003.safetensors", "second.safetensors"
        (folder / name).rename(folder / other)
        (folder / INDEX).write_text((folder / INDEX).read_text().replace(name, other))


def each_step(kind: str, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the number of each step of a save, from 1, with a new folder of this kind."""
    start(kind, tmp_path / "start")
    step, total = 0, 0
    while step <= total:
        folder = tmp_path / str(step) / "fp8"
        folder.parent.mkdir()
        if kind != "absent":
            shutil.copytree(tmp_path / "start", folder)
        if step == 0:
            with disk_steps() as steps:
                save(NEW, folder)
            total = len(steps)
        else:
            yield step, folder
        step += 1


def what_loads(folder: Path) -> int | None:
    """The seed in a folder; None if it holds no checkpoint at all."""
    try:
        return seed_in(folder)
    except CheckpointError as error:
        if "no checkpoint: neither" not in str(error):
            raise
        return None


def of_old(kind: str) -> set[str]:
    """The shards that a new index makes obsolete."""
    shards = {name for name in files(3) if name.endswith(".safetensors")}
    obsolete = {"three shards": shards, "one shard": {"model-00001-of-00001.safetensors"}}
    obsolete |= {"other names": shards | {"second.safetensors"}, "one file": {SINGLE}}
    return obsolete.get(kind, set())


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    before = None if kind in ("empty", "absent") else OLD
    others = set() if kind in ("one file", "empty", "absent") else {"adapter.safetensors"}
    seen = []
    for step, place in each_step(kind, tmp_path):
        for name in others:
            (place / name).write_bytes(b"mine")
        with pytest.raises(Killed), disk_steps(step, Killed()):
            save(NEW, place)
        seen.append(what_loads(place))
        if seen[-1] is not None:
            with pytest.raises(FileExistsError, match="overwrite=True"):
                save(NEXT, place, overwrite=False)
        # The next save works, whatever was left, and leaves nothing of it but shards of the old one
        # after a kill where the new one was in its place.
        save(NEXT, place, overwrite=seen[-1] is not None)
        assert seed_in(place) == NEXT
        left = of_old(kind) & {*os.listdir(place)} if seen[-1] == NEW else set()
        for name in left:
            (place / name).unlink()
        assert found(place) == files(3) | others, step
        assert found(place.parent) == {"fp8"}
    # first the old one, from some step on the new one
    assert seen == sorted(seen, key=lambda seed: seed == NEW)
    assert set(seen) == {before, NEW}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_leaves_exactly_the_old_or_the_new(
    tmp_path: Path, kind: str, error: BaseException
) -> None:
    outcomes = set()
    for step, place in each_step(kind, tmp_path):
        old, failed = content(place) if place.exists() else {}, True
        with disk_steps(step, error), contextlib.suppress(type(error)):
            save(NEW, place)
            failed = False
        now = content(place) if place.exists() else {}
        is_new = what_loads(place) == NEW
        outcomes.add(is_new)
        if is_new:
            assert {*untagged(now)} - of_old(kind) <= files(3), step
            assert failed or untagged(now).keys() == files(3), step
        else:
            assert failed, step
            assert now == old, step
    assert outcomes == {False, True}


def test_a_failed_save_over_an_index_that_cannot_be_read(folder: Path) -> None:
    """Nobody knows which shards are its own: only what the save itself has made goes."""
    (folder / INDEX).write_text("{")
    old, step = content(folder), 0
    while content(folder) == old:
        step += 1
        with disk_steps(step, KeyboardInterrupt()), contextlib.suppress(KeyboardInterrupt):
            save(NEW, folder)
        assert {*os.listdir(folder)} >= old.keys(), step
    assert step > 10
    assert seed_in(folder) == NEW


KILLS = int(os.environ.get("BLOCKTENSOR_KILLS", "4"))
"""How many kills end ranks of a sharded save, one rank after the other."""


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
