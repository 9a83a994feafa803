"""Identify the source of this package for compile caches, whose code depends on it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import time
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_IMPORTED = time.time()


@functools.cache
def source_key() -> str:
    """Return the version of this package and a digest of its files.

    torch's compile cache finds a graph by what Dynamo has traced, which is a call of ``F.linear``
    with a weight; what AOTAutograd makes of that call is this package's. The version of a checkout
    stays as its files change. The first call, at the first compilation, takes some 10 ms.

    A process whose files have changed since the import runs code that is not in them: it shares no
    graph with another process.
    """
    try:
        version = importlib.metadata.version("blocktensor")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mtime > _IMPORTED:
                digest.update(os.urandom(32))
            digest.update(f"{path.relative_to(_PACKAGE)}\n".encode() + file.read())
    return f"{version} {digest.hexdigest()}"
