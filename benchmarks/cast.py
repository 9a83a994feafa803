"""Casts against the copy bandwidth of the same run, counting the bytes that must move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from blocktensor.ops import library

from .timing import copy_bandwidth, flushed, graphed

SHAPES = ((16384, 18432), (4096, 18432), (4096, 7168), (4096, 2048))


def measure(shapes: tuple[tuple[int, int], ...] = SHAPES) -> Iterator[dict[str, Any]]:
    """One row an op, dtype and shape: GB/s and the share of a plain copy."""
    copy = copy_bandwidth()
    for m, k in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(m, k, device="cuda", dtype=dtype)
            square = library.quantize_square(x, False)
            read = x.element_size()
            # op, call, bytes an element read and written
            cases = [
                ("rowwise", lambda x=x: library.quantize_rowwise(x, False), read + 1),
                ("columnwise", lambda x=x: library.quantize_columnwise(x, False), read + 1),
                ("rowwise+columnwise", lambda x=x: library.quantize_both(x, False), read + 2),
                ("128x128", lambda x=x: library.quantize_square(x, False), read + 1),
            ]
            if dtype == torch.bfloat16:
                cases.append(("transpose", lambda s=square: library.transpose_square(*s), 2))
            for op, call, per_element in cases:
                ms = flushed(graphed(call))
                rate = m * k * per_element / ms * 1e-6
                yield {
                    "op": op,
                    "dtype": str(dtype).removeprefix("torch."),
                    "m": m,
                    "k": k,
                    "us": round(ms * 1e3, 1),
                    "gb_s": round(rate),
                    "share_of_copy": round(rate / copy, 3),
                }
