"""Weight gradients in high precision, for ``Recipe(wgrad_input="high_precision")``.

They are plain products of the output's gradient and the saved input, in the dtype of the gradient,
as linears that are not converted compute them.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.scale_layouts import VECTOR_BYTES
from ..tensor.fp8_tensor import BlockwiseFP8Tensor


def wgrad(grad: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``dw[N, K] = gradᵀ x`` of ``grad[..., N]`` and ``x[..., K]``, in the dtype of ``grad``.

    Sums are in fp32, and rounded once to ``out_dtype``.
    """
    grad = _plain(grad)
    g, x = grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]).to(grad.dtype)
    with _without_autocast(x):
        if out_dtype == x.dtype:
            return torch.mm(g, x)
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(g, x, out_dtype=torch.float32).to(out_dtype)
        return torch.mm(g.float(), x.float()).to(out_dtype)


def grouped_wgrad(grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``dw[E, N, K]``: :func:`wgrad` of the rows of each group of ``grad[T, N]`` and ``x[T, K]``.

    Rounded to the dtype of ``grad`` first. bf16 does not synchronise with the host.
    """
    grad = _plain(grad)
    n, k = grad.shape[1], x.shape[1]
    g, x = _in_vectors(grad), _in_vectors(x.to(grad.dtype))
    ends = offs.clamp(0, x.shape[0]).cummax(0).values  # what is beyond would be read from memory
    with _without_autocast(x):
        return F.grouped_mm(g.t(), x, offs=ends)[:, :n, :k].to(out_dtype)


def _plain(grad: Tensor) -> Tensor:
    return grad.dequantize() if isinstance(grad, BlockwiseFP8Tensor) else grad


def _in_vectors(x: Tensor) -> Tensor:
    """``x[T, C]`` in rows of whole 16-byte vectors, as grouped products read it."""
    missing = -x.shape[1] % (VECTOR_BYTES // x.itemsize)
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """The caller's autocast, under which backward may run, would round to its dtype."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
