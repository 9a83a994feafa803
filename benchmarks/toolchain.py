"""GEMMs of a few shapes over their peers: run it with two Tritons on one machine and compare.

Peers do not depend on Triton: cuBLAS's blockwise kernel for one matrix, bf16 for groups. So a ratio
of two ``over_peer``, each from a process of its own, compares the Tritons and not the card's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import gemm, grouped
from .shapes import GroupedShape, Shape

DENSE: tuple[tuple[str, Shape], ...] = (
    ("fprop", (4096, 4096, 4096)),
    ("fprop", (4096, 2048, 7168)),
    ("fprop", (4096, 7168, 2048)),
    ("fprop", (4096, 18432, 7168)),
    ("fprop", (1024, 4096, 4096)),
    ("wgrad", (8192, 8192, 8192)),
    ("wgrad", (4096, 2048, 7168)),
    ("wgrad", (4096, 10944, 2048)),
    ("wgrad", (4096, 4096, 4096)),
)
GROUPED: tuple[GroupedShape, ...] = ((64, 45952, 2816, 2048), (8, 34816, 4096, 7168))
GROUPED_KINDS = ("fprop", "wgrad")

QUICK: dict[str, Any] = {"dense": DENSE[4:5], "groups": (), "rounds": 3}


def measure(
    dense: Sequence[tuple[str, Shape]] = DENSE,
    groups: Sequence[GroupedShape] = GROUPED,
    rounds: int = 10,
) -> Iterator[dict[str, Any]]:
    """One row a product: TFLOP/s of what a user gets, and over its peer."""
    for kind, shape in dense:
        row = gemm.measure_case(gemm.Case(kind, *shape), rounds)
        over = round(row["blocktensor"] / row["cublas"], 3)
        yield {
            "kind": kind,
            "shape": list(shape),
            "blocktensor": row["blocktensor"],
            "peer": "cublas",
            "over_peer": over,
        }
    for group in groups:
        for kind in GROUPED_KINDS:
            row = grouped.measure_case(grouped.Case(kind, "ragged", *group), rounds)
            yield {
                "kind": kind,
                "shape": list(group),
                "blocktensor": row["blocktensor"],
                "peer": "bf16",
                "over_peer": row["vs_bf16"],
            }
