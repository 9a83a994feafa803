"""The calls inside the package that one operation makes: how many files a reader visits.

    python -m tests.support.call_path        prints the paths of a linear's forward and backward

A *switch* is a call whose file differs from that of the call before. Calls below the reference,
which is the CPU backend, do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import blocktensor

PACKAGE = Path(blocktensor.__file__).parent
REFERENCE = "ops/reference.py"


class CallPath(NamedTuple):
    """Calls in order, each as ``(file, function)``."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def switches(self) -> int:
        files = [file for file, _ in self.calls]
        return sum(a != b for a, b in pairwise(files))

    def __str__(self) -> str:
        lines = [f"{file:32} {function}" for file, function in self.calls]
        total = (
            f"{len(self.files)} files, {len(self.calls)} calls, {self.switches} switches of file"
        )
        return "\n".join([*lines, total])


def path_of(run: Callable[[], Any]) -> CallPath:
    """The calls that ``run()`` makes inside the package, in this thread."""
    calls: list[tuple[str, str]] = []
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
    return CallPath(calls)


def linear_paths() -> tuple[CallPath, CallPath]:
    """A second forward and a second backward of a converted linear on the CPU."""
    import torch

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
    return forward, backward


if __name__ == "__main__":
    for name, path in zip(("forward", "backward"), linear_paths(), strict=True):
        print(f"{name}\n{path}\n")
