"""Move a finished checkpoint to its place: a kill at any time leaves the old one or the new one.

A checkpoint is made in a *staging folder* inside its folder. Files belong to the checkpoint if the
index names them, so renaming the new index over the old one replaces the checkpoint. The order of
steps, and the files that each kill leaves, are in docs/design/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .on_disk import CONFIG, INDEX, SINGLE, CheckpointError, flush, read_json

STAGING = ".save_fp8."
"""Prefix of the names of staging folders, and part of the names of shards written there."""


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Make a new staging folder for a checkpoint at ``folder``; delete what killed saves left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / name for name in _left(folder) - _named_in(folder)):
        if path.name.startswith(STAGING):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    made = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Add the name ``folder`` to errors of a full disk, which name no file."""
    try:
        yield
    except OSError as error:
        if getattr(error, "filename", None) is not None:
            raise
        raise OSError(
            f"{folder} was not written ({error}), and nothing has changed there: free space on its "
            f"disk, or choose another folder"
        ) from error


def holds_nothing(folder: Path) -> bool:
    """Return whether a folder is empty, or holds only the remains of killed saves."""
    return {*os.listdir(folder)} <= _left(folder)


def put_in_place(made: Path) -> None:
    """Move the checkpoint in a staging folder to the folder around it.

    The names of its shards must be free there.
    """
    folder = made.parent
    shards = sorted({*read_json(made / INDEX)["weight_map"].values()})
    obsolete = sorted(_named_in(folder))
    try:
        for name in shards:
            os.rename(made / name, folder / name)
        flush(folder)  # the shards are on the disk before the index that names them
        os.replace(made / INDEX, folder / INDEX)
    except BaseException:
        if os.path.lexists(made / INDEX):  # nothing reads these shards
            for name in shards:
                (folder / name).unlink(missing_ok=True)
        raise
    os.replace(made / CONFIG, folder / CONFIG)
    (folder / SINGLE).unlink(missing_ok=True)  # transformers would read this file, not the index
    flush(folder)  # the new index is on the disk before the files of the old one are deleted
    for path in (folder / name for name in obsolete):
        if path.is_symlink() or path.is_file():
            path.unlink()


def _left(folder: Path) -> set[str]:
    """Return all staging folders, and the moved shards of those that still hold their index."""
    made = {name for name in os.listdir(folder) if name.startswith(STAGING)}
    return made.union(*(_named_in(folder / name) for name in made))


def _named_in(folder: Path) -> set[str]:
    """Return the shards of a folder's checkpoint; none if its index cannot be read."""
    try:
        places = read_json(folder / INDEX).get("weight_map")
    except CheckpointError:
        return set()
    # only files in this folder: obsolete shards are deleted, and any index may name other files
    files = [x for x in places.values() if isinstance(x, str)] if isinstance(places, dict) else []
    return {x for x in files if x.endswith(".safetensors") and os.path.basename(x) == x}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object to a JSON file, and flush it to the disk."""
    file.write_text(json.dumps(content, indent=2) + "\n")
    flush(file)
