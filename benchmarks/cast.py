"""Casts against the copy bandwidth of the same run, counting the bytes that must move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blocktensor.ops.cast import ops as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, GRID_FORMATS, BlockFormat

from . import peers
from .shapes import CASTS
from .timing import Call, copy_bandwidth, flushed_device

DTYPES = (torch.bfloat16, torch.float32)

QUICK: dict[str, Any] = {"shapes": ((4096, 2048),)}
"""The arguments of a smoke run."""


class Op(NamedTuple):
    """One op on one matrix, and the bytes an element that it reads and writes; scales not counted.

    ``dtype`` is that of the high-precision side; a transpose has none.
    """

    name: str
    dtype: str
    call: Call
    bytes: int


def ops(x: Tensor) -> list[Op]:
    """Every op of ``blocktensor.ops.cast.ops``, to or from ``x``'s dtype."""
    square, row = casts.quantize_rowwise(x, BLOCKS_128X128), casts.quantize_rowwise(x, BLOCKS_1X128)
    dtype, size = x.dtype, x.element_size()
    name = str(dtype).removeprefix("torch.")
    cases = [
        Op("rowwise", name, lambda: casts.quantize_rowwise(x, BLOCKS_1X128), size + 1),
        Op("columnwise", name, lambda: casts.quantize_columnwise(x, BLOCKS_1X128), size + 1),
        Op("rowwise+columnwise", name, lambda: casts.quantize_both(x, BLOCKS_1X128), size + 2),
        Op(
            "rowwise+columnwise 128x128",
            name,
            lambda: casts.quantize_both(x, BLOCKS_1X128, BLOCKS_128X128),
            size + 2,
        ),
        *weight_casts(x, "128x128", BLOCKS_128X128),
        *weight_casts(x, "128x128 on the grid of MXFP4", GRID_FORMATS["mxfp4"]),
        Op("dequantize 1x128", name, lambda: casts.dequantize(row, dtype), size + 1),
        Op("dequantize 128x128", name, lambda: casts.dequantize(square, dtype), size + 1),
    ]
    if dtype == torch.bfloat16:
        cases.append(Op("transpose", "float8_e4m3fn", lambda: casts.transpose(square), 2))
    return cases


def weight_casts(x: Tensor, what: str, format: BlockFormat) -> list[Op]:
    """Return the casts of ``x`` in square blocks: rowwise, and with the transpose."""
    name, size = str(x.dtype).removeprefix("torch."), x.element_size()
    return [
        Op(what, name, lambda: casts.quantize_rowwise(x, format), size + 1),
        Op(f"{what}, both forms", name, lambda: casts.quantize_with_transpose(x, format), size + 2),
    ]


def facts() -> dict[str, Any]:
    """Return facts to record with the rows."""
    return {"absent": {k: v for k, v in peers.absent().items() if k == "torchao"}}


def measure(shapes: tuple[tuple[int, int], ...] = CASTS) -> Iterator[dict[str, Any]]:
    """One row an op, dtype and shape: GB/s and the share of a plain copy."""
    copy = copy_bandwidth()
    for m, k in shapes:
        for dtype in DTYPES:
            x = torch.randn(m, k, device="cuda", dtype=dtype)
            for op in ops(x):
                ms = flushed_device(op.call)
                rate = m * k * op.bytes / ms * 1e-6
                row = {
                    "op": op.name,
                    "dtype": op.dtype,
                    "m": m,
                    "k": k,
                    "us": round(ms * 1e3, 1),
                    "gb_s": round(rate),
                    "share_of_copy": round(rate / copy, 3),
                    "copy_gb_s": round(copy),
                }
                yield row | _torchao(op, x, m * k * op.bytes * 1e-6 / copy)


def _torchao(op: Op, x: Tensor, floor_ms: float) -> dict[str, Any]:
    """The share of a copy that torchao's cast reaches, where it has one and takes the shape."""
    if op.name not in peers.CASTS or not peers.present("torchao"):
        return {}
    try:
        ms = flushed_device(peers.torchao_cast(op.name, x))
        return {"torchao_share": round(floor_ms / ms, 3)}
    except Exception:  # whatever a peer raises, it declines this shape
        return {"torchao_share": None}
