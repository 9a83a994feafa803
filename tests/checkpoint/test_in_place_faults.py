"""A save that is killed, that fails, or that is not alone: the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("safetensors")

from blocktensor import CheckpointError
from blocktensor.checkpoint import in_place
from tests.support.checkpoint_models import (
    INDEX,
    NEW,
    NEXT,
    OLD,
    SHARD,
    SINGLE,
    content,
    files,
    folder,
    found,
    save,
    seed_in,
)
from tests.support.disk_steps import Killed, disk_steps

__all__ = ["folder"]

# A step that is the last, or that fails


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


def untagged(names: set[str]) -> set[str]:
    return {re.sub(r"-\w{8}\.safetensors", ".safetensors", name) for name in names}


def what_loads(folder: Path) -> int | None:
    """The seed in a folder; None if it holds no checkpoint at all."""
    try:
        return seed_in(folder)
    except CheckpointError as error:
        if "no checkpoint: neither" not in str(error):
            raise
        return None


def settled(folder: Path) -> set[str]:
    """The names in a folder, without those of folders that were made and never used."""
    unused = {path.name for path in folder.glob(".new.save_fp8.*") if not any(path.iterdir())}
    return found(folder) - unused


@pytest.mark.parametrize(
    ("kind", "links"),
    [*((kind, True) for kind in KINDS), ("three shards", False), ("other names", False)],
)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no hard links")))
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
        # The next save works, whatever was left, and leaves nothing of it.
        save(NEXT, place, overwrite=seen[-1] is not None)
        assert seed_in(place) == NEXT
        names = settled(place) if links else untagged(settled(place))
        assert names == files(3) | others, step
        assert settled(place.parent) == {"fp8"}
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
        visible = {name: data for name, data in now.items() if not name.startswith(".")}
        is_new = what_loads(place) == NEW
        outcomes.add(is_new)
        if is_new:
            assert untagged({*visible}) == files(3), step
            assert len(visible) == len(files(3)), step
        else:
            assert failed, step
            assert visible == old, step
    assert outcomes == {False, True}


def test_a_failed_save_over_an_index_that_cannot_be_read(folder: Path) -> None:
    """Nobody knows which shards are its own: only what the save itself has made goes."""
    (folder / INDEX).write_text("{")
    old, step = content(folder), 0
    while content(folder) == old:
        step += 1
        with disk_steps(step, KeyboardInterrupt()), contextlib.suppress(KeyboardInterrupt):
            save(NEW, folder)
        assert found(folder) >= old.keys(), step
    assert step > 10
    assert seed_in(folder) == NEW


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "I/O")], ids=repr)
def test_a_file_under_the_name_of_a_shard_survives(folder: Path, error: BaseException) -> None:
    """It is in no index, so that no save may take it for a rest of another."""
    save(OLD, folder, size=1 << 30)
    strange = folder / "model-00002-of-00003.safetensors"
    strange.write_bytes(b"mine")
    seeds = set()
    for step in range(1, 60):
        with disk_steps(step, error) as steps, contextlib.suppress(type(error)):
            save(NEW, folder)
        assert strange.read_bytes() == b"mine", step
        seeds.add(seed_in(folder))
        save(OLD, folder)
        assert strange.read_bytes() == b"mine", step
        assert untagged(settled(folder)) == files(3), step
        if len(steps) < step:
            break
    assert len(steps) < step
    assert seeds == {OLD, NEW}


# Several that save at once


def test_savers_of_one_folder_take_turns(folder: Path) -> None:
    def saver(seed: int) -> None:
        for _ in range(6):
            save(seed, folder)

    with ThreadPoolExecutor() as pool:
        list(pool.map(saver, (NEW, NEXT)))
    assert seed_in(folder) in (NEW, NEXT)
    assert found(folder) == files(3)


HOLDER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def test_what_another_process_is_writing_is_left_to_it_until_it_is_killed(folder: Path) -> None:
    other, files_of_other = folder / f"{in_place.STAGING}other", ["being_written.safetensors"]
    other.mkdir()
    (other / "files.json").write_text(json.dumps({"files": files_of_other}))
    (folder / "being_written.safetensors").write_bytes(b"theirs")
    command = [sys.executable, "-c", HOLDER, str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        save(NEW, folder)
        assert found(folder) == files(3) | {*files_of_other, other.name}
        holder.kill()
    save(NEXT, folder)
    assert found(folder) == files(3)


def test_another_process_ends_and_removes_its_staging_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / f"{in_place.STAGING}other"
    other.mkdir()
    is_symlink = Path.is_symlink

    def goes(path: Path) -> bool:
        if path == other and path.exists():
            path.rmdir()
        return is_symlink(path)

    monkeypatch.setattr(Path, "is_symlink", goes)
    save(NEW, folder)
    assert seed_in(folder) == NEW
    assert found(folder) == files(3)


def test_a_folder_whose_lock_is_kept_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(folder)
    monkeypatch.setattr(in_place, "_LOCK_TIMEOUT_S", 0.05)
    with in_place._lock(folder), pytest.raises(TimeoutError, match="another process has been"):
        save(NEW, folder)
    assert content(folder) == before
    assert found(folder) == files(3)
    save(NEW, folder)


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell there whether a staging folder is abandoned, so all of them stay."""
    with pytest.raises(Killed), disk_steps(9, Killed()):
        save(NEW, folder)
    (left,) = found(folder) - files(3)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks here")))
        save(NEW, folder)
    assert seed_in(folder) == NEW
    assert found(folder) == files(3) | {left}
    save(NEXT, folder)
    assert found(folder) == files(3)


def test_a_folder_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with in_place.staging(tmp_path / "fp8") as made:
        save(OLD, tmp_path / "fp8")
        with pytest.raises(FileExistsError, match="appeared while its checkpoint was written"):
            in_place.put_in_place(made, tmp_path / "fp8")
    assert seed_in(tmp_path / "fp8") == OLD
    assert found(tmp_path) == {"fp8"}
