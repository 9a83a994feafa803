"""The speed of every tile of the Hopper GEMM, and of cuBLAS: what the choice among them rests on.

Times of many shapes are fitted by least squares of the relative error to the lines of
``blocktensor.ops.gemm.hopper.tiles.Speed``: microseconds a wave and k block, a wave, and a launch;
and where there is one wave, a k block and a launch.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocktensor.ops.devices import H200, card
from blocktensor.ops.formats import BLOCK, num_blocks
from blocktensor.ops.gemm.choose_backend import gemm_backend
from blocktensor.ops.gemm.hopper.tiles import CUBLAS, FILE, TILES, Speed, speeds

from .gemm import Case, Inputs, make_inputs
from .shapes import SET_S, Shape
from .timing import Maker, graph_repeats, graphed, round_robin

KINDS = {"fprop": BLOCK, "wgrad": 1}
"""The products that are measured, and the rows of B that share a scale."""

SHAPES: tuple[Shape, ...] = (
    *SET_S[:12],
    (64, 7168, 2048),
    (64, 2048, 7168),
    (128, 7168, 2048),
    (256, 4096, 4096),
    (512, 2048, 2048),
    (1024, 4096, 4096),
    (1024, 7168, 2048),
    (2048, 2112, 7168),
    (4096, 576, 7168),
    (4096, 1408, 2048),
    (1024, 1024, 1024),
    (4096, 1024, 1024),
    (2048, 2048, 1024),
    (8192, 1024, 576),
    (8192, 24576, 1536),
    (16384, 4096, 768),
    (4096, 7168, 1408),
)
"""Large and small, with full waves and without, and with less than one."""

PARTS = ("block_us", "wave_us", "launch_us", "lone_block_us", "lone_us")
"""The fitted numbers of a kernel."""

QUICK: dict[str, Any] = {"shapes": SHAPES[3:7], "rounds": 3}


def _tile(name: str) -> Maker:
    from blocktensor.ops.gemm.hopper.launch import plan_gemm

    def make(i: Inputs) -> Any:
        launch = plan_gemm(i.a, i.b, None, i.out, TILES[name])
        return lambda: launch()

    return make


def _cublas(i: Inputs) -> Any:
    gemm = gemm_backend("cublas").function("gemm")
    assert gemm is not None
    return lambda: gemm(i.a, i.b, None, torch.bfloat16)


def _names(kind: str) -> list[str]:
    """The kernels of a kind, as tiles.json calls them."""
    return [name for name, tile in TILES.items() if tile.b_block == KINDS[kind]]


def _times(case: Case, rounds: int) -> dict[str, float]:
    """Microseconds of each kernel on one shape."""
    inputs = make_inputs(case)
    makers: dict[str, Maker] = {name: _tile(name) for name in _names(case.kind)}
    if gemm_backend("cublas").declines(case.problem()) is None:
        makers[CUBLAS[KINDS[case.kind]]] = _cublas
    repeats = graph_repeats(case.flops)
    timed = {name: [graphed(make(inputs), repeats=repeats)] for name, make in makers.items()}
    ms = round_robin(timed, rounds=rounds, block_ms=3.0)
    return {name: 1000 * ms[name] / repeats for name in timed}


def _line(features: list[list[float]], us: list[float]) -> list[float]:
    """The coefficients that explain ``us`` by ``features``, in relative error; zeros of nothing."""
    if not us:
        return [0.0, 0.0, 0.0]
    measured = torch.tensor(us, dtype=torch.float64)
    weighted = torch.tensor(features, dtype=torch.float64) / measured[:, None]
    found: Tensor = torch.linalg.lstsq(weighted, torch.ones_like(measured)[:, None]).solution
    return found[:, 0].tolist()


def fit(shape: Speed, problems: list[tuple[int, int, int]], us: list[float], count: int) -> Speed:
    """``shape`` with the times that explain ``us``, measured on ``problems`` (M, N, K).

    ``count``: SMs of the GPU.
    """
    many: tuple[list[list[float]], list[float]] = ([], [])
    lone: tuple[list[list[float]], list[float]] = ([], [])
    for (m, n, k), time in zip(problems, us, strict=True):
        waves = shape.waves(m, n, count)
        features, times = lone if waves == 1 else many
        blocks = num_blocks(k)
        features.append(
            [shape.an_sm(m, n, count) * blocks, 1] if waves == 1 else [waves * blocks, waves, 1]
        )
        times.append(time)
    block_us, wave_us, launch_us = _line(*many)
    lone_block_us, lone_us = _line(*lone)[:2]
    return replace(
        shape,
        block_us=block_us,
        wave_us=wave_us,
        launch_us=launch_us,
        lone_block_us=lone_block_us,
        lone_us=lone_us,
    )


def measure(shapes: tuple[Shape, ...] = SHAPES, rounds: int = 6) -> Iterator[dict[str, Any]]:
    """One row a kernel: its fitted times, and how far they are from what was measured."""
    count = card(torch.device("cuda", 0)).sms
    for kind in KINDS:
        cases = [Case(kind, *shape) for shape in shapes]
        times = [_times(case, rounds) for case in cases]
        for name in times[0]:
            known = [(c.problem(), t[name]) for c, t in zip(cases, times, strict=True)]
            problems = [(p.m, p.n, p.k) for p, _ in known]
            us = [t for _, t in known]
            speed = fit(speeds(H200.name)[name], problems, us, count)
            errors = [
                speed.microseconds(m, n, num_blocks(k), count) / t - 1
                for (m, n, k), t in zip(problems, us, strict=True)
            ]
            yield {
                "kernel": name,
                "m": speed.m,
                "n": speed.n,
                "programs": speed.programs,
                **{part: round(getattr(speed, part), 4) for part in PARTS},
                "mean_error": round(sum(map(abs, errors)) / len(errors), 3),
                "max_error": round(max(map(abs, errors)), 3),
                "measured_us": [round(t, 2) for t in us],
            }


def publish(rows: list[dict[str, Any]]) -> Path:
    """Write what was measured to where the choice reads it, as the part of this card; that file."""
    kept = ("m", "n", "programs", *PARTS)
    known = json.loads(FILE.read_text())
    known[card(torch.device("cuda", 0)).name] = {
        "gpu": torch.cuda.get_device_name(),
        "date": str(datetime.date.today()),
        "command": "python -m benchmarks tiles",
        "speeds": {row["kernel"]: {name: row[name] for name in kept} for row in rows},
    }
    FILE.write_text("{\n" + ",\n".join(_lines(*part) for part in known.items()) + "\n}\n")
    return FILE


def _lines(name: str, part: dict[str, Any]) -> str:
    """The part of a card, a line a kernel."""
    *facts, _ = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())
    rows = (f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in part["speeds"].items())
    listed = ',\n  "speeds": {\n' + ",\n".join(rows) + "\n  }"
    return f" {json.dumps(name)}: {{\n" + ",\n".join(facts) + listed + "\n }"
