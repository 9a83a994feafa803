"""The speed-up of a linear layer that its matmuls and casts allow, by torchao's model.

The model is torchao's ``testing/training/roofline_utils.py`` (0598012): matmuls take 0.78 of the
peak FLOP/s, casts 0.92 of the peak bandwidth. It knows no 1x128 blocks; its MXFP8 casts are as
many. The peaks are those of NVIDIA's data sheets. torchao's bandwidth is that of another H100,
2.4 TB/s, with which the roofline would be lower.
"""

from __future__ import annotations

from typing import NamedTuple

from .shapes import Shape

MATMULS = 0.78
"""The part of the peak FLOP/s that matmuls take."""

CASTS = 0.92
"""The part of the peak bandwidth that casts take."""

FLOPS = {"bf16": 989e12, "fp8": 1979e12}
"""Dense peak FLOP/s of H100 and H200 (SXM)."""

BANDWIDTH = {"h100": 3.35e12, "h200": 4.8e12}
"""Peak bytes/s of a card."""


class Roofline(NamedTuple):
    """Speed-ups of forward and backward over bf16.

    Attributes:
        two_reads: x, w and g are each read twice in bf16, by a cast for each of their two forms, as
            in torchao's model of MXFP8.
        one_read: each is read once, by a cast that writes both forms.
    """

    two_reads: float
    one_read: float


def roofline(shape: Shape, card: str) -> Roofline:
    """Return the speed-ups that ``shape`` can reach on ``card``, "h100" or "h200"."""
    m, n, k = shape
    matmuls = {dtype: 3 * 2 * m * n * k / (peak * MATMULS) for dtype, peak in FLOPS.items()}
    elements = m * k + n * k + m * n

    def speedup(bytes_an_element: int) -> float:
        casts = elements * bytes_an_element / (BANDWIDTH[card] * CASTS)
        return matmuls["bf16"] / (matmuls["fp8"] + casts)

    return Roofline(speedup(2 * (2 + 1)), speedup(2 + 1 + 1))
