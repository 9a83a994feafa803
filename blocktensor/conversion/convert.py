"""Convert a model's weights to FP8 in place: find, decide, check, swap, report.

1. ``model/matrix.py`` finds a model's matrices, each a ``Matrix`` that passes through all steps.
2. ``plan.py`` decides which are to be cast, and why the others are left alone. 3. ``checks.py``
raises if one of these cannot be cast: nothing has changed so far. 4. Here, the parameters take
their FP8 content, and modules the hooks that keep it. 5. ``report.py`` prints what happens to each
matrix, with the reasons that this file writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..model.matrix import Matrix, matrices_of
from ..model.names import (
    Experts,
    check_module,
    named_experts,
    weights_to_skip,
    with_all_above,
)
from ..model.progress import check_progress, progress_bar
from ..model.weights import is_conv1d, kind_of, weights_of, why_unconvertible
from ..ops import checks
from ..patches import apply_for_fp8
from ..recipe import DEFAULT_RECIPE, Recipe, check_recipe
from ..sharding.dtensor import fp8_part
from ..tensor.compat.swap_in import swap_in
from .checks import check_castable, check_not_fake, refuse_others
from .fast_path import fast_paths
from .plan import Choices, Filter, decide, heads_of, is_to_be_cast
from .report import ConversionReport, Entry, MinSizes
from .state_dict import register_state_hooks
from .warn import warn_of_container, warn_of_nothing, warn_of_stacks


def to_blockwise_fp8_weights(module: nn.Module, recipe: Recipe | None = None) -> None:
    """Convert the weights of one module in place: ``model.apply(to_blockwise_fp8_weights)``.

    Linear layers are nn.Linear and transformers' Conv1D; experts, the stacks ``[E, N, K]`` or ``[E,
    K, N]`` of transformers' modules that ``@use_experts_implementation`` marks and of torchtitan's
    GroupedExperts. Other modules, parametrized weights, weights of another library's tensor type,
    stacks of four dimensions, and the output projection of nn.MultiheadAttention (which multiplies
    by it without calling it) are left unchanged. The parameter keeps its identity: tied modules,
    optimizers and parameter groups hold the FP8 weight. A weight that requires a gradient becomes a
    :class:`BlockwiseFP8Weight`. A frozen one becomes a :class:`BlockwiseFP8Tensor`, and its
    high-precision copy is dropped; on the meta device it becomes a BlockwiseFP8Weight, to be
    initialised later. If another module such as an embedding also holds a frozen weight, its
    forward then raises; :func:`convert`, which sees all modules, leaves such a weight alone. A
    weight that FSDP2 has sharded is gathered in FP8 from then on; convert it before the first
    forward.

    Args:
        module: any module.
        recipe: how the weight is cast; by default ``Recipe()``, and weights that are FP8 already
            stay as they are. A recipe that is given is also taken by a trainable weight that is FP8
            already.

    Warns:
        UserWarning: the module has no such weight, but modules below it have, none in FP8.

    Raises:
        NotImplementedError: another tensor parallel style has cut the weight of a linear layer; a
            stack is cut inside 128x128 blocks; the weight is a frozen DTensor of FSDP2 or of a
            parallel linear layer, or FSDP2 has gathered it already; under FakeTensorMode.
        TypeError: the weight is not bf16, fp16 or fp32; ``recipe`` is no Recipe.
        ValueError: the weight has no shape yet (nn.LazyLinear); it is frozen, or sharded, in FP8
            with another recipe.
        RuntimeError: the parameter is in use by an autograd graph or held by a wrapper such as DDP.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU()).bfloat16()
        >>> _ = model.apply(blocktensor.to_blockwise_fp8_weights)
        >>> type(model[0].weight).__name__
        'BlockwiseFP8Weight'
    """
    check_module(module, "to_blockwise_fp8_weights")
    check_recipe(recipe)
    keys = weights_of(module)
    if not keys:
        warn_of_container(module)
        return
    check_not_fake(module.parameters(recurse=False))
    known = [Matrix("", key, module) for key in keys if why_unconvertible(module, key) is None]
    chosen = [matrix for matrix in known if is_to_be_cast(matrix, recipe)]
    for matrix in chosen:
        what = "the weight" if matrix.key == "weight" else f"the stack {matrix.key!r}"
        check_castable(matrix, what, recipe, [module])
    for path in fast_paths(matrix.parameter.device for matrix in chosen).values():
        path.warn_if_missing()
    for matrix in chosen:
        _swap(matrix, recipe)
    _register_hooks(module)


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    filter: Filter | None = None,
    skip: Sequence[str] = (),
    skip_small: bool | MinSizes = True,
    stacks: Experts | None = None,
    convert_head: bool = False,
    dry_run: bool = False,
    progress: bool | None = None,
    **others: NoReturn,
) -> ConversionReport:
    """Convert a model's weights to FP8 in place, and report on every matrix.

    These are linear layers (nn.Linear and transformers' Conv1D) and stacks of experts (of
    transformers' modules that ``@use_experts_implementation`` marks, of torchtitan's
    GroupedExperts, and those that ``stacks`` names). Embeddings are left alone, and so is the head
    (a linear layer that is tied to an embedding, or maps to as many outputs as one has entries, or
    has a usual name in the place of a head) unless ``convert_head=True``. All checks come before
    the first change: a call that raises leaves the model as it was.

    Args:
        model: any module; names in the report are relative to it.
        recipe: numeric choices for all converted layers; by default ``Recipe()``, and weights that
            are FP8 already stay as they are. A recipe that is given is also taken by trainable
            weights that are FP8 already.
        filter: ``filter(module, name) -> bool``; False skips a linear layer or a stack. For a
            stack, ``name`` is the name of the parameter.
        skip: shell-style patterns of module names, e.g. ``["*.router", "*.vision_tower"]``. The
            modules of these names and all below them are skipped; ``"*.down_proj"`` is also the
            name of a stack.
        skip_small: skip weights that are too small to be faster in FP8: True for the measured
            sizes, False for none, or a :class:`MinSizes`. On a GPU where only the portable kernels
            run, True skips experts of any size, and more linear layers.
        stacks: names of other stacks ``[E, N, K]`` or ``[E, K, N]``, by shell-style patterns of
            module names, e.g. ``{"*.moe": ["w_up", "w_down"]}``.
        convert_head: convert the head too, unless it is tied to an embedding.
            :func:`blocktensor.functional.linear_cross_entropy` computes its loss without the logits
            of all tokens.
        dry_run: return the same report, and leave the model unchanged. The call makes all checks:
            it raises and warns as the conversion would.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.
        others: refused; for arguments of torchao's functions the message names ours.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError, NotImplementedError, RuntimeError: as :func:`to_blockwise_fp8_weights`; an
            argument of another type, a filter that returns None.
        ValueError: as :func:`to_blockwise_fp8_weights`; a pattern in ``skip`` that names no weight;
            ``stacks`` that name no module, or no stack.

    Warns:
        UserWarning: no weight of the model is in FP8 afterwards; without a ``filter``, a parameter
            is as large as stacks of experts are, and neither ``stacks`` nor ``skip`` names it; a
            Hopper GPU lacks the fast path.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> report = blocktensor.convert(model, skip_small=False)  # False: it is small
        >>> round(report.fp8_share, 3)
        0.997
        >>> type(model[0].weight).__name__
        'BlockwiseFP8Weight'
        >>> model(torch.randn(8, 256, dtype=torch.bfloat16)).sum().backward()  # matmuls in FP8
    """
    check_module(model, "convert")
    refuse_others(others)
    check_recipe(recipe)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter={filter!r} is not callable: expected filter(module, name) -> bool")
    if not isinstance(skip_small, (bool, MinSizes)):
        raise TypeError(f"skip_small={skip_small!r}: expected True, False or a MinSizes")
    checks.flag(convert_head, "convert_head")
    checks.flag(dry_run, "dry_run")
    named = {} if stacks is None else named_experts(model, stacks)
    matrices = matrices_of(model, named)
    skipped = weights_to_skip(model, skip, matrices)
    check_progress(progress)
    check_not_fake(model.parameters())

    heads = heads_of(model)
    paths = fast_paths(matrix.parameter.device for matrix in matrices)
    decide(matrices, Choices(recipe, filter, skipped, skip_small, heads, convert_head, paths))
    chosen = [matrix for matrix in matrices if matrix.is_chosen]
    modules = dict(model.named_modules())
    for matrix in chosen:
        above = [modules[name] for name in ("", *with_all_above(matrix.name))]
        check_castable(matrix, matrix.title, recipe, above)

    path = next(iter(paths.values()), None)
    if path is not None:
        path.warn_if_missing()
    report = ConversionReport(
        tuple(_entry(matrix, recipe or DEFAULT_RECIPE) for matrix in matrices),
        sum(map(_elements_of, model.parameters())),
        None if path is None else str(path),
    )
    if not dry_run:
        total = sum(matrix.parameter.numel() for matrix in chosen)
        with progress_bar("convert", total, progress, unit="parameters") as done:
            for matrix in chosen:
                _swap(matrix, recipe)
                done(matrix.parameter.numel())
        for matrix in matrices:
            _register_hooks(matrix.module)
    if not report.converted:
        warn_of_nothing(model, matrices, report)
    elif filter is None:
        warn_of_stacks(model, matrices, skipped)
    return report


def _swap(matrix: Matrix, recipe: Recipe | None) -> None:
    with torch.inference_mode(False):  # weights made there could never be trained
        form = matrix.fp8_form(recipe or DEFAULT_RECIPE)
        swap_in(matrix.parameter, form)


def _register_hooks(module: nn.Module) -> None:
    """Register the hooks of a module that holds FP8 weights, its own or tied ones."""
    if any(fp8_part(weight) is not None for weight in module._parameters.values()):
        register_state_hooks(module)
        apply_for_fp8()


# The report is written before anything changes


def _entry(matrix: Matrix, recipe: Recipe) -> Entry:
    """Return the report's row for a matrix, with ``recipe`` if the matrix was chosen."""
    weight, fp8 = matrix.parameter, matrix.fp8
    before = _bytes_of(matrix, None if fp8 is None else fp8.recipe)
    after = _bytes_of(matrix, recipe) if matrix.is_chosen else before
    return Entry(
        name=matrix.label,
        shape=() if is_lazy(weight) else tuple(weight.shape),
        dtype=weight.dtype,
        converted=matrix.in_fp8,
        reason=matrix.why or _why_converted(matrix),
        bytes_before=matrix.counts * before,
        bytes_after=matrix.counts * after,
        elements=matrix.counts * _elements_of(weight),
    )


