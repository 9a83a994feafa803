"""Stateless FP8: the same results as a converted model, without subclasses in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .autograd import grouped_linear as _grouped_linear
from .autograd import linear as _linear
from .autograd.quantize import quantize
from .recipe import Recipe
from .tensor.base import FP8Base

__all__ = ["grouped_linear", "linear", "quantize"]


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """``x wᵀ (+ bias)`` in blockwise FP8, forward and backward, for plain tensors.

    A converted model (:func:`blocktensor.convert`) computes the same bits.

    With ``torch.compile`` and activation checkpointing together, torch 2.11 saves intermediates of
    this function within a checkpointed region, as of any ``autograd.Function`` (pytorch#177396;
    2.13 does not): convert the model there.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or ``blocktensor.quantize(x)``.
        w: ``[N, K]``, of x's dtype (any, under autocast).
        bias: ``[N]`` or None.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    if _stays_whole(w):
        return torch.nn.functional.linear(x, w, bias)
    return _linear.linear(x, w, bias, recipe=recipe)


def _stays_whole(w: Tensor) -> bool:
    """Whether a product with ``w`` has to be a torch function, whose override is called later.

    Dynamo looks into other functions, and would read the casts that a weight makes as inputs of its
    graph, made anew in every evaluation of its guards.
    """
    return is_dynamo_compiling() and isinstance(w, FP8Base)


@overload
def grouped_linear(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor: ...


@overload
def grouped_linear(
    x: Tensor,
    w: Sequence[Tensor],
    offs: Tensor,
    bias: Sequence[Tensor | None] | None = None,
    *,
    recipe: Recipe | None = None,
) -> tuple[Tensor, ...]: ...


def grouped_linear(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    offs: Tensor,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The experts of a mixture in blockwise FP8: rows of group e by ``w[e]``, both directions.

    ``y[rows of group e] = x[rows of group e] w[e]ᵀ (+ bias[e])``. The rows of ``x`` belong to
    groups, one after the other. Groups may have any sizes, which no step reads on the host: a
    training step does not synchronise, and one CUDA graph serves all sizes. Rows of no group, from
    ``offs[-1]`` on, are zeros in the output and in the gradient of ``x``, whatever they held.

    ``F.grouped_mm(x, w.transpose(-2, -1), offs=offs)`` of a converted ``w`` computes the same bits.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, sorted by expert. ``blocktensor.quantize(x)`` serves
            weights that need no gradient; a tensor that holds its rowwise form alone, as
            :func:`blocktensor.distributed.all_to_all_fp8` returns it, serves all, and is cast again
            for the gradient of the weight.
        w: ``[E, N, K]``, of x's dtype (any, under autocast); ``w.transpose(1, 2)`` of a stack
            ``[E, K, N]``, at no cost. Or several such weights (gate, up), for which x is cast once.
        offs: int32 ``[E]`` on the device of ``x``, the row after the last of each group:
            ``tokens_per_expert.cumsum(0, dtype=torch.int32)``. Nondecreasing, at most T.
        bias: ``[E, N]`` or None; one for each of several weights.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[T, N]`` in x's dtype, or autocast's; a tuple of them for several weights.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    if isinstance(w, Tensor):
        if bias is not None and not isinstance(bias, Tensor):
            raise TypeError(f"one weight has one bias [E, N], got a {type(bias).__name__}")
        if _stays_whole(w):
            made: Tensor = torch._grouped_mm(x, w.transpose(1, 2), offs, bias)
            return made
        return _grouped_linear.grouped_linear(x, w, offs, bias, recipe=recipe)
    biases = [None] * len(w) if bias is None else bias
    if isinstance(biases, Tensor) or len(biases) != len(w) or not len(w):
        raise ValueError(
            f"{len(w)} weights with "
            f"{'a single bias' if isinstance(biases, Tensor) else f'{len(biases)} biases'}: "
            f"expected one for each of at least one weight, or bias=None"
        )
    if any(map(_stays_whole, w)):  # compilers find that the casts of x are one
        pairs = zip(w, biases, strict=True)
        return tuple(grouped_linear(x, each, offs, b, recipe=recipe) for each, b in pairs)
    return _grouped_linear.grouped_linears(x, w, offs, biases, recipe)
