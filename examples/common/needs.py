"""Say which package an example lacks, in place of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def needs(*packages: str, install: str) -> Iterator[None]:
    """Exit if an import finds no such package; ``install``: what to give to ``pip install``."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        sys.exit(f"{Path(sys.argv[0]).name} needs {package}: pip install {install}")
