"""Conversion of a model's linear weights to FP8, in place, with a report."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.dtensor import local_of, with_local
from ..distributed.fsdp.trainable import FP8Shard, shard_of
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from . import conversion_checks
from .conversion_plan import ConversionPlan, Filter, is_to_be_cast
from .conversion_report import ConversionReport, Entry, SmallKN
from .holders import needs_values
from .linears import fp8_part, frozen_form, is_conv1d, is_linear, kind_of, why_unconvertible
from .matrices import Matrix, elements_of, matrices_of
from .skip_patterns import linears_to_skip
from .state_dict import register_state_hooks


def to_blockwise_fp8_weights(module: nn.Module, recipe: Recipe | None = None) -> None:
    """Convert the weight of one linear in place: ``model.apply(to_blockwise_fp8_weights)``.

    Linears are nn.Linear and transformers' Conv1D. Other modules, parametrized weights, weights of
    another library's tensor type, and the output projection of nn.MultiheadAttention (which
    multiplies by it without calling it) are left unchanged. The parameter keeps its identity: tied
    modules, optimizers and parameter groups hold the FP8 weight. A weight that requires a gradient
    becomes a :class:`BlockwiseFP8Weight`, a frozen one a :class:`BlockwiseFP8Tensor` whose
    high-precision copy is dropped (on the meta device: a BlockwiseFP8Weight, to be initialised
    later). A frozen weight that another module needs in high precision (an embedding, say) is left
    alone with a warning. A weight that FSDP2 has sharded is gathered in FP8 from then on; convert
    it before the first forward.

    Args:
        module: any module.
        recipe: how the weight is cast; by default ``Recipe()``, and weights that are FP8 already
            stay as they are. A recipe that is given is also taken by a trainable weight that is FP8
            already.

    Raises:
        NotImplementedError: the weight is a frozen or tensor parallel DTensor, or FSDP2 has
            gathered it already; under FakeTensorMode.
        TypeError: the weight is not bf16, fp16 or fp32; ``recipe`` is no Recipe.
        ValueError: the weight has no shape yet (nn.LazyLinear); it is frozen, or sharded, in FP8
            with another recipe.
        RuntimeError: the parameter is in use by an autograd graph or held by a wrapper such as DDP.
    """
    conversion_checks.is_recipe(recipe)
    if not is_linear(module):
        return
    conversion_checks.not_fake(module.parameters(recurse=False))
    if why_unconvertible(module) is not None:
        return
    if is_to_be_cast(module, recipe):
        weight = module._parameters["weight"]
        assert weight is not None
        conversion_checks.castable(weight, "the weight", recipe, [module])
        is_dropped, shape = not (weight.requires_grad or weight.is_meta), list(weight.shape)
        del weight  # references to it are counted
        holder = needs_values(module) if is_dropped else None
        if holder is not None:
            warnings.warn(
                f"a frozen weight {shape} stays in high precision, because another module holds it "
                f"too ({holder}): give the linear a copy of its own, or let the weight require a "
                f"gradient",
                stacklevel=2,
            )
            return
        _cast(module, recipe)
    _register_hooks(module)


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: Filter | None = None,
    skip: Sequence[str] = (),
    auto_filter_small_kn: bool | SmallKN = True,
) -> ConversionReport:
    """Convert a model's linear weights to FP8 in place, and report on every matrix.

    Linears are nn.Linear and transformers' Conv1D. Embeddings and the head (a linear that is tied
    to an embedding, or maps to as many outputs as one has entries, or has a usual name in the
    place of a head) are left alone. All checks come before the first change: a call that raises
    leaves the model as it was.

    Args:
        model: any module; names in the report are relative to it.
        recipe: numeric choices for all converted layers; by default ``Recipe()``, and weights that
            are FP8 already stay as they are. A recipe that is given is also taken by trainable
            weights that are FP8 already.
        filter: ``filter(module, name) -> bool``; False skips a linear.
        skip: shell-style patterns of module names, e.g. ``["*.router", "vision_tower"]``. The
            modules of these names and all below them are skipped.
        auto_filter_small_kn: skip weights that are too small to be faster in FP8: True for the
            measured sizes, False for none, or a :class:`SmallKN`.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError, NotImplementedError, RuntimeError: as :func:`to_blockwise_fp8_weights`; an
            argument of another type, a filter that returns None.
        ValueError: as :func:`to_blockwise_fp8_weights`; a pattern in ``skip`` that names no linear.

    Warns:
        UserWarning: no weight of the model is in FP8 afterwards.
    """
    conversion_checks.is_recipe(recipe)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter={filter!r} is not callable: expected filter(module, name) -> bool")
    if not isinstance(auto_filter_small_kn, (bool, SmallKN)):
        raise TypeError(
            f"auto_filter_small_kn={auto_filter_small_kn!r}: expected True, False or a SmallKN"
        )
    skipped = linears_to_skip(model, skip)
    conversion_checks.not_fake(model.parameters())
    matrices = matrices_of(model)
    plan = ConversionPlan(model, recipe, filter, skipped, auto_filter_small_kn)
    tied: dict[int, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        tied[id(matrix.parameter)].append(matrix)
    why: dict[Matrix, str] = {}
    chosen = []
    for group in tied.values():
        linear = plan.choose(group, why)
        if linear is not None:
            chosen.append(linear)

    before = [_bytes_of(matrix) for matrix in matrices]
    for linear in chosen:
        _cast(linear.module, recipe)
    entries = []
    for matrix, bytes_before in zip(matrices, before, strict=True):
        weight = matrix.parameter
        _register_hooks(matrix.module)
        entries.append(
            Entry(
                name=matrix.label,
                shape=matrix.shape,
                dtype=weight.dtype,
                converted=fp8_part(weight) is not None,
                reason=why.get(matrix) or _why_converted(matrix),
                bytes_before=bytes_before,
                bytes_after=_bytes_of(matrix),
                elements=matrix.elements,
            )
        )
    report = ConversionReport(tuple(entries), sum(map(elements_of, model.parameters())))
    if not report.converted:
        _warn_of_nothing(model, report)
    return report


def _cast(linear: nn.Module, recipe: Recipe | None) -> None:
    weight: Tensor = linear._parameters["weight"]  # type: ignore[assignment]
    swap_in(weight, _converted_weight(linear, weight, recipe or DEFAULT_RECIPE))


def _register_hooks(module: nn.Module) -> None:
    """Of a linear, or of another module that holds its weight."""
    if any(fp8_part(weight) is not None for weight in module._parameters.values()):
        register_state_hooks(module)


def _converted_weight(linear: nn.Module, weight: Tensor, recipe: Recipe) -> Tensor:
    if isinstance(weight, BlockwiseFP8Weight):
        return BlockwiseFP8Weight(weight.master, recipe)
    if (local := local_of(weight)) is not None:
        return with_local(weight, FP8Shard(local.detach(), recipe))
    if weight.requires_grad or weight.is_meta:
        return BlockwiseFP8Weight(weight.detach(), recipe)
    return frozen_form(linear, weight, recipe)


def _why_converted(linear: Matrix) -> str:
    weight = linear.parameter
    if isinstance(weight, BlockwiseFP8Tensor):
        why = "frozen: high-precision copy dropped"
    elif shard_of(weight) is not None:
        why = "trainable, gathered in FP8"
    else:
        why = "trainable" if weight.requires_grad else "initialised later"
    kind = kind_of(linear.module)
    if is_conv1d(linear.module):
        return f"{why} (Conv1D)"
    return why if kind == "Linear" else f"{why} (subclass {kind})"


def _warn_of_nothing(model: nn.Module, report: ConversionReport) -> None:
    kinds = Counter(entry.reason.partition(":")[0] for entry in report.entries)
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.items()) or "none"
    if not any(is_linear(module) for module in model.modules()):
        remedy = "it has no nn.Linear and no Conv1D, which are all that convert changes"
    elif "small" in kinds:
        remedy = "auto_filter_small_kn=False converts small weights too"
    else:
        remedy = "print the report for the reasons"
    warnings.warn(
        f"no weight of this {type(model).__name__} is in FP8: {remedy}. Matrices left alone: "
        f"{counts}",
        stacklevel=3,
    )


def _bytes_of(matrix: Matrix) -> int:
    weight = matrix.parameter
    if not matrix.is_first or is_lazy(weight):
        return 0
    if (shard := shard_of(weight)) is not None:
        return shard.master.nbytes
    if isinstance(weight, BlockwiseFP8Tensor):
        return weight.format.nbytes(weight.shape)
    if isinstance(weight, BlockwiseFP8Weight):
        cached = weight.format.nbytes(weight.shape) if weight.recipe.cache_weight else 0
        return weight.master.nbytes + cached
    return weight.nbytes
