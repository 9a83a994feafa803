"""What a save leaves of what was there: its own files replaced, all others as they were."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

pytest.importorskip("safetensors")

import contextlib
import errno
import itertools
import shutil
import time
from collections.abc import Iterator

import pytest
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

from blocktensor import CheckpointError, save_fp8
from blocktensor.checkpoint.in_place import naming
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
    edit_json,
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


@pytest.mark.parametrize(("size", "count"), [(SHARD, 3), (1 << 30, 1), (20_000, 5)])
def test_an_overwrite_leaves_exactly_the_new_files(folder: Path, size: int, count: int) -> None:
    plain = folder.parent / "plain"
    save(NEW, plain, size=size)
    for _ in range(2):
        save(NEW, folder, size=size)
        assert untagged(content(folder)) == content(plain)
        assert found(folder) == files(count)
        assert seed_in(folder) == NEW
    assert found(folder.parent) == {"fp8", "plain"}
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(NEXT, folder, overwrite=False)
    assert untagged(content(folder)) == content(plain)


def test_all_other_files_stay(folder: Path) -> None:
    others = ["adapter_model.safetensors", "model-00001-of-00001.safetensors", "tokenizer.json"]
    for name in others:
        (folder / name).write_bytes(name.encode())
    (folder / "nowhere").symlink_to("gone.safetensors")
    (folder / "more").mkdir()
    (folder / "more" / SINGLE).write_bytes(b"mine")
    save(NEW, folder, size=1 << 30)
    (shard,) = set(os.listdir(folder)) - {*others, "nowhere", "more", INDEX, "config.json"}
    assert re.sub(TAG, "", shard) == others[1]
    assert [(folder / name).read_bytes() for name in others] == [name.encode() for name in others]
    assert os.readlink(folder / "nowhere") == "gone.safetensors"
    assert content(folder / "more") == {SINGLE: b"mine"}
    assert seed_in(folder) == NEW


def test_the_index_says_which_shards_are_its_own(folder: Path) -> None:
    """What an index names is removed only where a save could have made it."""
    (folder / "notes.txt").write_text("mine")
    (folder.parent / "above.safetensors").write_text("mine")
    (folder / "folder.safetensors").mkdir()
    (folder / "link.safetensors").symlink_to(folder.parent / "above.safetensors")
    (folder / "link_to_folder.safetensors").symlink_to("folder.safetensors")
    links = ["link.safetensors", "link_to_folder.safetensors"]
    named = ["notes.txt", "../above.safetensors", "folder.safetensors", *links, 5, ""]
    more = {f"x{name}": name for name in named}
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(more))
    save(NEW, folder)
    assert found(folder) == files(3) | {"notes.txt", "folder.safetensors"}
    assert (folder.parent / "above.safetensors").read_text() == "mine"


@pytest.mark.parametrize("index", ["{", '{"weight_map": ["model-00001-of-00003.safetensors"]}'])
def test_of_an_index_that_cannot_be_read_no_file_is_removed(folder: Path, index: str) -> None:
    (folder / INDEX).write_text(index)
    old = content(folder)
    save(NEW, folder)
    new = content(folder)
    assert all(new[name] == old[name] for name in old.keys() - {INDEX, "config.json"})
    assert len(new) == len(os.listdir(folder)) == len(old) + 3
    assert seed_in(folder) == NEW


@pytest.mark.parametrize("indexed", [False, True])
def test_a_checkpoint_of_one_file_goes(tmp_path: Path, indexed: bool) -> None:
    """With an index beside it as well, since transformers looks for it first."""
    if indexed:
        save(OLD, tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text("{}")
    save(NEW, tmp_path)
    assert found(tmp_path) == files(3)
    assert seed_in(tmp_path) == NEW


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(FileExistsError, match="is no checkpoint"):
            save(NEW, path)
    assert content(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_link_to_a_folder_is_followed(folder: Path) -> None:
    link = folder.parent / "latest"
    link.symlink_to("fp8")
    assert save(NEW, link) == link
    assert os.readlink(link) == "fp8"
    assert seed_in(folder) == NEW
    assert found(folder.parent) == {"fp8", "latest"}
    new = folder.parent / "new"
    new.symlink_to("made/by/us")
    save(NEXT, new)
    assert os.readlink(new) == "made/by/us"
    assert seed_in(folder.parent / "made/by/us") == NEXT


def test_files_that_are_links_are_replaced_and_their_targets_kept(folder: Path) -> None:
    """As the folders of a model hub's cache have them."""
    blobs = folder.parent / "blobs"
    folder.rename(blobs)
    before = content(blobs)
    folder.mkdir()
    for name in found(blobs):
        (folder / name).symlink_to(blobs / name)
    save(NEW, folder)
    assert content(blobs) == before
    assert found(folder) == files(3)
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert seed_in(folder) == NEW


