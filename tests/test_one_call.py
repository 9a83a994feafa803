"""docs/one_call.md says what a linear does, and a reader visits few files to follow it.

python -m tests.test_one_call        prints the calls of a linear's forward and backward
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import blocktensor

PACKAGE = Path(blocktensor.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "one_call.md"
LINE = re.compile(r"^\d+\. `([^`]+)` `([^`]+)`:", re.MULTILINE)
REFERENCE = "ops/reference.py"

CallPath = list[tuple[str, str]]
"""Calls in order, each as ``(file, function)``."""


def path_of(run: Callable[[], Any]) -> CallPath:
    """The calls that ``run()`` makes inside the package, in this thread.

    Those below the reference, which is the CPU backend, do not count.
    """
    calls: CallPath = []
    reference: list[FrameType] = []

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return
        name = str(Path(file).relative_to(PACKAGE))
        if event == "call":
            if name == REFERENCE and not reference:
                reference.append(frame)
            if not reference:
                calls.append((name, frame.f_code.co_name))
        elif event == "return" and reference and reference[0] is frame:
            reference.clear()

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def linear_paths() -> dict[str, CallPath]:
    """A second forward and a second backward of a converted linear on the CPU."""
    module = torch.nn.Linear(256, 384)
    module.apply(blocktensor.to_blockwise_fp8_weights)
    x = torch.randn(64, 256, requires_grad=True)
    grad = torch.randn(64, 384)
    with torch.autograd.set_multithreading_enabled(False):
        module(x).backward(grad)
        module.weight.grad = None
        results: list[Any] = []
        forward = path_of(lambda: results.append(module(x)))
        backward = path_of(lambda: results[0].backward(grad))
    return {"Forward": forward, "Backward": backward}


def shown(calls: CallPath) -> str:
    lines = [f"{file:32} {function}" for file, function in calls]
    return "\n".join([*lines, f"{len({file for file, _ in calls})} files, {len(calls)} calls"])


@pytest.fixture(scope="module")
def paths() -> dict[str, CallPath]:
    return linear_paths()


@pytest.mark.not_repeated
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="pipelines are watched in each forward")
@pytest.mark.parametrize("section", ["Forward", "Backward"])
def test_the_document_has_every_change_of_file_and_they_are_few(
    paths: dict[str, CallPath], section: str
) -> None:
    text = DOCUMENT.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    entered = [next(calls) for _, calls in groupby(paths[section], key=lambda call: call[0])]
    assert LINE.findall(text) == entered
    assert len({file for file, _ in entered}) <= 9
    assert len(entered) <= 15


def test_the_document_names_files_and_functions_that_exist() -> None:
    text = DOCUMENT.read_text()
    for file in set(re.findall(r"`([\w/]+\.py)`", text)):
        assert (PACKAGE / file).exists() or (PACKAGE.parent / file).exists(), file
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in set(re.findall(r"`(_?[a-z]+_[a-z_]+)`", text)):
        assert re.search(rf"\b{name}\b", sources), name


if __name__ == "__main__":
    for name, path in linear_paths().items():
        print(f"{name}\n{shown(path)}\n")
