"""Recorded launches in random programs: no call repeats a recording that is not its own.

On a CPU nothing launches: there every sequence and op remembers the layouts of the call that would
be recorded, and compares those of all calls that would repeat it. On a GPU the checking mode
compares the bytes of every repeated call. ``BLOCKTENSOR_PROGRAMS=600`` runs programs for so many
seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import Quantized, group_rows
from blocktensor.ops.op import OPS
from blocktensor.ops.runtime import check_recordings, specialize
from blocktensor.ops.runtime.specialize import watching
from tests.support.linear_ways import run_linears
from tests.support.models import linear, randn
from tests.support.programs import Program

SECONDS = float(os.environ.get("BLOCKTENSOR_PROGRAMS", "0"))


def layouts(value: Any) -> Any:
    """All that a recording bakes in of an argument, spelled out in the plainest way."""
    if isinstance(value, Tensor):
        described = str(value.dtype), str(value.device), list(value.shape), list(value.stride())
        return [*described, value.data_ptr() % 16]
    if isinstance(value, Quantized):
        return layouts(value.data), layouts(value.scale), value.format.name
    if isinstance(value, (tuple, list)):
        return [layouts(each) for each in value]
    return value


def without_rows(args: tuple[Any, ...]) -> Any:
    """Layouts of arguments in groups, with rows of high precision in steps, as casts have them."""
    rows = len(args[0]) if isinstance(args[0], Tensor) else None
    found = []
    for x in args:
        each = layouts(x)
        if isinstance(x, Tensor) and x.ndim == 2 and len(x) == rows:
            each[2][0] = group_rows(rows)
        found.append(group_rows(x) if type(x) is int else each)
    return found


def in_steps(args: tuple[Any, ...]) -> Any:
    """Layouts of arguments of a sequence, with rows in steps of 64; but for whole steps and few."""
    rows = args[0].numel() // args[0].shape[-1]
    found = layouts(args)
    if rows < 64 or rows % 64 == 0:
        return found
    if args[0].is_contiguous():
        found[0][2], found[0][3] = [rows, args[0].shape[-1]], [args[0].shape[-1], 1]

    def replace(each: Any) -> None:
        if isinstance(each, list) and each and isinstance(each[0], str):
            sizes = each[2]  # of a tensor
            if len(sizes) == 2 and sizes[0] == rows:
                sizes[0] = "rows", -(-rows // 64)
        elif isinstance(each, (tuple, list)):
            for part in each:
                replace(part)

    replace(found)
    return found


class Recording:
    """Stands for a recording on a CPU: checks what a real one would take for granted."""

    repeated = 0

    def __init__(self, function: Callable[..., Any], in_steps: bool) -> None:
        self.function, self.first, self.in_steps = function, None, in_steps

    def __call__(self, *args: Any) -> Any:
        in_groups = any(isinstance(x, Tensor) and x.dtype == torch.int32 for x in args)
        kind = without_rows if in_groups else in_steps if self.in_steps else layouts
        found = kind(args)
        Recording.repeated += self.first is not None
        self.first = self.first or found
        assert found == self.first, self.function.__name__
        return self.function(*args)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all sequences and ops record on the CPU, by :class:`Recording`."""
    run_linears("sequence", monkeypatch)
    monkeypatch.setattr(specialize, "recorded", lambda function, *_: Recording(function, True))
    monkeypatch.setattr(
        "blocktensor.ops.op.recorded", lambda function, *_: Recording(function, False)
    )
    monkeypatch.setattr(Recording, "repeated", 0)
    tables = [*OPS.values(), *(each.table for each in specialize.SEQUENCES)]
    for table in tables:
        table.forget()
    yield
    for table in tables:
        table.forget()


def assert_equal_bits(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(x, y), f"{i} of {len(got)}: {list(x.shape)}"


def run_both_ways(program: Program) -> None:
    """Run a program recorded, and op by op, as a monitor watches it."""
    got = program.run()
    with watching(lambda *_: None):
        want = program.run()
    assert_equal_bits(got, want)


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize("part", range(4))
def test_programs_on_a_cpu(part: int) -> None:
    for seed in range(part, 24, 4):
        run_both_ways(Program(seed, "cpu", widths=(128, 160, 256)))
    assert Recording.repeated > 50


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_programs_on_a_gpu(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_recordings, "ENABLED", True)
    before, end, seed = check_recordings.compared["recordings"], time.time() + SECONDS, part
    while seed < 32 or time.time() < end:
        try:
            run_both_ways(Program(seed, "cuda"))
        except Exception as error:
            raise AssertionError(f"program {seed}: {vars(Program(seed, 'cuda'))}") from error
        seed += 4
    compared = check_recordings.compared["recordings"] - before
    print(f"{(seed - part) // 4} programs, {compared} repeated calls compared")
    assert compared > 200


@pytest.mark.usefixtures("recordings")
@pytest.mark.parametrize(("n", "k"), [(512, 128), (512, 512), (1152, 128)])
def test_a_retained_graph_on_a_cpu(n: int, k: int) -> None:
    assert_retained_gradients_are_equal(n, k, "cpu")
    assert Recording.repeated > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (2048, 1024), (4096, 4096), (1152, 1024)])
def test_a_retained_graph_on_a_gpu(n: int, k: int) -> None:
    assert_retained_gradients_are_equal(n, k, "cuda")


def assert_retained_gradients_are_equal(n: int, k: int, device: str) -> None:
    """The second backward casts the weight again, in another layout of its scales."""
    module = linear(n, k, device=device)
    with torch.no_grad():
        of_block = torch.logspace(0, 2, n // 128, device=device).repeat_interleave(128)
        module.weight.mul_(of_block[:, None])
    x, grad = randn(300, k, device=device, grad=True), randn(300, n, seed=1, device=device)
    for _ in range(3):
        y = module(x)
        first = torch.autograd.grad(y, [x, module.weight], grad, retain_graph=True)
        second = torch.autograd.grad(y, [x, module.weight], grad)
        assert_equal_bits([*first], [*second])
