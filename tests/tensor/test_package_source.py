"""Compiled code is found again as long as this package is the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blocktensor.tensor import package_source
from blocktensor.tensor.package_source import source_key

SCRIPT = """
import torch
from torch import nn
from torch._dynamo.utils import counters
import blocktensor
linear = nn.Linear(256, 256)
blocktensor.convert(linear, auto_filter_small_kn=False)
x = torch.randn(8, 256)
with torch.no_grad():
    y = torch.compile(linear)(x)
    print(torch.equal(y, linear(x)), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, in the place of this one."""
    made = tmp_path / "blocktensor"
    shutil.copytree(package_source._PACKAGE, made, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(package_source, "_PACKAGE", made)
    monkeypatch.setattr(package_source, "_IMPORTED", time.time() + 1)
    return made


def key() -> str:
    source_key.cache_clear()
    return source_key()


def test_the_key_is_that_of_the_source(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = key()
    (package / "tensor" / "__pycache__").mkdir()
    (package / "notes.txt").write_text("no source")
    for file in package.rglob("*.py"):
        os.utime(file)  # another copy of the same
    assert key() == first
    (package / "new.py").write_text("")
    assert key() not in (first, "")
    (package / "new.py").unlink()
    assert key() == first
    monkeypatch.setattr(package_source, "_IMPORTED", time.time() - 60)
    assert len({first, key(), key()}) == 3  # what runs is not what the files say
    source_key.cache_clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_a_checkout_that_moves_runs_its_own_code(package: Path, tmp_path: Path) -> None:
    def run() -> list[str]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=package.parent,  # from which it imports
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    assert run() == ["True", "0"]
    linear = package / "autograd" / "linear.py"
    text = linear.read_text()
    changed = text.replace("return gemm(x_row, w, bias, out_dtype), x_col",
                           "return gemm(x_row, w, bias, out_dtype) * 2, x_col")  # fmt: skip
    assert changed != text
    linear.write_text(changed)
    assert run() == ["True", "0"]
