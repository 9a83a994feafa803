"""Putting a finished checkpoint in its place: a kill at any moment leaves the old one or the new.

A checkpoint is made in a *staging folder*: beside its place where there is none yet, else inside
the folder. It holds a lock until its process ends. The index is what makes files a
checkpoint, so a checkpoint inside a folder is replaced by one rename, that of its index: see
docs/design/checkpoints.md for the order of steps and for what each kill leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .on_disk import CONFIG, HEADERS, INDEX, SINGLE, CheckpointError, read_json

STAGING = ".save_fp8."
"""Beginning of the name of a staging folder inside the folder; beside it, its name comes first."""

_UNLOCKED = ".new.save_fp8."
"""Its beginning until the folder is locked."""

_JOURNAL = "files.json"
"""Inside a staging folder: all file names that this save may make or remove in the folder."""

_LOCK_TIMEOUT_S = 60.0
"""Wait so long for another process that is replacing the same checkpoint; it takes under 1."""


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Make a new staging folder for a checkpoint at ``folder``, an absolute path without links."""
    inside = folder.is_dir()
    base, prefix = (folder, STAGING) if inside else (folder.parent, f".{folder.name}{STAGING}")
    # It gets a name that is known after its lock, or another process would take it for abandoned.
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=base))
    with _lock(made):
        try:
            named = base / f"{prefix}{made.name.rpartition('.')[2]}"
            os.rename(made, named)
            made = named
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
    names = set(os.listdir(folder))
    left = {name for name in names if name.startswith((STAGING, _UNLOCKED))}
    return names <= left.union(*(_journal(folder / name) for name in left))


def put_in_place(made: Path, folder: Path) -> None:
    """Make the checkpoint in ``made``, its staging folder, the one of ``folder``.

    Raises:
        FileExistsError: there was no folder when ``made`` was, and now there is one.
    """
    if made.parent == folder:
        with _lock(folder, _LOCK_TIMEOUT_S):
            try:
                _replace(made, folder)
            except BaseException:
                _settle(made, folder)
                raise
        return
    os.chmod(made, 0o777 & ~_umask())
    flush(made)
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.exists():
            raise
        raise FileExistsError(f"{folder} appeared while its checkpoint was written") from None
    flush(folder.parent)
    for abandoned in _abandoned(folder.parent, f".{folder.name}{STAGING}"):
        shutil.rmtree(abandoned, ignore_errors=True)


def _replace(made: Path, folder: Path) -> None:
    """Put the files of ``made`` into ``folder``, then remove those of its former checkpoint."""
    index = read_json(made / INDEX)
    shards = sorted(set(index["weight_map"].values()))
    abandoned = _abandoned(folder, STAGING)
    named = _named_in(folder)
    obsolete = set() if named is None else named.union(*map(_journal, abandoned)) - {SINGLE}
    taken = {name for name in shards if os.path.lexists(folder / name)}
    names = {name: name for name in shards}
    if taken:
        tag = made.name.rpartition(".")[2]
        names = {name: f"{Path(name).stem}-{tag}.safetensors" for name in shards}
        write_json(made / INDEX, _renamed(index, names))
    mine = set(names.values())
    plain = set(shards) if taken <= obsolete else set()
    write_json(made / _JOURNAL, {"files": sorted(mine | plain | obsolete)})

    for name in shards:
        os.rename(made / name, folder / names[name])
    flush(folder)  # names are on the disk before an index that needs them
    os.replace(made / INDEX, folder / INDEX)
    os.replace(made / CONFIG, folder / CONFIG)
    _remove(folder / SINGLE)  # transformers would read it and not the index
    flush(folder)  # the new index is on the disk before files of the old one go
    for name in sorted(obsolete - mine):
        _remove(folder / name)
    if taken and plain:
        _take_plain_names(made, folder, index, names)
    for one in abandoned:
        shutil.rmtree(one, ignore_errors=True)


def _take_plain_names(
    made: Path, folder: Path, index: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Rename the shards of ``folder``: under both names until an index has the plain ones."""
    linked: list[Path] = []
    try:
        for plain, name in names.items():
            os.link(folder / name, folder / plain)
            linked.append(folder / plain)
    except OSError:  # no hard links on this file system: the shards keep their names
        for path in linked:
            _remove(path)
        return
    write_json(made / INDEX, index)
    flush(folder)
    os.replace(made / INDEX, folder / INDEX)
    flush(folder)
    for name in names.values():
        _remove(folder / name)


def _settle(made: Path, folder: Path) -> None:
    """Complete a save whose index is in place, undo one whose index is not, after an exception."""
    # The index leaves the staging folder first; it is there again while shards get plain names.
    in_place = not (os.path.lexists(made / INDEX) and os.path.lexists(made / CONFIG))
    if in_place:
        with contextlib.suppress(OSError):
            if os.path.lexists(made / CONFIG):
                os.replace(made / CONFIG, folder / CONFIG)
            _remove(folder / SINGLE)
    named = _named_in(folder)
    if named is None and in_place:
        return
    for name in _journal(made) - (named or set()):
        with contextlib.suppress(OSError):
            _remove(folder / name)


def _named_in(folder: Path) -> set[str] | None:
    """Return the shards of a folder's checkpoint; None if its index cannot be read."""
    if not os.path.lexists(folder / INDEX):
        return {SINGLE} if os.path.lexists(folder / SINGLE) else set()
    try:
        places = read_json(folder / INDEX).get("weight_map")
    except CheckpointError:
        return None
    return _shard_names(places.values()) if isinstance(places, dict) else None


def _journal(made: Path) -> set[str]:
    try:
        files = read_json(made / _JOURNAL).get("files")
    except CheckpointError:  # killed before it was written
        return set()
    return _shard_names(files) if isinstance(files, list) else set()


def _shard_names(names: Any) -> set[str]:
    """Keep names that shards can have: what another index names is removed, and may be anything."""
    files = [x for x in names if isinstance(x, str) and x.endswith(".safetensors")]
    return {name for name in files if os.path.basename(name) == name}


def _renamed(index: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    metadata = dict(index["metadata"])
    metadata[HEADERS] = {names[file]: digest for file, digest in metadata[HEADERS].items()}
    places = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    return {"metadata": metadata, "weight_map": places}


def _remove(path: Path) -> None:
    """Remove a file or a link, if there is one; never a folder."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _abandoned(base: Path, prefix: str) -> list[Path]:
    """Find staging folders in ``base`` whose process is gone."""
    found = []
    for path in (base / name for name in os.listdir(base) if name.startswith(prefix)):
        if path.is_dir() and not path.is_symlink():
            # one that has gone was removed by the process that made it
            with contextlib.suppress(TimeoutError, FileNotFoundError), _lock(path) as held:
                found += [path] if held else []
    return found


@contextlib.contextmanager
def _lock(folder: Path, timeout_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a folder; it yields False where the file system has no locks.

    Raises:
        TimeoutError: another process still holds it after ``timeout_s`` seconds.
    """
    import fcntl

    until = time.monotonic() + timeout_s
    handle = os.open(folder, os.O_RDONLY)
    try:
        has_locks = True
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"{folder}: another process has been writing a checkpoint here for "
                        f"{timeout_s:g} s: save to another path, or from one process only"
                    ) from None
                time.sleep(0.01)
                continue
            except OSError:
                has_locks = False
            break
        yield has_locks
    finally:
        os.close(handle)  # and release it


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object to a file, and the file to the disk."""
    file.write_text(json.dumps(content, indent=2) + "\n")
    flush(file)


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """Return the process's mask of file modes, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
