"""The products of a gated MLP: for rows that share its weights, and for rows in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..ops.cast.producer import Forms
from ..ops.formats import BlockFormat, Quantized
from ..ops.gemm.ops import gemm, gemm_add_
from ..ops.grouped_gemm.ops import grouped_gemm
from ..recipe import Recipe
from . import grouped_linear as grouped
from . import linear as dense
from .grouped_plan import GroupedPlan, plan_grouped
from .linear_plan import LinearPlan, plan_linear
from .split_backward import in_place_of_added


class DenseProducts:
    """All rows meet the weights ``[N, K]``."""

    offs = None

    def plan(self, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None) -> LinearPlan:
        """How a linear of these operands runs."""
        return plan_linear(x, w, bias, recipe)

    def linears(
        self,
        x: Tensor,
        ws: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        recipe: Recipe | None,
    ) -> list[Tensor]:
        """Linears of one input, each by itself."""
        return [dense.linear(x, w, b, recipe=recipe) for w, b in zip(ws, biases, strict=True)]

    def input_forms(self, x: Tensor, rowwise: BlockFormat, columnwise: BlockFormat | None) -> Forms:
        """The forms of an input, cast now unless it is FP8 already."""
        return dense.forms_of(x, rowwise, columnwise)

    def forms(
        self, grad: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
    ) -> Forms:
        """The forms of a gradient."""
        return dense.forms_of(grad, rowwise, columnwise)

    def fprop(self, x: Quantized, w: Quantized, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        """``y = x wᵀ (+ bias)`` of rowwise forms."""
        return gemm(x, w, bias, plan.out_dtype)

    def dgrad(
        self, read: Any, g: Quantized, weight: Sequence[Tensor], w_col: Quantized | None
    ) -> Tensor:
        """``dx = g w``, a matrix, as :func:`linear.dgrad`."""
        return dense.dgrad(read, g, weight, w_col, read.plan.x_dtype)

    def wgrad(
        self, plan: LinearPlan, g: Quantized, x: Quantized, main_grad: Tensor | None
    ) -> Tensor | None:
        """``dw = gᵀ x`` of columnwise forms; None if it was added to ``main_grad``."""
        if main_grad is None:
            return gemm(g, x, None, plan.w_dtype)
        gemm_add_(main_grad, g, x)
        return in_place_of_added(main_grad, plan.w_dtype)

    def bias_gradient(self, grad: Tensor, plan: LinearPlan) -> Tensor:
        """Of the output's gradient."""
        return dense.sum_rows(grad, plan.bias_dtype)


class GroupedProducts:
    """Rows of group e meet the weights of expert e, ``[E, N, K]``."""

    def __init__(self, offs: Tensor) -> None:
        """``offs``: int32 ``[E]``, the ends of the groups."""
        self.offs = offs

    def plan(self, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None) -> GroupedPlan:
        """How a grouped linear of these operands runs."""
        return plan_grouped(x, w, self.offs, bias, recipe)

    def linears(
        self,
        x: Tensor,
        ws: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        recipe: Recipe | None,
    ) -> list[Tensor]:
        """Grouped linears of one input."""
        return [*grouped.grouped_linears(x, ws, self.offs, biases, recipe)]

    def input_forms(self, x: Tensor, rowwise: BlockFormat, columnwise: BlockFormat | None) -> Forms:
        """The forms of an input; rows that are FP8 already get a columnwise one of their values."""
        return grouped.input_forms(x, self.offs, rowwise, columnwise)

    def forms(
        self, grad: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
    ) -> Forms:
        """The forms of a gradient."""
        return grouped.forms_of(grad, self.offs, rowwise, columnwise)

    def fprop(self, x: Quantized, w: Quantized, bias: Tensor | None, plan: GroupedPlan) -> Tensor:
        """``y = x w[e]ᵀ (+ bias[e])`` of rowwise forms."""
        return grouped_gemm(x, w, self.offs, bias, plan.out_dtype)

    def dgrad(
        self, read: Any, g: Quantized, weight: Sequence[Tensor], w_col: Quantized | None
    ) -> Tensor:
        """``dx = g w[e]``, as :func:`grouped_linear.dgrad`."""
        return grouped.dgrad(read, g, weight, w_col, self.offs)

    def wgrad(
        self, plan: GroupedPlan, g: Quantized, x: Quantized, main_grad: Tensor | None
    ) -> Tensor | None:
        """``dw[e] = gᵀ x`` of columnwise forms; None if it was added to ``main_grad``."""
        return grouped.wgrad(plan, g, x, self.offs, main_grad)

    def bias_gradient(self, grad: Tensor, plan: GroupedPlan) -> Tensor:
        """``[E, N]``, of the output's gradient."""
        return grouped.sum_groups(grad, self.offs).to(plan.bias_dtype)


Products = DenseProducts | GroupedProducts


def products_of(offs: Tensor | None) -> Products:
    """The products for rows in groups that end at ``offs``, or for rows of no groups."""
    return DenseProducts() if offs is None else GroupedProducts(offs)
