"""Putting a finished checkpoint in its place: a kill at any moment leaves the old one or the new.

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
"""Beginning of the name of a staging folder, and a part of names of shards that came from it."""


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Make a new staging folder for a checkpoint at ``folder``, without what killed saves left."""
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
    """Name ``folder`` in errors of a full disk, which name no file."""
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
    """Return whether a folder is empty, or holds only what a killed save has left."""
    return {*os.listdir(folder)} <= _left(folder)


def put_in_place(made: Path) -> None:
    """Make the checkpoint in a staging folder the one of the folder around it.

    No name of its shards may be taken there.
    """
    folder = made.parent
    shards = sorted({*read_json(made / INDEX)["weight_map"].values()})
    obsolete = sorted(_named_in(folder))
    try:
        for name in shards:
            os.rename(made / name, folder / name)
        flush(folder)  # names are on the disk before an index that needs them
        os.replace(made / INDEX, folder / INDEX)
    except BaseException:
        if os.path.lexists(made / INDEX):  # nothing reads the shards
            for name in shards:
                (folder / name).unlink(missing_ok=True)
        raise
    os.replace(made / CONFIG, folder / CONFIG)
    (folder / SINGLE).unlink(missing_ok=True)  # transformers would read it and not the index
    flush(folder)  # the new index is on the disk before files of the old one go
    for path in (folder / name for name in obsolete):
        if path.is_symlink() or path.is_file():
            path.unlink()


def _left(folder: Path) -> set[str]:
    """Return staging folders, and the shards from those whose index has not left them."""
    made = {name for name in os.listdir(folder) if name.startswith(STAGING)}
    return made.union(*(_named_in(folder / name) for name in made))


def _named_in(folder: Path) -> set[str]:
    """Return the shards of a folder's checkpoint; none if its index cannot be read."""
    try:
        places = read_json(folder / INDEX).get("weight_map")
    except CheckpointError:
        return set()
    # obsolete shards are deleted: an index of another library may name files of other folders
    files = [x for x in places.values() if isinstance(x, str)] if isinstance(places, dict) else []
    return {x for x in files if x.endswith(".safetensors") and os.path.basename(x) == x}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object to a file, and the file to the disk."""
    file.write_text(json.dumps(content, indent=2) + "\n")
    flush(file)
