"""The linear and grouped linear of any weight: with adapters, or without (``linear.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..recipe import Recipe
from ..tensor.adapted import AdaptedWeight, LowRank
from . import linear as without_adapters
from .adapted_linear import adapted_linear
from .low_rank import plus_low_rank


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """Run :func:`blocktensor.functional.linear`.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or a 1x128 BlockwiseFP8Tensor.
        w: ``[N, K]``: BlockwiseFP8Weight, BlockwiseFP8Tensor, either with adapters, or a plain
            tensor, which is cast.
        bias: ``[N]``, added in fp32 before the one rounding of the output.
        recipe: for plain ``x`` and ``w``; default: the recipe of the operand that has one.
    """
    if type(w) is AdaptedWeight:
        return with_terms(x, w.base, w.terms, None, bias, recipe=recipe)
    return without_adapters.linear(x, w, bias, recipe=recipe)


def grouped_linear(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor:
    """Run :func:`blocktensor.functional.grouped_linear`.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, or a 1x128 BlockwiseFP8Tensor, with power-of-two scales
            if w needs a gradient.
        w: ``[E, N, K]``: BlockwiseFP8Weight, BlockwiseFP8Tensor, either with adapters, or a plain
            tensor, which is cast.
        offs: int32 ``[E]``, the cumulative ends of the groups.
        bias: ``[E, N]``, added in fp32 before the one rounding of the output.
        recipe: for plain ``x`` and ``w``; default: the recipe of the operand that has one.
    """
    if type(w) is AdaptedWeight:
        return with_terms(x, w.base, w.terms, offs, bias, recipe=recipe)
    return without_adapters.grouped_linear(x, w, offs, bias, recipe=recipe)


def with_terms(
    x: Tensor,
    w: Tensor,
    terms: Sequence[LowRank],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor:
    """Return the output of :func:`linear`, or with ``offs`` of :func:`grouped_linear`, plus terms.

    ``terms``: products of adapters, which are added in this order.
    """
    y = adapted_linear(x, w, terms[0], offs, bias, recipe) if terms else None
    others = terms if y is None else terms[1:]
    if y is None:
        if offs is None:
            y = without_adapters.linear(x, w, bias, recipe=recipe)
        else:
            y = without_adapters.grouped_linear(x, w, offs, bias, recipe=recipe)
    for term in others:
        y = plus_low_rank(y, x, term, offs)
    return y
