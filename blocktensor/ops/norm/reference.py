"""Specify an RMS norm and its gradients: torch's own ops, in the order of autograd.

Compilers trace these ops, and fuse them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NormKind = Literal["llama", "gemma"]


def normalized(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    """Return an RMS norm of rows and the reciprocal root mean square of each row.

    "llama": ``x / rms`` in fp32 is rounded to the dtype of x, then multiplied by the weight
    (transformers' Llama, Mistral, Qwen, DeepSeek). "gemma": it is multiplied by ``1 + weight`` in
    fp32, then rounded.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        weight: ``[K]``, dtype of x.
        eps: added to the mean of squares.
        kind: "llama" or "gemma".

    Returns:
        ``[..., K]`` in the dtype of x; and fp32 ``[..., 1]``.
    """
    values = x.float()
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return _weighted(values * rstd, weight, kind, x.dtype), rstd


def row_gradients(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: NormKind,
    of_input: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of x, and the terms whose sum over rows is the weight's gradient.

    Args:
        grad: the gradient of the norm, ``[..., K]``, dtype of x.
        x: ``[..., K]``.
        rstd: fp32 ``[..., 1]``, from :func:`normalized`.
        weight: ``[K]``.
        kind: "llama" or "gemma".
        of_input, of_weight: which of both are wanted; the other is None.

    Returns:
        ``[..., K]`` in the dtype of x; and ``[..., K]`` in the dtype of x ("llama") or in fp32
        ("gemma").
    """
    values = x.float()
    dx = terms = None
    if of_weight and kind == "llama":
        terms = grad * (values * rstd).to(x.dtype)
    elif of_weight:
        terms = grad.float() * (values * rstd)
    if of_input:
        scaled = _of_scaled(grad, weight, kind)
        # the backwards of rsqrt, mean and pow
        of_rstd = (scaled * values).sum_to_size(rstd.shape)
        of_mean = -0.5 * of_rstd * rstd.pow(3) / x.shape[-1]
        dx = (scaled * rstd + of_mean * (2 * values)).to(x.dtype)
    return dx, terms


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Return an RMS norm as transformers computes it; autograd saves one copy of x in fp32."""
    return normalized(x, weight, eps, kind)[0]


def _weighted(scaled: Tensor, weight: Tensor, kind: NormKind, dtype: torch.dtype) -> Tensor:
    """Return normalized fp32 rows times the weight, in ``dtype``."""
    if kind == "llama":
        return weight * scaled.to(dtype)
    return (scaled * (1.0 + weight.float())).to(dtype)


def _of_scaled(grad: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Return the gradient of ``x * rstd``, in fp32."""
    if kind == "llama":
        return (grad * weight).float()
    return grad.float() * (1.0 + weight.float())
