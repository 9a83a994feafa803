"""Conversion of a model's weights to FP8, linears and experts, in place, with a report."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.dtensor import local_of, with_local
from ..distributed.fsdp.fsdp_internals import owner_of
from ..distributed.fsdp.shards import FP8Shard, shard_of
from ..distributed.tensor_parallel.is_parallel import is_parallel
from ..recipe import DEFAULT_RECIPE, Recipe, is_recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from . import conversion_checks
from .conversion_plan import NO_FAST_PATH, ConversionPlan, Filter, is_to_be_cast
from .conversion_report import ConversionReport, Entry, SmallKN
from .experts import Experts, named_experts
from .fast_path import described, gpu_of, warn_if_missing
from .holders import needs_values
from .linears import fp8_part, is_conv1d, kind_of
from .matrices import Matrix, elements_of, matrices_of
from .module_names import is_module
from .pretrained_models import follow_pretrained_models
from .product_weights import (
    frozen_form,
    is_transposed,
    local_stack,
    sizes_of,
    weights_of,
    why_unconvertible,
)
from .skip_patterns import weights_to_skip
from .state_dict import register_state_hooks


def to_blockwise_fp8_weights(module: nn.Module, recipe: Recipe | None = None) -> None:
    """Convert the weights of one module in place: ``model.apply(to_blockwise_fp8_weights)``.

    Linears are nn.Linear and transformers' Conv1D; experts, the stacks ``[E, N, K]`` or
    ``[E, K, N]`` of transformers' modules that ``@use_experts_implementation`` marks and of
    torchtitan's GroupedExperts. Other modules, parametrized weights, weights of another library's
    tensor type, stacks of four dimensions, and the output projection of nn.MultiheadAttention
    (which multiplies by it without calling it) are left unchanged. The parameter keeps its
    identity: tied modules, optimizers and parameter groups hold the FP8 weight. A weight that
    requires a gradient
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
        NotImplementedError: the weight is a linear's that another tensor parallel style has cut, a
            stack that is cut inside 128x128 blocks, or a frozen DTensor of FSDP2 or of a parallel
            linear, or FSDP2 has gathered it already; under FakeTensorMode.
        TypeError: the weight is not bf16, fp16 or fp32; ``recipe`` is no Recipe.
        ValueError: the weight has no shape yet (nn.LazyLinear); it is frozen, or sharded, in FP8
            with another recipe.
        RuntimeError: the parameter is in use by an autograd graph or held by a wrapper such as DDP.
    """
    is_module(module, "to_blockwise_fp8_weights")
    is_recipe(recipe)
    keys = weights_of(module)
    if not keys:
        return
    conversion_checks.not_fake(module.parameters(recurse=False))
    keys = tuple(key for key in keys if why_unconvertible(module, key) is None)
    chosen = [key for key in keys if is_to_be_cast(module._parameters[key], recipe)]
    for key in chosen:
        what = "the weight" if key == "weight" else f"the stack {key!r}"
        weight = module._parameters[key]
        assert weight is not None
        conversion_checks.castable(weight, what, recipe, [module])
        if (gpu := gpu_of(weight.device)) is not None:
            warn_if_missing(gpu)
        del weight  # references to it are counted
    for key in chosen:
        if not _leave_to_holder(module, key):
            _cast(module, key, recipe)
    _register_hooks(module)


def _leave_to_holder(module: nn.Module, key: str) -> bool:
    """Whether another module needs the values of a weight that would be dropped; warns then."""
    weight = module._parameters[key]
    assert weight is not None
    is_dropped, shape = not (weight.requires_grad or weight.is_meta), list(weight.shape)
    del weight  # references to it are counted
    holder = needs_values(module, key=key) if is_dropped else None
    if holder is not None:
        warnings.warn(
            f"a frozen weight {shape} stays in high precision, because another module holds it "
            f"too ({holder}): give the linear a copy of its own, or let the weight require a "
            f"gradient",
            stacklevel=3,
        )
    return holder is not None


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: Filter | None = None,
    skip: Sequence[str] = (),
    auto_filter_small_kn: bool | SmallKN = True,
    *,
    experts: Experts | None = None,
    head: Literal["fp8"] | None = None,
) -> ConversionReport:
    """Convert a model's weights to FP8 in place, and report on every matrix.

    These are linears (nn.Linear and transformers' Conv1D) and stacks of experts (of transformers'
    modules that ``@use_experts_implementation`` marks, of torchtitan's GroupedExperts, and those
    that ``experts`` names). Embeddings are left alone, and so is the head (a linear that is tied to
    an embedding, or maps to as many outputs as one has entries, or has a usual name in the place of
    a head) unless ``head="fp8"``. All checks come before the first change: a call that raises
    leaves the model as it was.

    Args:
        model: any module; names in the report are relative to it.
        recipe: numeric choices for all converted layers; by default ``Recipe()``, and weights that
            are FP8 already stay as they are. A recipe that is given is also taken by trainable
            weights that are FP8 already.
        filter: ``filter(module, name) -> bool``; False skips a linear, or a stack, whose name is
            that of the parameter.
        skip: shell-style patterns of module names, e.g. ``["*.router", "vision_tower"]``. The
            modules of these names and all below them are skipped; ``"*.down_proj"`` is also the
            name of a stack.
        auto_filter_small_kn: skip weights that are too small to be faster in FP8: True for the
            measured sizes, False for none, or a :class:`SmallKN`. On a GPU where only the portable
            kernels run, True skips experts of any size, and more linears.
        experts: names of other stacks ``[E, N, K]`` or ``[E, K, N]``, by shell-style patterns of
            module names, e.g. ``{"*.moe": ["w_up", "w_down"]}``.
        head: "fp8" converts the head too, unless it is tied to an embedding.
            :func:`blocktensor.functional.linear_cross_entropy` computes its loss without the logits
            of all tokens.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError, NotImplementedError, RuntimeError: as :func:`to_blockwise_fp8_weights`; an
            argument of another type, a filter that returns None.
        ValueError: as :func:`to_blockwise_fp8_weights`; a pattern in ``skip`` that names no weight;
            ``experts`` that name no module, or no stack.

    Warns:
        UserWarning: no weight of the model is in FP8 afterwards; a Hopper GPU lacks the fast path.
    """
    is_module(model, "convert")
    is_recipe(recipe)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter={filter!r} is not callable: expected filter(module, name) -> bool")
    if not isinstance(auto_filter_small_kn, (bool, SmallKN)):
        raise TypeError(
            f"auto_filter_small_kn={auto_filter_small_kn!r}: expected True, False or a SmallKN"
        )
    if head not in (None, "fp8"):
        raise ValueError(f"head={head!r}: expected 'fp8', or None to leave the head alone")
    named = {} if experts is None else named_experts(model, experts)
    skipped = weights_to_skip(model, skip, named)
    conversion_checks.not_fake(model.parameters())
    matrices = matrices_of(model, named)
    plan = ConversionPlan(model, recipe, filter, skipped, auto_filter_small_kn, head is not None)
    tied: dict[int, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        tied[id(matrix.parameter)].append(matrix)
    why: dict[Matrix, str] = {}
    chosen = []
    for group in tied.values():
        linear = plan.choose(group, why)
        if linear is not None:
            chosen.append(linear)

    fast_path = None
    gpu = next((gpu for matrix in matrices if (gpu := gpu_of(matrix.parameter.device))), None)
    if gpu is not None:
        fast_path = described(gpu)
        warn_if_missing(gpu)
    before = [_bytes_of(matrix) for matrix in matrices]
    for linear in chosen:
        _cast(linear.module, linear.key, recipe)
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
    elements = sum(map(elements_of, model.parameters()))
    report = ConversionReport(tuple(entries), elements, fast_path)
    if not report.converted:
        _warn_of_nothing(model, report)
    return report


def _cast(module: nn.Module, key: str, recipe: Recipe | None) -> None:
    weight: Tensor = module._parameters[key]  # type: ignore[assignment]
    swap_in(weight, _converted_weight(module, key, weight, recipe or DEFAULT_RECIPE))


def _register_hooks(module: nn.Module) -> None:
    """Of a module that holds FP8 weights, its own or tied ones."""
    if any(fp8_part(weight) is not None for weight in module._parameters.values()):
        register_state_hooks(module)
        follow_pretrained_models()


def _converted_weight(module: nn.Module, key: str, weight: Tensor, recipe: Recipe) -> Tensor:
    if isinstance(weight, BlockwiseFP8Weight):
        return BlockwiseFP8Weight(weight.master, recipe)
    if (local := local_of(weight)) is not None:
        if owner_of(local) is not None:
            return with_local(weight, FP8Shard(local.detach(), recipe))
        local = local.detach().requires_grad_(weight.requires_grad)
        return with_local(weight, _converted_weight(module, key, local, recipe))
    if weight.requires_grad or weight.is_meta:
        return BlockwiseFP8Weight(weight.detach(), recipe)
    return frozen_form(module, key, weight, recipe)


def _why_converted(linear: Matrix) -> str:
    weight = linear.parameter
    fp8 = fp8_part(weight)
    if isinstance(fp8, BlockwiseFP8Tensor):
        why = "frozen: high-precision copy dropped"
    elif shard_of(weight) is not None:
        why = "trainable, gathered in FP8"
    elif is_parallel(linear.module):
        why = _why_parallel(linear.module, weight)
    else:
        why = "trainable" if weight.requires_grad else "initialised later"
    if weight.ndim == 3:
        n, k = sizes_of(linear.module, linear.key, weight)
        order = "E x K x N" if is_transposed(linear.module, linear.key) else "E x N x K"
        sizes = f"experts, {order}: E={len(weight)}, N={n}, K={k}"
        if (part := local_stack(weight)) is not None:
            sizes += f"; on this rank {' x '.join(map(str, part.shape))}"
        return f"{why} ({sizes})"
    kind = kind_of(linear.module)
    if is_conv1d(linear.module):
        return f"{why} (Conv1D)"
    return why if kind == "Linear" else f"{why} (subclass {kind})"


def _why_parallel(module: nn.Module, weight: Tensor) -> str:
    """Of a tensor parallel linear: what a rank holds, and where that is too small to be faster."""
    local = local_of(weight)
    assert local is not None
    held = " x ".join(map(str, local.shape))
    kind = "trainable" if weight.requires_grad else "frozen"
    small = SmallKN().undercut(*sizes_of(module, "weight", local))
    slow = f", small for its speed: {' and '.join(small)}" if small else ""
    return f"{kind}, tensor parallel: {held} a rank{slow}"


def _warn_of_nothing(model: nn.Module, report: ConversionReport) -> None:
    kinds = Counter(entry.reason.partition(":")[0] for entry in report.entries)
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.items()) or "none"
    if "small" in kinds or NO_FAST_PATH in kinds:
        remedy = "auto_filter_small_kn=False converts small weights too"
    elif not any(weights_of(module) for module in model.modules()):
        remedy = "it has no nn.Linear, no Conv1D and no experts that convert knows"
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
    local = local_of(weight)
    weight = weight if local is None else local
    if isinstance(weight, BlockwiseFP8Tensor):
        return weight.format.nbytes(weight.shape)
    if isinstance(weight, BlockwiseFP8Weight):
        cached = weight.format.nbytes(weight.shape) if weight.recipe.cache_weight else 0
        return weight.master.nbytes + cached
    return weight.nbytes
