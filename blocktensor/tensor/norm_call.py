"""One call of an RMS norm, from which its result can be computed again."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.cast.ops import quantize_forms
from ..ops.formats import BlockFormat, Quantized
from ..ops.norm.reference import NormKind
from ..ops.producers.norm_ops import normalized
from ..ops.producers.norm_reference import normalize

AnyNormKind = NormKind | Literal["torch"]
"""``"torch"``: of :func:`torch.nn.functional.rms_norm`, one kernel, whose sums are its own."""


class NormCall(NamedTuple):
    """A call of a norm.

    Attributes:
        x: its input, ``[..., K]``.
        weight: ``[K]``, dtype of x.
        rstd: fp32 ``[..., 1]``; None if the kind is "torch".
        kind: the order of roundings, see :func:`~blocktensor.functional.rms_norm`.
        eps: of a norm of torch, whose default depends on the dtype.
    """

    x: Tensor
    weight: Tensor
    rstd: Tensor | None
    kind: AnyNormKind
    eps: float | None = None

    def values(self) -> Tensor:
        """The result ``[..., K]`` in high precision, without a gradient."""
        with torch.no_grad():
            if self.kind == "torch":
                return F.rms_norm(self.x, self.weight.shape, self.weight, self.eps)
            assert self.rstd is not None
            return normalize(self.x, self.rstd, self.weight, self.kind)

    def columnwise(self, format: BlockFormat) -> Quantized:
        """The columnwise form of the result."""
        if self.kind == "torch":
            _, form = quantize_forms(self.values(), None, format)
        else:
            assert self.rstd is not None
            rows, rstd = self.x.reshape(-1, self.x.shape[-1]), self.rstd.reshape(-1, 1)
            _, form = normalized(rows, rstd, self.weight, self.kind, None, format)
        assert form is not None
        return form
