"""Stateless FP8: the same results as a converted model, without subclasses in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .autograd import grouped_linear as _grouped_linear
from .autograd import linear as _linear
from .autograd import linear_cross_entropy as _linear_cross_entropy
from .autograd.quantize import quantize
from .recipe import Recipe
from .tensor.base import FP8Base

__all__ = ["grouped_linear", "linear", "linear_cross_entropy", "quantize"]


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


@torch.compiler.disable
def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """``F.cross_entropy((x wᵀ + bias).float(), target)`` in FP8, without the logits of all tokens.

    Logits and their gradients exist for ``chunk_size`` tokens at a time. The gradients of x, w and
    bias are computed in the forward; backward scales them by the gradient of the loss, which may
    round them once more unless it is 1. The gradient of w is summed over the chunks in an fp32
    ``[N, K]`` buffer. Second derivatives raise. ``torch.compile`` breaks its graph here.

    Under FSDP2, call it where the weight is gathered: in the forward of the module that FSDP2 wraps
    the head with.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, as the head takes it.
        w: ``[N, K]``: the weight of a converted head (``convert(model, head="fp8")``), or a plain
            one, which is cast.
        target: int64 ``[...]``, the indices of classes.
        bias: ``[N]`` or None.
        weight, reduction, ignore_index, label_smoothing: as in ``F.cross_entropy``; the reductions
            "mean" and "sum".
        chunk_size: tokens of a chunk, a multiple of 128; by default as many as have 2**27 logits,
            about 1.9 GB of temporary memory.
        recipe: numeric choices where x and w are plain; default ``Recipe()``.

    Returns:
        The loss, an fp32 scalar. Of no tokens it is 0 as a sum and nan as a mean.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices, recipes or options that do not fit together.
        NotImplementedError: fake tensors, torch.func; ``weight.main_grad`` under DDP.
    """
    loss = _linear_cross_entropy.CrossEntropy(weight, reduction, ignore_index, label_smoothing)
    return _linear_cross_entropy.linear_cross_entropy(x, w, target, bias, loss, chunk_size, recipe)


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
