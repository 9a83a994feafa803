"""Warn of calls that convert nothing, and of large stacks that ``stacks`` does not name.

The warnings point to the code that called the public function.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

from torch import nn

from ..model.matrix import Matrix
from ..model.names import Weight, stacks_like
from ..model.weights import kind_of, weights_of, why_unconvertible
from ..sharding.dtensor import fp8_part
from ..text_table import pattern
from .report import (
    BY_FILTER,
    BY_PATTERN,
    HEAD,
    NO_FAST_PATH,
    SMALL,
    ConversionReport,
    MinSizes,
)


def warn_of_container(module: nn.Module) -> None:
    """Warn if a module has no weights itself, but modules below it have.

    ``apply`` converts the modules below a module first, so that some of them are in FP8.
    """
    below = [(x, key) for x in module.modules() for key in weights_of(x)]
    if any(fp8_part(x._parameters.get(key)) is not None for x, key in below):
        return
    count = sum(why_unconvertible(x, key) is None for x, key in below)
    if count:
        warnings.warn(
            f"to_blockwise_fp8_weights converts one module, and this {kind_of(module)} has no "
            f"weight of its own: the {count} of modules below it stay as they are. Call "
            f"model.apply(blocktensor.to_blockwise_fp8_weights), or blocktensor.convert(model)",
            stacklevel=3,
        )


def warn_of_nothing(model: nn.Module, matrices: list[Matrix], report: ConversionReport) -> None:
    """Warn that no weight is in FP8, and say how to convert some."""
    kinds = Counter(entry.reason.partition(":")[0] for entry in report.entries)
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.items()) or "none"
    remedies = []
    if SMALL in kinds or NO_FAST_PATH in kinds:
        remedies.append("skip_small=False converts small weights too")
    if unknown := [matrix for matrix in matrices if matrix.is_unknown_stack]:
        named = stacks_like(unknown[0], matrices, model)
        remedies.append(f"stacks={named} names experts that convert does not know")
    if any(kind.startswith((BY_FILTER, BY_PATTERN)) for kind in kinds):
        remedies.append("filter and skip leave weights alone")
    elif HEAD in kinds and not remedies:
        remedies.append("convert_head=True converts the head")
    if not (remedies or any(weights_of(module) for module in model.modules())):
        remedies.append("it has no nn.Linear, no Conv1D and no experts that convert knows")
    remedy = "; ".join(remedies) or "print the report for the reasons"
    warnings.warn(
        f"no weight of this {type(model).__name__} is in FP8: {remedy}. Matrices left alone: "
        f"{counts}",
        stacklevel=3,
    )


def warn_of_stacks(model: nn.Module, matrices: list[Matrix], skipped: Mapping[Weight, str]) -> None:
    """Warn of parameters as large as experts that neither ``stacks`` nor ``skip`` names."""
    large = [
        matrix
        for matrix in matrices
        if matrix.is_unknown_stack
        and (matrix.module, matrix.key) not in skipped
        and not MinSizes().experts().undercut(*matrix.parameter.shape[1:])
    ]
    if large:
        first, elements = large[0], sum(matrix.parameter.numel() for matrix in large)
        warnings.warn(
            f"{len(large)} stacks of matrices ({elements:,} values) stay in high precision, such "
            f"as {first.label!r}: if these are experts, pass "
            f"stacks={stacks_like(first, matrices, model)}; if not, "
            f"skip=[{pattern(first.label)!r}]",
            stacklevel=3,
        )
