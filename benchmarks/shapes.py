"""The shapes that every claim is about, in one place."""

from __future__ import annotations

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

SMALL: Shape = (4096, 2048, 2048)
"""What a smoke run measures."""


def label(m: int, n: int, k: int) -> str:
    """How tables and plots name a linear: tokens x (out x in)."""
    return f"{m} x ({n} x {k})"
