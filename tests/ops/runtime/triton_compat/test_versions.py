"""Which Triton is trusted, and the trial of the kernels with any other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocktensor.ops import reference
from blocktensor.ops.cast import choose_backend as casts
from blocktensor.ops.cast import gluon_128x128, gluon_columnwise
from blocktensor.ops.formats import Quantized
from blocktensor.ops.gemm import choose_backend as gemms
from blocktensor.ops.gemm.hopper import launch as hopper
from blocktensor.ops.gemm.hopper.tile import Tile
from blocktensor.ops.gemm.hopper.tiles import TILES
from blocktensor.ops.grouped_gemm import choose_backend as grouped
from blocktensor.ops.grouped_gemm import hopper_launch as grouped_hopper
from blocktensor.ops.runtime.launch import this_thread, watch_launches
from blocktensor.ops.runtime.triton_compat import versions
from blocktensor.ops.runtime.triton_compat.versions import tried

CPU = torch.device("cpu")


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that nobody has tested the kernels with."""
    monkeypatch.setattr(versions, "installed", lambda: "4.2.0")


@pytest.mark.parametrize(
    ("version", "tested"),
    [("3.6.0", True), ("3.7.1", True), ("3.9.1+git", True), ("3.10.0", False), ("4.0.0", False)],
)
def test_a_tested_triton_is_trusted(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: version)
    assert versions.is_tested() == tested
    asked: list[torch.device] = []
    assert tried(asked.append)(CPU) is None
    assert asked == ([] if tested else [CPU])


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("wrong", [None, "sums differ", RuntimeError("first line\nsums differ")])
def test_another_is_tried_once(wrong: str | Exception | None) -> None:
    """What a trial raises is a failure; its launches are no part of what is recorded."""
    calls = []

    @tried
    def trial(device: torch.device) -> str | None:
        assert this_thread.launches is None
        calls.append(device)
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    said = "Triton 4.2.0 is not among those tested (3.6, 3.7, 3.8, 3.9): sums differ"
    with watch_launches():
        assert [trial(CPU) for _ in range(3)] == [wrong and said] * 3
        assert this_thread.launches is not None
    assert calls == [CPU]


class Planned:
    """Stands for ``plan_gemm``: the reference's product, stored when it is called."""

    def __init__(self, off: float = 1.0) -> None:
        self.off = off
        self.tiles: list[str] = []

    def __call__(
        self, a: Quantized, b: Quantized, bias: None, out: Tensor, tile: Tile
    ) -> Callable[[], Tensor]:
        self.tiles.append(tile.name)
        product = reference.gemm(a, b, None, torch.float32) * self.off
        return lambda: out.copy_(product)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planned]:
    """The reference in place of the kernels that the trials run; they begin anew."""
    for module, name, *_ in (*CASTS, *PRODUCTS):
        monkeypatch.setattr(module, name, getattr(reference, name))
    planned = Planned()
    monkeypatch.setattr(hopper, "plan_gemm", planned)
    forget()
    yield planned
    forget()


PRODUCTS = (
    (hopper, "gemm", gemms.gemms_fail),
    (grouped_hopper, "grouped_gemm", grouped.grouped_gemms_fail),
    (grouped_hopper, "grouped_gemm_wgrad", grouped.grouped_gemms_fail),
)
CASTS = (
    (gluon_columnwise.casts, "quantize_both"),
    *((gluon_128x128, name) for name in ("quantize_rowwise", "quantize_with_transpose")),
)
TRIALS: tuple[Any, ...] = (casts.casts_fail, gemms.gemms_fail, grouped.grouped_gemms_fail)


def forget() -> None:
    for trial in TRIALS:
        trial.forget()


@pytest.mark.usefixtures("newer")
def test_the_trials_pass_with_the_reference(on_the_cpu: Planned) -> None:
    """Wherever new tensors are made by default; every tile takes part."""
    with torch.device("meta"):
        assert [trial(CPU) for trial in TRIALS] == [None, None, None]
    assert sorted(on_the_cpu.tiles) == sorted(TILES)


def scaled(name: str, factor: float) -> Callable[..., Any]:
    """A product of the reference that is wrong by a factor."""
    return lambda *args: getattr(reference, name)(*args) * factor


def with_a_wrong_byte(name: str, *args: Any) -> Any:
    made = getattr(reference, name)(*args)
    last = made if isinstance(made, Quantized) else made[1]
    last.data.view(torch.uint8)[-1, -1] ^= 1
    return made


@pytest.mark.usefixtures("newer", "on_the_cpu")
@pytest.mark.parametrize(
    ("module", "name", "wrong", "trial"),
    [
        *((module, name, scaled(name, 1.01), trial) for module, name, trial in PRODUCTS),
        *((module, name, scaled(name, math.nan), trial) for module, name, trial in PRODUCTS),
        (hopper, "plan_gemm", Planned(1.01), gemms.gemms_fail),
        *((*cast, partial(with_a_wrong_byte, cast[1]), casts.casts_fail) for cast in CASTS),
    ],
)
def test_a_wrong_kernel_fails_its_trial(
    module: Any, name: str, wrong: Any, trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    said = trial(CPU) or ""
    assert "differ from the reference" in said
    assert name != "plan_gemm" or "the tile 'square 256x128' differ" in said


@pytest.mark.usefixtures("newer", "on_the_cpu")
def test_a_name_that_is_gone_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are imported by their trial."""
    monkeypatch.setitem(sys.modules, "blocktensor.ops.gemm.hopper.launch", None)
    assert "blocktensor.ops.gemm.hopper.launch" in (gemms.gemms_fail(CPU) or "")


@pytest.mark.usefixtures("newer")
def test_a_full_memory_is_no_failure() -> None:
    full = [False, True]

    @tried
    def trial(device: torch.device) -> str | None:
        if full.pop():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return None

    with pytest.raises(torch.cuda.OutOfMemoryError):
        trial(CPU)
    assert trial(CPU) is None


@pytest.mark.usefixtures("newer")
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tried(lambda device: "tried")
    for capturing in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        said = trial(torch.device("cuda", 0)) or ""
        assert said == "" if capturing else said.endswith("tried")


@pytest.mark.gpu
@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.__name__)
def test_the_trials_pass(trial: Any) -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("written for sm_90")
    forget()
    try:
        assert trial(device) is None
    finally:
        forget()
