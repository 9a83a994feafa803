"""Results on disk: JSON with everything needed to reproduce a number."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """Device, versions, date and command of this run."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "absent"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device or platform.machine(),
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks " + " ".join(sys.argv[1:2]),  # where to is no matter
    }


def write(name: str, rows: list[dict[str, Any]], folder: Path = FOLDER, **extra: Any) -> Path:
    """Write ``name.json`` atomically: environment, any ``extra`` facts, and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.json"
    content = json.dumps({"environment": environment(), **extra, "rows": rows}, indent=1)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        file.write(content + "\n")
    os.replace(file.name, target)
    return target
