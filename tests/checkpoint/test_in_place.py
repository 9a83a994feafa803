"""What a save leaves of what was there: its own files replaced, all others as they were."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

pytest.importorskip("safetensors")

from safetensors.torch import save_file

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
    folder,
    found,
    save,
    seed_in,
    untagged,
)
from tests.support.disk_steps import disk_steps

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


def test_of_an_index_that_cannot_be_read_no_file_is_removed(folder: Path) -> None:
    (folder / INDEX).write_text("{")
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
