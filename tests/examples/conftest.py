"""What tests of examples share: importing scripts, and a small text to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import Load, examples


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Import a file of examples/ the way a script there would, leaving no trace afterwards."""
    with examples() as load:
        yield load


@pytest.fixture
def example(request: pytest.FixtureRequest, load: Load) -> ModuleType:
    """The script that ``EXAMPLE`` in the module of the test names."""
    return load(request.module.EXAMPLE)


@pytest.fixture
def stdlib(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library in place of the machine's; few batches and short samples."""
    root = tmp_path / "stdlib"
    for index in range(40):
        file = root / f"package{index % 3}" / f"module{index}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def function{index}(x):\n    return x + {index}\n" * 20)
    for skipped in ("site-packages", "package0/test"):
        (root / skipped).mkdir(parents=True)
        (root / skipped / "skipped.py").write_text("raise AssertionError\n")
    monkeypatch.setattr(load("common.text").sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(load("common.training"), "HELDOUT_BATCHES", 2)
    monkeypatch.setattr(load("common.training"), "SAMPLE_LENGTH", 20)
    return root
