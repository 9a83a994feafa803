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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, save_fp8
from blocktensor.checkpoint import in_place
from tests.support.checkpoint_folders import (
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
from tests.support.checkpoint_models import filled
from tests.support.disk_steps import Killed, disk_steps

__all__ = ["folder"]

# A step that is the last, or that fails


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)


def of_three_shards(folder: Path) -> None:
    save(OLD, folder)


def of_one_shard(folder: Path) -> None:
    save(OLD, folder, size=1 << 30)


def of_one_file(folder: Path) -> None:
    """As safetensors writes it, alone."""
    of_one_shard(folder)
    (folder / INDEX).unlink()
    (folder / "config.json").unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / SINGLE)


def of_other_names(folder: Path) -> None:
    """Of which a new save takes only some."""
    of_three_shards(folder)
    name, other = "model-00002-of-00003.safetensors", "second.safetensors"
    (folder / name).rename(folder / other)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(name, other))


def of_nothing(folder: Path) -> None:
    folder.mkdir()


START: dict[str, Callable[[Path], None]] = {
    "three shards": of_three_shards,
    "one shard": of_one_shard,
    "other names": of_other_names,
    "one file": of_one_file,
    "empty": of_nothing,
    "absent": lambda folder: None,
}


def copied(kind: str, tmp_path: Path) -> Callable[[Path], object]:
    """Return a function that makes a folder of this kind, faster than saves do."""
    START[kind](tmp_path / "start")
    if kind == "absent":
        return START[kind]
    return lambda folder: shutil.copytree(tmp_path / "start", folder)


def untagged(names: set[str]) -> set[str]:
    return {re.sub(r"-\w{8}\.safetensors", ".safetensors", name) for name in names}


def count_steps(start: Callable[[Path], object], folder: Path) -> int:
    start(folder)
    with disk_steps() as steps:
        save(NEW, folder)
    return len(steps)


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
    [*((kind, True) for kind in START), ("three shards", False), ("other names", False)],
)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, links: bool
) -> None:
    if not links:
        without_links(monkeypatch)
    start = copied(kind, tmp_path)
    before = None if kind in ("empty", "absent") else OLD
    total, seen = count_steps(start, tmp_path / "count"), []
    for step in range(1, total + 1):
        folder = tmp_path / f"{step}" / "fp8"
        folder.parent.mkdir()
        start(folder)
        if kind not in ("one file", "empty", "absent"):
            (folder / "adapter.safetensors").write_bytes(b"mine")
        with pytest.raises(Killed), disk_steps(step, Killed()):
            save(NEW, folder)
        seen.append(what_loads(folder))
        if seen[-1] is not None:
            with pytest.raises(FileExistsError, match="overwrite=True"):
                save(NEXT, folder, overwrite=False)
        # The next save works, whatever was left, and leaves nothing of it.
        save(NEXT, folder, overwrite=seen[-1] is not None)
        assert seed_in(folder) == NEXT
        kept = {"adapter.safetensors"} & found(folder)
        assert bool(kept) == (kind not in ("one file", "empty", "absent"))
        names = settled(folder) if links else untagged(settled(folder))
        assert names == files(3) | kept, step
        assert settled(folder.parent) == {"fp8"}
    # first the old one, from some step on the new one
    assert seen == sorted(seen, key=lambda seed: seed == NEW)
    assert set(seen) == {before, NEW}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", START)
def test_a_step_that_fails_leaves_exactly_the_old_or_the_new(
    tmp_path: Path, kind: str, error: BaseException
) -> None:
    start = copied(kind, tmp_path)
    total = count_steps(start, tmp_path / "count")
    outcomes: set[str] = set()
    for step in range(1, total + 1):
        folder = tmp_path / f"{step}" / "fp8"
        folder.parent.mkdir()
        start(folder)
        old = content(folder) if folder.exists() else {}
        failed = True
        with disk_steps(step, error), contextlib.suppress(type(error)):
            save(NEW, folder)
            failed = False
        if what_loads(folder) == NEW:
            outcomes.add("new")
            assert untagged(visible(folder)) == files(3), step
            assert len(visible(folder)) == len(files(3)), step
        else:
            outcomes.add("old")
            assert failed, step
            now = content(folder) if folder.exists() else {}
            assert {name: now[name] for name in visible(folder)} == old, step
    assert outcomes >= {"old", "new"}


def visible(folder: Path) -> set[str]:
    """Names that do not begin with a dot."""
    return {path.name for path in folder.glob("[!.]*")}


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
    of_one_shard(folder)
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


SAVER = """
import sys, torch
from blocktensor import save_fp8
from tests.support.checkpoint_models import filled
torch.set_num_threads(1)
models = [filled(seed, frozen=True) for seed in (1, 2)]
save_fp8(models[0], sys.argv[1], overwrite=True)
print("ready", flush=True)
while True:
    for model in models:
        save_fp8(model, sys.argv[1], overwrite=True, max_shard_bytes=70_000)
"""


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """Killed for real: its locks go with it."""
    folder, command = tmp_path / "fp8", [sys.executable, "-c", SAVER, str(tmp_path / "fp8")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as saver:
        assert saver.stdout is not None
        assert saver.stdout.readline() == b"ready\n"
        (folder / "adapter.safetensors").write_bytes(b"mine")
        time.sleep(0.2)  # in the middle of a save
        saver.kill()
    assert seed_in(folder) in (OLD, NEW)
    save(NEXT, folder)
    assert settled(folder) == files(3) | {"adapter.safetensors"}
    assert settled(tmp_path) == {"fp8"}


# Several that save at once


def test_savers_of_one_folder_take_turns(folder: Path) -> None:
    models = [filled(seed, frozen=True) for seed in (NEW, NEXT)]

    def saver(i: int) -> None:
        for _ in range(6):
            save_fp8(models[i], folder, overwrite=True, max_shard_bytes=SHARD)

    with ThreadPoolExecutor() as pool:
        list(pool.map(saver, range(2)))
    assert seed_in(folder) in (NEW, NEXT)
    assert found(folder) == files(3)


def test_what_another_process_is_writing_is_left_to_it(folder: Path) -> None:
    with in_place.staging(folder) as other:
        (other / "files.json").write_text(json.dumps({"files": ["being_written.safetensors"]}))
        (folder / "being_written.safetensors").write_bytes(b"theirs")
        save(NEW, folder)
        assert found(folder) == files(3) | {"being_written.safetensors", other.name}


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

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    with pytest.raises(Killed), disk_steps(9, Killed()):
        save(NEW, folder)
    (left,) = found(folder) - files(3)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
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
