"""What every example needs to write its result down: versions, JSON's numbers, whole files."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str | None]:
    """Versions of what the result may depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "blocktensor", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    return found


def without_nan(value: Any) -> Any:
    """``value`` with every nan and infinity as None, since JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes ``path`` in one step, or vanishes if the block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
