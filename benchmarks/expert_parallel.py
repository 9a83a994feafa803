"""DeepSeek-16B-shaped blocks whose experts lie on several GPUs; tokens sent in bf16 and FP8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .ranks import launched
from .results import Row

GPUS = 2
"""How many it needs."""

QUICK: dict[str, Any] = {
    "flags": ("--model", "tiny", "--tokens", "512", "--rounds", "2", "--layers", "1")
}
"""The arguments of a smoke run."""

VARIANTS = 8


def total(**_: Any) -> int:
    """How many rows there will be."""
    return VARIANTS


def measure(gpus: int | None = None, flags: Sequence[str] = ()) -> Iterator[Row]:
    """A row a variant. ``gpus``: ranks; default: all GPUs."""
    yield from launched("expert_parallel_worker", gpus, flags)
