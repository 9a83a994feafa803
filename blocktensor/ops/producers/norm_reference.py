"""The specification of normalised rows, cast: torch's own ops in eager mode, then casts.

The reciprocal of the root mean square comes from outside: the order in which torch sums a row is
its own, and part of the bits.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..cast import ops
from ..cast.producer import Forms
from ..formats import BlockFormat

NormKind = Literal["llama", "gemma"]


def normalize(x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """The rows of ``x[..., K]`` times ``rstd[..., 1]`` in fp32 and by ``weight[K]``.

    "llama": rounded to the dtype of x, then multiplied (transformers' Llama, Mistral, Qwen,
    DeepSeek). "gemma": multiplied by ``1 + weight`` in fp32, then rounded.
    """
    scaled = x.float() * rstd
    if kind == "llama":
        return weight * scaled.to(x.dtype)
    return (scaled * (1.0 + weight.float())).type_as(x)


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
