"""The specification of normalised rows, cast: torch's own ops in eager mode, then casts.

The reciprocal of the root mean square comes from outside: the order in which torch sums a row is
its own, and part of the bits.
"""

from __future__ import annotations

from torch import Tensor

from ..cast import ops
from ..cast.producer import Forms
from ..formats import BlockFormat
from ..norm.reference import NormKind, normalize, rstd_of, weighted


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """An RMS norm as transformers write it, for autograd: one copy of x in fp32 serves all."""
    values = x.float()
    return weighted(values * rstd_of(values.pow(2), eps), weight, kind, x.dtype)


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
