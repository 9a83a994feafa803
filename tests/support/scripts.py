"""Importing the files of examples/ as a script there would."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"
Load = Callable[[str], ModuleType]


def flags(**values: int | str) -> list[str]:
    """Return ``--name value`` for each argument."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


TINY_MODEL = flags(dim=16, layers=1, heads=2, seq=16, batch=2, steps=6, device="cpu")
"""Flags of ``train_lm.py`` for a run of seconds."""


@contextmanager
def examples() -> Iterator[Load]:
    """Within, what imports a file by its name; it leaves no trace."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(EXAMPLES))
        theirs = {"common", *(path.stem for path in EXAMPLES.glob("*.py"))}
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in theirs:
                del sys.modules[name]
