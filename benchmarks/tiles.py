"""The speed of every tile of the Hopper GEMM, and of cuBLAS: what the choice among them rests on.

Times of many shapes are fitted by least squares of the relative error to the line of
``blocktensor.ops.gluon.tiles.Speed``: microseconds a wave and k block, a wave, and a launch.
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

from blocktensor.ops import backends
from blocktensor.ops.gluon.tiles import CUBLAS, FILE, TILES, Speed, sms, speeds
from blocktensor.ops.layouts import BLOCK, num_blocks

from .gemm import Case, Inputs, Maker, make_inputs
from .shapes import SET_S, Shape
from .timing import graph_repeats, graphed, round_robin

KINDS = {BLOCK: "fprop", 1: "wgrad"}

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
)
"""Large and small, with full waves and without."""

QUICK: dict[str, Any] = {"shapes": SHAPES[3:7], "rounds": 3}


def _tile(name: str) -> Maker:
    from blocktensor.ops.gluon.gemm import plan_gemm

    def make(i: Inputs) -> Any:
        launch = plan_gemm(*i.a, *i.b, None, i.out, False, TILES[name])
        return lambda: launch()

    return make


def _cublas(i: Inputs) -> Any:
    module = backends.gemm_module("cublas")
    return lambda: module.gemm(*i.a, *i.b, None, torch.bfloat16)


def _times(case: Case, b_block: int, rounds: int) -> dict[str, float]:
    """Microseconds of each kernel for the scales of ``b_block`` on one shape."""
    inputs = make_inputs(case)
    makers: dict[str, Maker] = {n: _tile(n) for n, t in TILES.items() if t.b_block == b_block}
    if backends.gemm_backend("cublas").declines(case.problem(False)) is None:
        makers[CUBLAS[b_block]] = _cublas
    repeats = graph_repeats(case.flops)
    timed = {name: [graphed(make(inputs), repeats=repeats)] for name, make in makers.items()}
    ms = round_robin(timed, rounds=rounds, block_ms=3.0)
    return {name: 1000 * ms[name] / repeats for name in timed}


def fit(shape: Speed, problems: list[tuple[int, int, int]], us: list[float], count: int) -> Speed:
    """``shape`` with the times that explain ``us``, measured on ``problems`` (M, N, K).

    ``count``: SMs of the GPU.
    """
    rows = []
    for m, n, k in problems:
        waves = shape.waves(m, n, count)
        rows.append([waves * num_blocks(k), waves, 1])
    measured = torch.tensor(us, dtype=torch.float64)
    features = torch.tensor(rows, dtype=torch.float64) / measured[:, None]
    found: Tensor = torch.linalg.lstsq(features, torch.ones_like(measured)[:, None]).solution
    block_us, wave_us, launch_us = found[:, 0].tolist()
    return replace(shape, block_us=block_us, wave_us=wave_us, launch_us=launch_us)


def measure(shapes: tuple[Shape, ...] = SHAPES, rounds: int = 6) -> Iterator[dict[str, Any]]:
    """One row a kernel: its fitted times, and how far they are from what was measured."""
    count = sms(torch.device("cuda", 0))
    for b_block, kind in KINDS.items():
        cases = [Case(kind, *shape) for shape in shapes]
        times = [_times(case, b_block, rounds) for case in cases]
        for name in times[0]:
            known = [(c.problem(False), t[name]) for c, t in zip(cases, times, strict=True)]
            problems = [(p.m, p.n, p.k) for p, _ in known]
            us = [t for _, t in known]
            speed = fit(speeds()[name], problems, us, count)
            errors = [
                abs(speed.microseconds(m, n, num_blocks(k), count) / t - 1)
                for (m, n, k), t in zip(problems, us, strict=True)
            ]
            yield {
                "kernel": name,
                "m": speed.m,
                "n": speed.n,
                "programs": speed.programs,
                "block_us": round(speed.block_us, 4),
                "wave_us": round(speed.wave_us, 4),
                "launch_us": round(speed.launch_us, 4),
                "mean_error": round(sum(errors) / len(errors), 3),
                "max_error": round(max(errors), 3),
            }


def publish(rows: list[dict[str, Any]]) -> Path:
    """Write what was measured to where the choice reads it; that file."""
    kept = ("m", "n", "programs", "block_us", "wave_us", "launch_us")
    lines = [
        f"  {json.dumps(row['kernel'])}: {json.dumps({name: row[name] for name in kept})}"
        for row in rows
    ]
    FILE.write_text(
        "{\n"
        f' "gpu": {json.dumps(torch.cuda.get_device_name())},\n'
        f' "date": "{datetime.date.today()}",\n'
        ' "command": "python -m benchmarks tiles",\n'
        ' "speeds": {\n' + ",\n".join(lines) + "\n }\n}\n"
    )
    return FILE
