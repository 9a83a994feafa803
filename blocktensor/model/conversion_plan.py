"""What a conversion is to change, and why not the rest; decided before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..ops.checks import HIGH_PRECISION
from ..ops.formats import BLOCK
from ..recipe import Recipe
from . import conversion_checks
from .conversion_report import SmallKN
from .fast_path import gpu_of, is_portable
from .holders import needs_values
from .linears import fp8_part
from .lm_head import heads_of
from .matrices import Matrix
from .module_names import with_all_above
from .product_weights import local_stack, sizes_of
from .skip_patterns import Weight

Filter = Callable[[nn.Module, str], bool]

NO_FAST_PATH = "no fast path"
"""Begins the reason of a weight that would be slower than bf16 without the fast path."""


class ConversionPlan:
    """What a conversion is to change; every check is made here.

    ``head``: whether the head is converted too.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | None,
        filter: Filter | None,
        skipped: dict[Weight, str],
        small: bool | SmallKN,
        head: bool,
    ) -> None:
        self.modules = dict(model.named_modules())
        found = heads_of(model)
        self.heads = {} if head else found
        self.named_heads = found if head else {}
        self.recipe, self.filter, self.skipped = recipe, filter, skipped
        self.small = small

    def choose(self, tied: Sequence[Matrix], why: dict[Matrix, str]) -> Matrix | None:
        """The matrix that is to be cast; None if this parameter stays as it is.

        Args:
            tied: all that hold one parameter, in the order of modules.
            why: takes the reason for each that is not returned.
        """
        linears = [matrix for matrix in tied if matrix.unconvertible is None]
        others = [matrix for matrix in tied if matrix.unconvertible is not None]
        first = (linears or others)[0]
        reasons = {matrix: self._why_left(matrix, others) for matrix in linears or others[:1]}
        left = {matrix: reason for matrix, reason in reasons.items() if reason is not None}
        if not left and (holder := self._holder_in_need(first, tied)) is not None:
            left = {first: f"frozen, and another module holds it too: {holder}"}
        is_fp8 = fp8_part(first.parameter) is not None
        if left and is_fp8:
            left = {first: "already converted"}
        if not left:
            name = f"the weight of {first.label!r}" if first.label else "the weight"
            above = [self.modules[part] for part in ("", *with_all_above(first.name))]
            conversion_checks.castable(first.parameter, name, self.recipe, above)
        for matrix in tied:
            if matrix in left:
                why[matrix] = left[matrix]
            elif not left or is_fp8:
                if matrix is not first:
                    why[matrix] = f"tied to {first.label!r}"
            elif matrix.unconvertible is None:  # a linear that could be converted by itself
                refused, reason = next(iter(left.items()))
                why[matrix] = f"tied to {refused.label!r}: {reason}"
            elif matrix.is_first:
                why[matrix] = matrix.unconvertible
            else:
                why[matrix] = f"tied to {tied[0].label!r}"
        return None if left else first

    def _why_left(self, linear: Matrix, others: Sequence[Matrix]) -> str | None:
        """Why a matrix is not to be cast; None if it is."""
        weight, module = linear.parameter, linear.module
        if linear.unconvertible is not None:
            return linear.unconvertible
        if not is_to_be_cast(weight, self.recipe):
            return "already converted"
        pattern = self.skipped.get((module, linear.key))
        if pattern is not None:
            return f"skip pattern {pattern!r}"
        is_fp8 = fp8_part(weight) is not None
        if not is_fp8:
            for other in others:
                if isinstance(other.module, (nn.Embedding, nn.EmbeddingBag)):
                    return f"tied to embedding {other.label!r}"
            if module in self.heads:
                return self.heads[module]
            if weight.dtype not in HIGH_PRECISION:
                return f"dtype {weight.dtype}"
        if self.filter is not None:
            wanted = self.filter(module, linear.label)
            if wanted is None:
                raise TypeError(
                    f"filter returned None for {linear.label!r}: expected True to convert it, "
                    f"False to skip it"
                )
            if not wanted:
                return "filter"
        if is_fp8 or is_lazy(weight) or self.small is False:
            return None
        part, is_stack = local_stack(weight), weight.ndim == 3
        sizes = sizes_of(module, linear.key, weight if part is None else part)
        if isinstance(self.small, SmallKN):
            return self._small(self.small, sizes, is_stack)
        gpu = gpu_of(weight.device)
        if gpu is None or not is_portable(gpu, is_stack):
            return self._small(SmallKN(), sizes, is_stack)
        if is_stack:
            return f"{NO_FAST_PATH}: experts are slower than bf16 (auto_filter_small_kn)"
        if any(size % BLOCK for size in sizes) and module not in self.named_heads:
            n, k = sizes
            odd = f"N={n}, K={k} are not multiples of {BLOCK}"
            return f"{NO_FAST_PATH}: {odd} (auto_filter_small_kn)"
        small = self._small(SmallKN.portable(), sizes, is_stack)
        return small and f"{NO_FAST_PATH}: {small}"

    @staticmethod
    def _small(thresholds: SmallKN, sizes: tuple[int, int], is_stack: bool) -> str | None:
        small = (thresholds.experts() if is_stack else thresholds).undercut(*sizes)
        return f"small: {' and '.join(small)} (auto_filter_small_kn)" if small else None

    def _holder_in_need(self, linear: Matrix, tied: Sequence[Matrix]) -> str | None:
        """The kind of a module that could not work with the frozen form of a linear's weight."""
        if linear.parameter.requires_grad or linear.parameter.is_meta:
            return None
        for matrix in tied:
            if matrix.unconvertible is not None:
                return type(matrix.module).__name__
        return needs_values(linear.module, len(tied), linear.key)


def is_to_be_cast(weight: Any, recipe: Recipe | None) -> bool:
    """Whether a weight is not FP8 yet, or is asked to take another recipe."""
    fp8 = fp8_part(weight)
    return fp8 is None or (recipe is not None and fp8.recipe != recipe)
