"""The specification of normalised rows, cast: torch's own ops in eager mode, then casts.

The reciprocal of the root mean square comes from outside: the order in which torch sums a row is
its own, and part of the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cast import ops
from ..cast.producer import Forms
from ..formats import BlockFormat
from ..norm.reference import NormKind, rstd_of


def normalize(x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """The rows of ``x[..., K]`` times ``rstd[..., 1]`` in fp32 and by ``weight[K]``.

    "llama": rounded to the dtype of x, then multiplied (transformers' Llama, Mistral, Qwen,
    DeepSeek). "gemma": multiplied by ``1 + weight`` in fp32, then rounded.
    """
    return _weighted(x.float() * rstd, weight, kind, x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """An RMS norm as transformers write it, for autograd: one copy of x in fp32 serves all."""
    values = x.float()
    return _weighted(values * rstd_of(values.pow(2), eps), weight, kind, x.dtype)


def _weighted(scaled: Tensor, weight: Tensor, kind: NormKind, dtype: torch.dtype) -> Tensor:
    if kind == "llama":
        return weight * scaled.to(dtype)
    return (scaled * (1.0 + weight.float())).to(dtype)


def normalized(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: NormKind,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    """The forms of :func:`normalize`; None for a form without a format."""
    return ops.quantize_forms(normalize(x, rstd, weight, kind), rowwise, columnwise)