@pytest.mark.parametrize("path", [".", "", "../fp8", "{}"])
@pytest.mark.parametrize("there", [False, True])
def test_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, there: bool
) -> None:
    if not there:
        for file in folder.iterdir():
            file.unlink()
    monkeypatch.chdir(folder)
    before = os.stat(".")
    save(NEW, path.format(folder), overwrite=there)
    assert os.path.samestat(os.stat("."), before)
    assert os.path.samestat(os.stat(folder), before)
    assert found(Path()) == files(3)
    assert seed_in(Path()) == NEW
    assert found(folder.parent) == {"fp8"}


def test_everybody_may_read_what_the_mask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(OLD, tmp_path / "fp8")
        save(NEW, tmp_path / "fp8")
    finally:
        os.umask(before)
    assert (tmp_path / "fp8").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "fp8").iterdir()} == {0o640}


def steps_to(folder: Path) -> str:
    """What a save of two shards does in the parent folder, without the names by chance."""
    with disk_steps() as steps:
        save(NEW, folder, size=100_000)
    later = [step for step in steps if step != f"mkdir {folder}"]  # on Python 3.10 unseen
    text = "\n".join(later).replace(str(folder.parent), "..")
    return re.sub(TAG, ".STAGING", text).replace("../fp8/", "")


def test_data_are_on_the_disk_before_what_names_them(tmp_path: Path) -> None:
    save(OLD, tmp_path / "fp8", size=100_000)
    assert_expected_inline(
        steps_to(tmp_path / "fp8"),
        """\
mkdir .STAGING
chmod .STAGING/model-00001-of-00002.STAGING.safetensors
fsync .STAGING/model-00001-of-00002.STAGING.safetensors
chmod .STAGING/model-00002-of-00002.STAGING.safetensors
fsync .STAGING/model-00002-of-00002.STAGING.safetensors
fsync .STAGING/model.safetensors.index.json
fsync .STAGING/config.json
rename .STAGING/model-00001-of-00002.STAGING.safetensors -> model-00001-of-00002.STAGING.safetensors
rename .STAGING/model-00002-of-00002.STAGING.safetensors -> model-00002-of-00002.STAGING.safetensors
fsync ../fp8
replace .STAGING/model.safetensors.index.json -> model.safetensors.index.json
replace .STAGING/config.json -> config.json
unlink model.safetensors
fsync ../fp8
unlink model-00001-of-00002.safetensors
unlink model-00002-of-00002.safetensors
rmdir .STAGING""",
    )


# Saves that are killed or that fail: the old checkpoint or the new one

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


def first(steps: list[str], call: str) -> int:
    """The number of the first step, from 1, that is this call."""
    return next(i for i, step in enumerate(steps, 1) if step.startswith(call))


def test_remains_of_a_killed_save_do_not_claim_files_of_another_writer(tmp_path: Path) -> None:
    """A first save is killed before its index is in place, and the next writer has its names."""
    folder, other = tmp_path / "fp8", save(OLD, tmp_path / "other")
    with disk_steps() as steps:
        save(NEW, tmp_path / "whole")
    with pytest.raises(Killed), disk_steps(first(steps, "replace"), Killed()):
        save(NEW, folder)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    shutil.copytree(folder, tmp_path / "twin")
    with disk_steps() as steps:
        save(NEXT, tmp_path / "twin")
    full = OSError(errno.ENOSPC, "no space left")
    with pytest.raises(OSError, match="no space left"), disk_steps(first(steps, "chmod"), full):
        save(NEXT, folder)
    assert content(folder) == content(other)
    assert seed_in(folder) == OLD


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
    with pytest.raises(FileNotFoundError), naming(folder):
        (folder / "gone").read_text()


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
