"""nn.Linear forward + backward, bf16 against FP8, the weight cast every step.

Also its device time against the sum of its GEMMs and casts, each measured alone in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import blocktensor as bt
from blocktensor.ops.cast.ops import (
    quantize_both,
    quantize_columnwise,
    quantize_rowwise,
    transpose,
)
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from blocktensor.ops.gemm.ops import gemm

from . import peers
from .shapes import LINEAR, SMALL, Shape
from .timing import Call, flushed, graph_repeats, graphed, round_robin

QUICK: dict[str, Any] = {"shapes": (SMALL,), "rounds": 6}
"""The arguments of a smoke run."""

_MOST_SETS = 8
_ROTATED_ELEMENTS = 2**28


def step(layer: nn.Linear, x: Tensor, grad: Tensor) -> Call:
    """One forward and backward."""

    def run() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(grad)

    return run


def layers(n: int, k: int, peer: bool = True) -> dict[str, nn.Linear]:
    """Return the same linear layer in bf16 and in FP8.

    With ``peer`` also in FP8 with ``Recipe.deepseek()``, and in torchao's FP8, if it is here.
    """

    def plain() -> nn.Linear:
        return nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)

    fp8 = plain()
    bt.to_blockwise_fp8_weights(fp8)
    made: dict[str, nn.Linear] = {"bf16": plain(), "fp8": fp8}
    if peer:
        made["rows"] = plain()
        bt.to_blockwise_fp8_weights(made["rows"], bt.Recipe.deepseek())
    if peer and peers.present("torchao") and n % 128 == 0 and k % 128 == 0:
        made["torchao"] = peers.torchao_linear(plain())
    return made


def parts(x: Tensor, w: Tensor, grad: Tensor) -> dict[str, Call]:
    """The casts and GEMMs of one step, each as a call."""
    x_row, x_columns = quantize_both(x, BLOCKS_1X128, BLOCKS_128X128)
    g_row, g_columns = quantize_rowwise(grad, BLOCKS_1X128), quantize_columnwise(grad, BLOCKS_1X128)
    square = quantize_rowwise(w, BLOCKS_128X128)
    transposed = transpose(square)
    dtype = x.dtype
    return {
        "cast_x": lambda: quantize_both(x, BLOCKS_1X128, BLOCKS_128X128),
        "cast_w": lambda: quantize_rowwise(w, BLOCKS_128X128),
        "transpose_w": lambda: transpose(square),
        "cast_g": lambda: quantize_both(grad, BLOCKS_1X128),
        "fprop": lambda: gemm(x_row, square, None, dtype),
        "dgrad": lambda: gemm(g_row, transposed, None, dtype),
        "wgrad": lambda: gemm(g_columns, x_columns, None, dtype),
    }


def facts() -> dict[str, Any]:
    """Return facts to record with the rows."""
    return {"absent": {k: v for k, v in peers.absent().items() if k == "torchao"}}


def measure(shapes: tuple[Shape, ...] = LINEAR, rounds: int = 20) -> Iterator[dict[str, Any]]:
    """One row a shape: eager under sustained load, eager with L2 flushed, and in CUDA graphs."""
    for shape in shapes:
        yield measure_shape(shape, rounds)


def measure_shape(shape: Shape, rounds: int) -> dict[str, Any]:
    """Times and speed-ups of one linear, and the sum of its parts."""
    m, n, k = shape
    count = max(1, min(_MOST_SETS, _ROTATED_ELEMENTS // (m * (n + k))))
    steps: dict[str, list[Call]] = {}
    alone: dict[str, list[Call]] = {}
    for _ in range(count):  # weights rotate too: nothing of a step is in L2 when it begins
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        made = layers(n, k)
        for name, layer in made.items():
            steps.setdefault(name, []).append(step(layer, x, grad))
        for name, call in parts(x.detach(), made["bf16"].weight.detach(), grad).items():
            alone.setdefault(name, []).append(call)
    # cuBLAS warns where it is the first to use the GPU in autograd's thread
    (torch.ones((), device="cuda", requires_grad=True) * 2).backward()
    once = {name: flushed(calls[0]) for name, calls in steps.items()}
    eager = round_robin(steps, rounds)

    steps.pop("torchao", None)
    repeats = graph_repeats(6 * m * n * k * count)
    # captured last: a graph holds the memory of its gradients
    graphs = {
        name: [graphed(*calls, repeats=repeats)] for name, calls in {**steps, **alone}.items()
    }
    device = {name: ms / (count * repeats) for name, ms in round_robin(graphs, rounds, 5.0).items()}
    row: dict[str, Any] = {"m": m, "n": n, "k": k}
    for label, times in (("eager", eager), ("flushed", once), ("graph", device)):
        row |= {
            f"{label}_bf16_ms": round(times["bf16"], 4),
            f"{label}_fp8_ms": round(times["fp8"], 4),
            f"{label}_speedup": round(times["bf16"] / times["fp8"], 3),
            f"{label}_rows_ms": round(times["rows"], 4),
            f"{label}_rows_speedup": round(times["bf16"] / times["rows"], 3),
        }
    if "torchao" in eager:
        row["eager_torchao_ms"] = round(eager["torchao"], 4)
        row["eager_torchao_speedup"] = round(eager["bf16"] / eager["torchao"], 3)
    together = sum(device[name] for name in alone)
    row |= {f"{name}_us": round(device[name] * 1e3, 1) for name in alone}
    row |= {
        "parts_ms": round(together, 4),
        "over_parts": round(device["fp8"] / together, 3),
        "backends": " ".join(bt.explain([shape]).backends),
    }
    return row