def _elements_of(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _why_converted(linear: Matrix) -> str:
    if linear.lacks_master:
        why = "frozen: high-precision copy dropped"
    elif linear.is_gathered:
        why = "trainable, gathered in FP8"
    elif linear.is_parallel:
        why = _why_parallel(linear)
    else:
        why = "trainable" if linear.parameter.requires_grad else "initialised later"
    if linear.is_stack:
        experts, n, k = linear.sizes
        order = "E x K x N" if linear.is_transposed else "E x N x K"
        sizes = f"experts, {order}: E={experts}, N={n}, K={k}"
        if (part := linear.shared_stack) is not None:
            sizes += f"; on this rank {' x '.join(map(str, part.shape))}"
        return f"{why} ({sizes})"
    if is_conv1d(linear.module):
        return f"{why} (Conv1D)"
    kind = kind_of(linear.module)
    return why if kind == "Linear" else f"{why} (subclass {kind})"


def _why_parallel(linear: Matrix) -> str:
    """Describe the part of a parallel linear layer on this rank, and if it is too small to gain."""
    held = " x ".join(map(str, linear.own.shape))
    kind = "trainable" if linear.parameter.requires_grad else "frozen"
    _, n, k = linear.sizes_here
    small = MinSizes().undercut(n, k)
    slow = f", small for its speed: {' and '.join(small)}" if small else ""
    return f"{kind}, tensor parallel: {held} a rank{slow}"


def _bytes_of(matrix: Matrix, recipe: Recipe | None) -> int:
    """Return the bytes on this rank of a weight in FP8, with ``recipe``, or in high precision."""
    own = matrix.own
    if is_lazy(own):
        return 0
    if recipe is None or matrix.is_gathered:  # FSDP2 casts in its gathers
        return own.nbytes
    cast = recipe.weight_format.nbytes(own.shape)
    if matrix.lacks_master:
        return cast
    return own.nbytes + (cast if recipe.cache_weight else 0)
