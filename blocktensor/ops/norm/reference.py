"""Specify the elementwise passes of an RMS norm: torch's own ops, in the order of autograd.

The sums over rows lie between the passes and are torch's own, since the order of a sum decides its
bits. Compilers trace these ops, and fuse them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NormKind = Literal["llama", "gemma"]


def squares(x: Tensor) -> Tensor:
    """Return ``x²`` in fp32."""
    return x.float().pow(2)


def normalize(x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Return the rows of ``x[..., K]`` times ``rstd[..., 1]`` in fp32 and times ``weight[K]``.

    "llama": rounded to the dtype of x, then multiplied (transformers' Llama, Mistral, Qwen,
    DeepSeek). "gemma": multiplied by ``1 + weight`` in fp32, then rounded.
    """
    return weighted(x.float() * rstd, weight, kind, x.dtype)


def weighted(scaled: Tensor, weight: Tensor, kind: NormKind, dtype: torch.dtype) -> Tensor:
    """Return normalized fp32 rows times the weight, in ``dtype``."""
    if kind == "llama":
        return weight * scaled.to(dtype)
    return (scaled * (1.0 + weight.float())).to(dtype)


def gradient_terms(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the terms whose sums are the gradients of ``rstd`` and of the weight.

    Args:
        grad: the gradient of the norm, ``[..., K]``.
        x: ``[..., K]``.
        rstd: fp32 ``[..., 1]``.
        weight: ``[K]``.
        kind: "llama" or "gemma".
        of_weight: whether the terms of the weight's gradient are wanted.

    Returns:
        fp32 ``[..., K]``, to be summed over features; and ``[..., K]`` to be summed over rows, in
        the dtype of x ("llama") or fp32 ("gemma"), or None.
    """
    values, terms = x.float(), None
    if of_weight and kind == "llama":
        terms = grad * (values * rstd).to(x.dtype)
    elif of_weight:
        terms = grad.float() * (values * rstd)
    return _scaled(grad, weight, kind) * values, terms


def input_gradient(
    grad: Tensor, x: Tensor, rstd: Tensor, of_mean: Tensor, weight: Tensor, kind: NormKind
) -> Tensor:
    """Return the gradient of x: through ``x * rstd``, and through the mean of squares.

    Args:
        grad, x, rstd, weight, kind: as for :func:`gradient_terms`.
        of_mean: fp32 ``[..., 1]``, the gradient of each square.

    Returns:
        ``[..., K]`` in the dtype of x.
    """
    dx = _scaled(grad, weight, kind) * rstd + of_mean * (2 * x.float())
    return dx.to(x.dtype)


def _scaled(grad: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Return the gradient of ``x * rstd``, in fp32."""
    if kind == "llama":
        return (grad * weight).float()
    return grad.float() * (1.0 + weight.float())


def rstd_of(squares: Tensor, eps: float) -> Tensor:
    """Return the reciprocal RMS of rows, fp32 ``[..., 1]``, as transformers' norms compute it."""
    return torch.rsqrt(squares.mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Return an RMS norm as transformers computes it; autograd saves one copy of x in fp32."""
    values = x.float()
    return weighted(values * rstd_of(values.pow(2), eps), weight, kind, x.dtype)
