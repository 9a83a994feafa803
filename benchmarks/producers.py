"""Ops that cast what they compute, against the copy bandwidth of the same run.

Bytes are those that must move: sources read once, data of both forms written; scales not counted.
The norm's backward includes torch's sum over rows, for the weight.
``apart``: torch's own ops in eager mode, then the cast of their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor.ops.cast import ops as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from blocktensor.ops.norm import ops as norm
from blocktensor.ops.norm.reference import rms_norm
from blocktensor.ops.producers import ops

from .timing import Call, copy_bandwidth, flushed_device

SHAPES = ((8192, 14336), (8192, 4096), (4096, 10944), (4096, 2048))

QUICK: dict[str, Any] = {"shapes": ((4096, 2048),)}
"""The arguments of a smoke run."""


class Op(NamedTuple):
    """One op on matrices of one shape, what it replaces, and the bytes an element that it moves."""

    name: str
    call: Call
    apart: Call
    bytes: int


def producers(grad: Tensor, gate: Tensor, up: Tensor, columnwise: BlockFormat) -> list[Op]:
    """SwiGLU, the RMS norm, and their backwards, with a columnwise form in this format."""
    formats = BLOCKS_1X128, columnwise
    weight = torch.randn(gate.shape[1], device=gate.device, dtype=gate.dtype)
    _, rstd = norm.normalized(gate, weight, 1e-5, "llama")
    leaf, gain = gate.detach().requires_grad_(), weight.detach().requires_grad_()
    eager = rms_norm(leaf, gain, 1e-5, "llama")

    def cast(x: Tensor) -> object:
        return casts.quantize_forms(x, *formats)

    def swiglu_backward_apart() -> None:
        h = F.silu(gate)
        cast(torch.ops.aten.silu_backward(grad * up, gate))
        cast(grad * h)

    return [
        Op(
            "SwiGLU",
            lambda: ops.gated(gate, up, "silu", *formats),
            lambda: cast(F.silu(gate) * up),
            6,
        ),
        Op(
            "SwiGLU backward",
            lambda: ops.gated_backward(grad, gate, up, "silu", *formats),
            swiglu_backward_apart,
            10,
        ),
        Op(
            "RMS norm",
            lambda: norm.normalized(gate, weight, 1e-5, "llama"),
            lambda: rms_norm(gate, weight, 1e-5, "llama"),
            4,
        ),
        Op(
            "RMS norm backward",
            lambda: norm.gradients(grad, gate, rstd, weight, "llama", True, True),
            lambda: torch.autograd.grad(eager, (leaf, gain), grad, retain_graph=True),
            6,
        ),
    ]


def measure(shapes: tuple[tuple[int, int], ...] = SHAPES) -> Iterator[dict[str, Any]]:
    """One row an op, columnwise format and shape: its share of a plain copy, separate ops' time."""
    copy = copy_bandwidth()
    for m, k in shapes:
        sources = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for columnwise in (BLOCKS_1X128, BLOCKS_128X128):
            for op in producers(sources[0], sources[1], sources[2], columnwise):
                ms, apart = flushed_device(op.call, 50), flushed_device(op.apart, 50)
                rate = m * k * op.bytes / ms * 1e-6
                yield {
                    "op": op.name,
                    "columnwise": columnwise.name,
                    "m": m,
                    "k": k,
                    "us": round(ms * 1e3, 1),
                    "gb_s": round(rate),
                    "share_of_copy": round(rate / copy, 3),
                    "apart_us": round(apart * 1e3, 1),
                    "over_apart": round(apart / ms, 3),
                    "copy_gb_s": round(copy),
                }
