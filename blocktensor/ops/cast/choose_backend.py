"""The registry of cast backends: casts, transposes, dequantize and casts of parts.

Gluon kernels take tensors in rows of whole 32-bit words, on Hopper and later; Triton kernels take
all others on a GPU with FP8; the reference takes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..devices import HOPPER, capability, lacks_gluon, lacks_triton
from ..formats import BLOCKS_1X128, BLOCKS_128X128, CAST_FORMATS, BlockFormat
from ..registry import Backend, first_choice
from ..runtime.triton_compat.versions import tried


@dataclass(frozen=True)
class CastProblem:
    """The tensor that a cast op reads, and the format that it writes or reads.

    Attributes:
        columnwise_format: of the columnwise form, where both are written; else None.
    """

    x: Tensor
    format: BlockFormat
    columnwise_format: BlockFormat | None = None


def _gluon_unusable(device: torch.device) -> str | None:
    if reason := lacks_gluon(device):
        return reason
    if capability(device) < HOPPER:
        return "written for sm_90 and later"
    return casts_fail(device)


@tried
def casts_fail(device: torch.device) -> str | None:
    """Return how casts in Gluon differ from the reference; None if all bytes are equal."""
    from . import gluon_128x128, gluon_columnwise  # these imports need Triton

    x = torch.linspace(-3, 3, 304 * 384).view(304, 384).bfloat16()
    on_gpu = x.to(device)
    made = (
        *gluon_columnwise.casts.quantize_both(on_gpu, BLOCKS_1X128),
        *gluon_columnwise.casts.quantize_both(on_gpu, BLOCKS_1X128, BLOCKS_128X128),
        gluon_128x128.quantize_rowwise(on_gpu, BLOCKS_128X128),
        *gluon_128x128.quantize_with_transpose(on_gpu, BLOCKS_128X128),
    )
    wanted = (
        *reference.quantize_both(x, BLOCKS_1X128),
        *reference.quantize_both(x, BLOCKS_1X128, BLOCKS_128X128),
        reference.quantize_rowwise(x, BLOCKS_128X128),
        *reference.quantize_with_transpose(x, BLOCKS_128X128),
    )
    same = all(
        torch.equal(a.data.view(torch.uint8).cpu(), b.data.view(torch.uint8))
        and torch.equal(a.scale.cpu(), b.scale)
        for a, b in zip(made, wanted, strict=True)
    )
    return None if same else "casts differ from the reference"


def _triton_declines(problem: CastProblem) -> str | None:
    row, col = problem.format, problem.columnwise_format or problem.format
    for format in (row, col):
        if format not in CAST_FORMATS:
            return f"no kernels for format {format.name}"
    if row.scale_rounding != col.scale_rounding:
        return f"no kernels that round scales as both {row.name} and {col.name}"
    return None


def _gluon_declines(problem: CastProblem) -> str | None:
    if reason := _triton_declines(problem):
        return reason
    if problem.format.mxfp4_group is not None:
        return f"no kernels that round to the grid of {problem.format.name}"
    x = problem.x
    per_word = 4 // x.element_size()
    in_words = (
        x.stride(-1) == 1
        and x.shape[-1] % per_word == 0
        and x.data_ptr() % 4 == 0
        and all(stride % per_word == 0 for stride in x.stride()[:-1])
    )
    if not in_words:
        return "reads rows of whole 32-bit words"
    fits = max(x.stride(-2), *x.shape[-2:]) < 2**24
    return None if fits else "uses 32-bit offsets inside a block"


def _triton() -> tuple[Any, ...]:
    from . import triton_128x128, triton_cast, triton_columnwise, triton_transpose

    return triton_cast, triton_cast.casts, triton_transpose, triton_128x128, triton_columnwise


def _gluon() -> tuple[Any, ...]:
    from . import gluon_128x128, gluon_columnwise

    # rowwise casts of 1x128 blocks, transposes, dequantize, casts of parts: no faster in Gluon
    return gluon_128x128, gluon_columnwise.casts, *_triton()


CAST_BACKENDS: tuple[Backend[CastProblem], ...] = (
    Backend("gluon", _gluon, _gluon_unusable, _gluon_declines),
    Backend("triton", _triton, lacks_triton, _triton_declines),
    Backend("reference", lambda: (reference,), launches=False),
)
"""All backends, best first; the reference takes every problem."""


def cast_backend(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> Backend[CastProblem]:
    """Return the backend that reads ``x`` to cast it, or to transpose or dequantize a cast."""
    problem = CastProblem(x, format, columnwise_format)
    return first_choice(CAST_BACKENDS, problem, x.device).backend
