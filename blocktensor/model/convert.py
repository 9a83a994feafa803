"""Conversion of a model's nn.Linear weights to FP8, in place, with a report."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..distributed.dtensor import local_of, with_local
from ..distributed.fsdp.trainable import FP8Shard, is_converted, shard_of
from ..ops.checks import HIGH_PRECISION
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from .conversion_report import ConversionReport, Entry, SmallKN
from .freeze import frozen_form
from .state_dict import register_state_hooks

HEAD_NAMES = ("lm_head", "output", "head", "embed_out", "output_projection", "logits")
"""Usual last names of a linear that maps to the vocabulary."""

Filter = Callable[[nn.Module, str], bool]


def to_blockwise_fp8_weights(module: nn.Module, recipe: Recipe = DEFAULT_RECIPE) -> None:
    """Convert the weight of one nn.Linear in place: ``model.apply(to_blockwise_fp8_weights)``.

    Other modules, converted or parametrized weights, and the output projection of
    nn.MultiheadAttention (which multiplies by it without calling it) are left unchanged. The
    parameter keeps its identity: tied modules, optimizers and parameter groups hold the FP8 weight.
    A weight that requires a gradient becomes a :class:`BlockwiseFP8Weight`, a frozen one a
    :class:`BlockwiseFP8Tensor` whose high-precision copy is dropped (on the meta device: a
    BlockwiseFP8Weight, to be initialised later). A weight that FSDP2 has sharded is gathered in FP8
    from then on; convert it before the first forward.

    Raises:
        NotImplementedError: the weight is a frozen DTensor.
        TypeError: the weight is not bf16, fp16 or fp32.
        RuntimeError: the parameter is in use by an autograd graph or held by a wrapper such as DDP.
    """
    if not isinstance(module, nn.Linear) or _why_unconvertible(module) is not None:
        return
    if not is_converted(module.weight):
        swap_in(module.weight, _converted_weight(module.weight, recipe))
    if isinstance(module.weight, BlockwiseFP8Weight) or shard_of(module.weight) is not None:
        register_state_hooks(module)


def convert(
    model: nn.Module,
    recipe: Recipe = DEFAULT_RECIPE,
    filter: Filter | None = None,
    skip: Sequence[str] = (),
    auto_filter_small_kn: bool | SmallKN = True,
) -> ConversionReport:
    """Convert a model's nn.Linear weights to FP8 in place, and report on every one.

    Embeddings and the lm head (by its usual names, or tied to an embedding) are skipped.

    Args:
        model: any module; names in the report are relative to it.
        recipe: numeric choices for all converted layers.
        filter: ``filter(module, name) -> bool``; False skips a linear.
        skip: shell-style patterns of module names to skip, e.g. ``["*.router", "lm_head"]``.
        auto_filter_small_kn: skip weights that are too small to be faster in FP8: True for the
            measured sizes, False for none, or a :class:`SmallKN`.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError, RuntimeError: as :func:`to_blockwise_fp8_weights`; a pattern list that is a str.
        ValueError: a pattern in ``skip`` that matches no module.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} is a str: expected a list of patterns, e.g. [{skip!r}]")
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"skip pattern {pattern!r} matches no module of the model")
    small = auto_filter_small_kn
    thresholds = small if isinstance(small, SmallKN) else SmallKN() if small else None
    layers = [
        (name, module, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    embeddings = {id(w): name for name, module, w in layers if isinstance(module, nn.Embedding)}
    users: dict[int, list[str]] = defaultdict(list)  # names by parameter, for ties
    for name, _, weight in layers:
        users[id(weight)].append(name)

    entries = []
    for name, module, weight in layers:
        first_use = users[id(weight)][0] == name
        before = _bytes_of(weight) if first_use else 0
        shape, dtype = tuple(weight.shape), weight.dtype
        reason = _why_skip(name, module, embeddings, filter, skip, thresholds)
        if reason is None:
            was = is_converted(weight)
            to_blockwise_fp8_weights(module, recipe)  # the parameter keeps its identity
            reason = _why_converted(weight, was, users[id(weight)], name)
        after = _bytes_of(weight) if first_use else 0
        entries.append(Entry(name, shape, dtype, is_converted(weight), reason, before, after))
    return ConversionReport(tuple(entries))


def _why_unconvertible(module: nn.Linear) -> str | None:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by it without calling it"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed (parametrized), not a parameter"
    return None


def _why_skip(
    name: str,
    module: nn.Linear | nn.Embedding,
    embeddings: dict[int, str],
    filter: Filter | None,
    skip: Sequence[str],
    thresholds: SmallKN | None,
) -> str | None:
    weight = module.weight
    if isinstance(module, nn.Embedding):
        return "embedding"
    if reason := _why_unconvertible(module):
        return reason
    for pattern in skip:
        if fnmatch.fnmatch(name, pattern):
            return f"skip pattern {pattern!r}"
    if id(weight) in embeddings:
        return f"tied to embedding {embeddings[id(weight)]!r}"
    if name.rpartition(".")[2] in HEAD_NAMES:
        return "lm head by name"
    if weight.dtype not in HIGH_PRECISION:
        return f"dtype {weight.dtype}"
    if filter is not None and not filter(module, name):
        return "filter"
    n, k = weight.shape
    small = [] if thresholds is None else thresholds.undercut(n, k)
    return f"small: {' and '.join(small)} (auto_filter_small_kn)" if small else None


def _why_converted(weight: Tensor, was: bool, users: list[str], name: str) -> str:
    if users[0] != name:
        return f"tied to {users[0]!r}"
    if was:
        return "already converted"
    if isinstance(weight, BlockwiseFP8Tensor):
        return "frozen: high-precision copy dropped"
    if shard_of(weight) is not None:
        return "trainable, gathered in FP8"
    return "trainable" if weight.requires_grad else "initialised later"


def _converted_weight(weight: Tensor, recipe: Recipe) -> Tensor:
    frozen = not weight.requires_grad and weight.device.type != "meta"
    local = local_of(weight)
    if local is not None:
        if frozen:
            raise NotImplementedError(
                f"cannot convert a frozen DTensor {list(weight.shape)}: convert the model before "
                f"fully_shard, or with requires_grad=True"
            )
        return with_local(weight, FP8Shard(local.detach(), recipe))
    return frozen_form(weight, recipe) if frozen else BlockwiseFP8Weight(weight.detach(), recipe)


def _bytes_of(weight: Tensor) -> int:
    if (shard := shard_of(weight)) is not None:
        return shard.master.nbytes
    if isinstance(weight, BlockwiseFP8Tensor):
        return weight.format.nbytes(weight.shape)
    if isinstance(weight, BlockwiseFP8Weight):
        cached = weight.format.nbytes(weight.shape) if weight.recipe.cache_weight else 0
        return weight.master.nbytes + cached
    return weight.nbytes
