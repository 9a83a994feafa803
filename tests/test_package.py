"""What a stranger sees first: the public names, their types and docs, and three lines of usage."""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import blocktensor

ROOT = Path(__file__).parents[1]


def test_all_lists_names_that_exist() -> None:
    assert blocktensor.__all__ == sorted(blocktensor.__all__)
    namespace: dict[str, object] = {}
    exec("from blocktensor import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(blocktensor.__all__)


@pytest.mark.parametrize("name", blocktensor.__all__)
def test_everything_public_is_documented(name: str) -> None:
    value = getattr(blocktensor, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        methods = [m for n, m in vars(value).items() if inspect.isfunction(m) and n[0] != "_"]
        assert [m.__qualname__ for m in methods if not inspect.getdoc(m)] == []


@pytest.mark.parametrize("name", ["functional", "distributed", "reports"])
def test_dir_shows_the_public_names_alone(name: str) -> None:
    module = getattr(blocktensor, name)
    assert dir(module) == sorted(module.__all__)
    assert set(dir(blocktensor)) == {*blocktensor.__all__, "__version__"}


def test_the_version_is_the_one_declared() -> None:
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert blocktensor.__version__ == declared[1]
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from a checkout
        assert metadata.version("blocktensor") == declared[1]


def test_types_are_shipped() -> None:
    assert (ROOT / "blocktensor" / "py.typed").exists()


def test_importing_touches_neither_cuda_nor_the_clock_nor_torchs_state() -> None:
    program = (
        "import torch; before = torch.get_default_dtype(), torch.is_grad_enabled(), "
        "torch.get_num_threads(); import blocktensor; assert before == (torch.get_default_dtype(), "
        "torch.is_grad_enabled(), torch.get_num_threads()); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True, timeout=120
    )


def test_three_lines_train_a_model(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(192, 256), nn.SiLU(), nn.Linear(256, 192)).to(device)
    model.apply(blocktensor.to_blockwise_fp8_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(64, 192, device=device)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
