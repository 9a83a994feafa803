"""The checks and choices of a grouped linear, made once for all of a kind (``linear_plan.py``)."""

from __future__ import annotations

from torch import Tensor

from ..ops.runtime.specialize import Specialized, key_of
from ..recipe import Recipe
from .check_operands import check_grouped
from .linear_plan import Plan, key_of_operands, recipe_of


class GroupedPlan(Plan):
    """One kind of grouped linear.

    Attributes:
        tokens: rows of the input.
        w_is_transposed: whether the weight ``[E, N, K]`` lies in memory as ``[E, K, N]``; its
            gradient is then computed so, and needs no copy to be laid out alike.
    """

    __slots__ = ("tokens", "w_is_transposed")

    def __init__(
        self, x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, recipe: Recipe
    ) -> None:
        super().__init__(x, w, bias, recipe, check_grouped(x, w, offs, bias, recipe))
        self.tokens = x.shape[0]
        self.w_is_transposed = w.stride(1) == 1 != w.stride(2)


def plan_grouped(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, recipe: Recipe | None
) -> GroupedPlan:
    """How ``grouped_linear(x, w, offs, bias, recipe=recipe)`` runs.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
        NotImplementedError: nested tensors, ``torch.jit.trace`` and ``torch.func``.
    """
    key = key_of_operands(x, w, bias, recipe)
    if key is None:
        return GroupedPlan(x, w, offs, bias, recipe_of(x, w, recipe))
    return _PLANS.find_by((key, w.stride(), key_of((offs,))), x, w, offs, bias, recipe)


def _decide(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, recipe: Recipe | None
) -> GroupedPlan:
    return GroupedPlan(x, w, offs, bias, recipe_of(x, w, recipe))


_PLANS = Specialized(_decide)
