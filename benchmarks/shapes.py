"""The shapes that every claim is about, in one place."""

from __future__ import annotations

import random
from itertools import pairwise

Shape = tuple[int, int, int]
"""A linear: M tokens, N out, K in."""

SET_S: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (4096, 18432, 7168),
    (4096, 7168, 18432),
    (4096, 2048, 7168),
    (4096, 7168, 2048),
    (4096, 2048, 2048),
    (4096, 10944, 2048),
    (4096, 2048, 10944),
    (16384, 18432, 7168),
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (4096, 6144, 4096),
    (8192, 28672, 8192),
)
"""GEMMs: linears of DeepSeek-V3 (671B and 16B) and of Llama 8B, and three round ones."""

LINEAR: tuple[Shape, ...] = (
    (4096, 18432, 7168),
    (16384, 18432, 7168),
    (8192, 28672, 8192),
    (4096, 4096, 4096),
    (4096, 10944, 2048),
    (4096, 2048, 7168),
    (4096, 7168, 2048),
    (4096, 2048, 2048),
    (4096, 7168, 18432),
    (4096, 2048, 10944),
)
"""Whole layers, forward and backward."""

SMALL_LINEAR: tuple[Shape, ...] = tuple(
    (m, n, k)
    for m in (4096, 16384)
    for n, k in (
        (512, 512),
        (512, 2048),
        (512, 8192),
        (1024, 1024),
        (1024, 2048),
        (2048, 1024),
        (1024, 4096),
        (4096, 1024),
        (1024, 8192),
        (1536, 1536),
        (1536, 3072),
        (2048, 2048),
        (2048, 4096),
        (3072, 3072),
    )
)
"""Layers around the size from which FP8 pays."""

CASTS: tuple[tuple[int, int], ...] = (
    (16384, 18432),
    (4096, 18432),
    (4096, 7168),
    (4096, 2048),
    (4096, 10944),
)
"""Matrices to cast."""

GroupedShape = tuple[int, int, int, int]
"""Experts: E of them, T tokens in all, N out, K in."""

GROUPED: tuple[GroupedShape, ...] = (
    (4, 35968, 4096, 7168),
    (4, 32640, 7168, 2048),
    (8, 34816, 4096, 7168),
    (8, 45440, 7168, 2048),
    (16, 35712, 4096, 7168),
    (32, 32640, 4096, 7168),
    (32, 39808, 7168, 2048),
    (64, 45952, 2816, 2048),
    (64, 48512, 2048, 1408),
    (16, 64768, 1536, 2048),
    (128, 63360, 1536, 2048),
    (128, 68352, 2048, 768),
)
"""Experts of DeepSeek-V3, of its 16B model and of Qwen3-30B, on 1 to 64 GPUs."""

SMALL_GROUPED: GroupedShape = (4, 4096, 1536, 2048)
"""The shape that a smoke run of grouped linears measures."""

SMALL: Shape = (4096, 2048, 2048)
"""The shape that a smoke run measures."""


def label(m: int, n: int, k: int) -> str:
    """Return the name of a linear layer in tables and plots: tokens x (out x in)."""
    return f"{m} x ({n} x {k})"


def label_of_experts(experts: int, tokens: int, n: int, k: int) -> str:
    """Return the name of experts in tables and plots."""
    return f"{experts}: {label(tokens, n, k)}"


def group_sizes(experts: int, tokens: int, multiple: int = 1, seed: int = 0) -> list[int]:
    """Uneven sizes of ``experts`` groups, ``tokens`` in all: 0.3 to 1.7 of the mean, about.

    Raises:
        ValueError: ``tokens`` is no multiple of ``multiple``, which all sizes are.
    """
    if tokens % multiple:
        raise ValueError(f"{tokens} tokens do not make groups that are multiples of {multiple}")
    random_of = random.Random(seed)
    weights = [random_of.uniform(0.3, 1.7) for _ in range(experts)]
    units, done, ends = tokens // multiple, 0.0, [0]
    for weight in weights:
        done += weight
        ends.append(round(units * done / sum(weights)))
    return [(end - begin) * multiple for begin, end in pairwise(ends)]
