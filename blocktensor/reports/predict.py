"""Predict how long a linear layer takes on an H100 or H200, forward + backward, in FP8 and in bf16.

Predictions of FP8 GEMMs are the same as for the choice of tiles (``gemm/hopper/tiles.py``). Casts
and bf16 matmuls have rates, fitted to ``benchmarks/results/linear.json`` and ``small.json``: ratios
of FP8 to bf16 are within 10% of the measurements of ``python -m benchmarks linear``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops.devices import Card
from ..recipe import Recipe

HOST_US = {"bf16": 150.0, "fp8": 170.0}
"""Host microseconds for a linear layer, forward + backward, in eager mode; hosts differ by a factor
of three (``python -m benchmarks host``, H200, 2026-11-23). In FP8: 1.07 to 1.22 of bf16, by hand,
2026-11-29."""


class Rates(NamedTuple):
    """Speeds of a card: FLOPs of bf16 matmuls and bytes of casts per microsecond."""

    flops: float
    bytes: float


RATES = {"H100": Rates(710e6, 2.75e6), "H200": Rates(690e6, 3.75e6)}
"""The rates of each card, by its name."""

CAST_US = 3.0
"""Microseconds that each cast takes beyond the bytes that it moves."""

_MATMUL_US, _LEAST_MATMUL_US = 1.0, 7.5


@dataclass(frozen=True)
class LayerTime:
    """Predicted microseconds of a layer on the GPU, forward + backward."""

    layer: str
    bf16_us: float
    fp8_us: float


def bf16_matmul_us(m: int, n: int, k: int, card: Card) -> float:
    """Return microseconds of a bf16 matmul ``[M, N]`` over K."""
    return max(_LEAST_MATMUL_US, _MATMUL_US + 2 * m * n * k / RATES[card.name].flops)


def casts_us(
    shape: tuple[int, int, int],
    kinds: Sequence[str],
    recipe: Recipe,
    dtypes: tuple[torch.dtype, torch.dtype],
    card: Card,
) -> float:
    """Return microseconds of all casts of a linear layer ``(M tokens, N out, K in)``.

    ``kinds``: the kinds of its matmuls; a layer without wgrad is frozen, so that its weight is cast
    already. ``dtypes``: the dtypes of activations and of the weight.
    """
    (m, n, k), (of_x, of_w) = shape, dtypes
    trains = "wgrad" in kinds
    wgrad = int(trains and recipe.wgrad_input_format is not None)
    moved = [m * k * (of_x.itemsize + 1 + wgrad), m * n * (of_x.itemsize + 1 + wgrad)]
    if trains:  # the cast, and the transpose that dgrad reads
        moved += [n * k * (of_w.itemsize + 1), n * k * 2]
    return sum(CAST_US + part / RATES[card.name].bytes for part in moved)


def speedups(layers: Sequence[LayerTime]) -> tuple[float, float]:
    """Return how much faster FP8 is than bf16: in CUDA graphs, and in eager mode.

    In eager mode the host runs ahead of the GPU over all layers, and the slower of both counts.
    """
    bf16, fp8 = sum(x.bf16_us for x in layers), sum(x.fp8_us for x in layers)
    count = len(layers)
    eager = max(bf16, HOST_US["bf16"] * count) / max(fp8, HOST_US["fp8"] * count)
    return bf16 / fp8, eager


def tokens_to_gain(n: int, k: int, host: Mapping[str, float], card: Card) -> int:
    """Return the number of tokens from which an ``[N, K]`` layer is faster in FP8 in eager mode.

    ``host``: host microseconds by dtype, like :data:`HOST_US`. It is the multiple of 256 at which
    the GPU time of bf16 reaches the host time of FP8.
    """
    us = max(host["fp8"], host["bf16"]) - 3 * _MATMUL_US
    tokens = us * RATES[card.name].flops / (6 * n * k)
    return max(1, math.ceil(tokens / 256)) * 256
