"""Say why ``convert`` leaves a parameter in high precision, and what would convert it."""

from __future__ import annotations

from torch import nn

from ..conversion.fast_path import fast_paths
from ..conversion.plan import Choices, decide, heads_of, why_small
from ..conversion.report import BY_SIZE, HEAD, NO_FAST_PATH, SMALL
from ..model.matrix import OF_NO_LINEAR, Matrix, matrices_of
from ..model.names import stacks_like
from ..model.running_module import without_wrappers
from ..ops.formats import BLOCK
from .audit_report import LEAVE_IT

_LEAST_WIDTH = 2 * BLOCK
"""The least long side of a matrix, thinner than a block, that is taken for an adapter's."""


def remedies(model: nn.Module) -> dict[str, str]:
    """Return reasons and remedies by the names of parameters that are not in FP8.

    A parameter that several modules hold gets the first reason, preferably of a linear layer.
    """
    matrices = matrices_of(model, {})
    paths = fast_paths(matrix.parameter.device for matrix in matrices)
    choices = Choices(None, None, {}, True, heads_of(model), False, paths)
    decide(matrices, choices)
    # convert has then not left others for their size alone
    has_small = any(x.fp8 is not None and why_small(x, choices) is not None for x in matrices)
    reasons: dict[int, str] = {}
    for matrix in sorted(matrices, key=lambda matrix: matrix.unconvertible is not None):
        if not matrix.in_fp8 or matrix.is_chosen:
            reasons.setdefault(id(matrix.parameter), _remedy(matrix, matrices, model, has_small))
    named = model.named_parameters(remove_duplicate=False)
    return {without_wrappers(name): reasons[id(x)] for name, x in named if id(x) in reasons}


def _remedy(matrix: Matrix, matrices: list[Matrix], model: nn.Module, has_small: bool) -> str:
    """Return the reason and the remedy; ``has_small``: some FP8 weights are small."""
    if matrix.why is None:
        return "convert(model) would convert it"
    if matrix.is_adapter:
        return f"adapter of peft{LEAVE_IT}"
    if matrix.is_unknown_stack:
        return (
            f"a stack of matrices that convert does not know: "
            f"convert(model, stacks={stacks_like(matrix, matrices, model)})"
        )
    why = without_wrappers(matrix.why)
    kind = why.partition(":")[0]
    if kind in (SMALL, NO_FAST_PATH):
        why = why.removesuffix(BY_SIZE)
        thin, wide = sorted(matrix.sizes[-2:])
        if thin < BLOCK and wide >= _LEAST_WIDTH:
            return f"{why}, as thin as an adapter{LEAVE_IT}"
        if has_small:
            return "not converted: convert(model, skip_small=False) would convert it"
        return f"{why}: convert(model, skip_small=False)"
    if kind == HEAD:
        return f"{why}: convert(model, convert_head=True)"
    return f"{why}: hold it in an nn.Linear" if kind == OF_NO_LINEAR else why
