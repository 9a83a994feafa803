"""Decide what a conversion is to change, and why not the rest; nothing changes here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..model.adapters import adapters_of, names_without_adapters, without_adapters
from ..model.matrix import Matrix
from ..model.names import Weight, with_all_above
from ..model.weights import is_linear, kind_of, why_unconvertible
from ..ops.checks import HIGH_PRECISION
from ..ops.formats import BLOCK
from ..recipe import Recipe
from .fast_path import FastPath
from .report import (
    ALREADY,
    BY_FILTER,
    BY_PATTERN,
    BY_SIZE,
    HEAD,
    NO_FAST_PATH,
    SMALL,
    MinSizes,
)

Filter = Callable[[nn.Module, str], bool]

HEAD_NAMES = (
    "lm_head",
    "output",
    "output_layer",
    "head",
    "embed_out",
    "output_projection",
    "logits",
    "proj_out",
    "classifier",
    "score",
)
"""Usual last names of a linear layer that maps to the vocabulary, or to classes."""


@dataclass(frozen=True)
class Choices:
    """The arguments of one call of ``convert``.

    Attributes:
        skipped: the weights that ``skip`` names, each with its pattern.
        small: the thresholds of sizes; True for the measured ones, False for none.
        heads: the heads of the model, each with the reason.
        head: True to convert heads, too.
        fast_paths: the fast path of the GPU that weights on each device run on.
    """

    recipe: Recipe | None
    filter: Filter | None
    skipped: Mapping[Weight, str]
    small: bool | MinSizes
    heads: Mapping[nn.Module, str]
    head: bool
    fast_paths: Mapping[torch.device, FastPath]


def decide(matrices: Sequence[Matrix], choices: Choices) -> None:
    """Choose the matrices to cast, one for each parameter, and give a reason for the others."""
    tied: dict[int, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        tied[id(matrix.parameter)].append(matrix)
    for group in tied.values():
        _decide_on(group, choices)


def _decide_on(tied: Sequence[Matrix], choices: Choices) -> None:
    """Decide on one parameter; ``tied``: its matrices in all modules that hold it."""
    linears = [matrix for matrix in tied if matrix.unconvertible is None]
    others = [kind_of(matrix.module) for matrix in tied if matrix.unconvertible is not None]
    first = linears[0] if linears else tied[0]
    left = {x: why for x in linears if (why := _why_left(x, tied, choices)) is not None}
    if not linears:
        left = {first: str(first.unconvertible)}
    elif others and not left and first.is_frozen:
        # one of these may read the values that conversion would drop
        left = {first: f"frozen, and another module holds it too: {others[0]}"}
    if left and first.fp8 is not None and first.is_read:
        left = {first: ALREADY}
    _conclude(tied, first, left)


def _conclude(tied: Sequence[Matrix], first: Matrix, left: Mapping[Matrix, str]) -> None:
    """Choose the first matrix of a parameter unless some are ``left``, each with the reason."""
    in_fp8 = not left or first.fp8 is not None
    first.is_chosen = not left
    for matrix in tied:
        matrix.in_fp8 = in_fp8 and matrix.is_read
        matrix.counts = matrix is (first if in_fp8 else tied[0])
        if matrix in left:
            matrix.why = left[matrix]
        elif in_fp8:
            matrix.why = None if matrix is first else f"tied to {first.label!r}"
            if matrix.unconvertible and not matrix.in_fp8:
                matrix.why = f"{matrix.unconvertible}; {matrix.why}"
        elif matrix.unconvertible is None:  # it could be converted by itself
            refused, reason = next(iter(left.items()))
            matrix.why = f"tied to {refused.label!r}: {reason}"
        else:
            matrix.why = matrix.unconvertible if matrix.counts else f"tied to {tied[0].label!r}"


def _why_left(linear: Matrix, tied: Sequence[Matrix], choices: Choices) -> str | None:
    """Return why a matrix that could be converted is left alone; None if it is not."""
    weight, module = linear.parameter, linear.module
    if not is_to_be_cast(linear, choices.recipe):
        return ALREADY
    if (pattern := choices.skipped.get((module, linear.key))) is not None:
        return f"{BY_PATTERN} {pattern!r}"
    is_fp8 = linear.fp8 is not None
    if not is_fp8:
        for other in tied:
            if isinstance(other.module, (nn.Embedding, nn.EmbeddingBag)):
                return f"tied to embedding {other.label!r}"
        if module in choices.heads and not choices.head:
            return choices.heads[module]
        if weight.dtype not in HIGH_PRECISION:
            return f"dtype {weight.dtype}"
    if choices.filter is not None:
        wanted = choices.filter(module, linear.label)
        if wanted is None:
            raise TypeError(
                f"filter returned None for {linear.label!r}: expected True to convert it, "
                f"False to skip it"
            )
        if not wanted:
            return BY_FILTER
    return None if is_fp8 or is_lazy(weight) else why_small(linear, choices)


def why_small(linear: Matrix, choices: Choices) -> str | None:
    """Return why the matmuls with a weight would be slower in FP8; None if they would not."""
    if choices.small is False:
        return None
    is_stack, path = linear.is_stack, choices.fast_paths.get(linear.parameter.device)
    # compare a parallel linear layer as a whole, not its part on this rank
    _, n, k = linear.sizes_here if is_stack else linear.sizes
    thresholds = choices.small if isinstance(choices.small, MinSizes) else MinSizes()
    is_slow = choices.small is True and path is not None and path.is_portable(is_stack)
    if is_slow and is_stack:
        return f"{NO_FAST_PATH}: experts are slower than bf16{BY_SIZE}"
    if is_slow:
        thresholds = MinSizes.portable()
        if (n % BLOCK or k % BLOCK) and linear.module not in choices.heads:
            odd = f"N={n}, K={k} are not multiples of {BLOCK}"
            return f"{NO_FAST_PATH}: {odd}{BY_SIZE}"
    small = (thresholds.experts() if is_stack else thresholds).undercut(n, k)
    before = f"{NO_FAST_PATH}: " if is_slow else ""
    return f"{before}{SMALL}: {' and '.join(small)}{BY_SIZE}" if small else None


def is_to_be_cast(matrix: Matrix, recipe: Recipe | None) -> bool:
    """Return True if a weight is not FP8 yet, or must take another recipe."""
    fp8 = matrix.fp8
    return fp8 is None or (recipe is not None and fp8.recipe != recipe)


# Heads


def heads_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers that are heads, each with the reason.

    A linear layer is a head if

    - it has as many outputs as an embedding of the model has entries (and not as many inputs), and
      its weight is tied to an embedding, or it is not part of a repeated block and no other layer
      of this size may be the head, except for entries of the same ``nn.ModuleList``, or
    - it has one of the usual names, is not part of a repeated block, and its parent also holds the
      body of the model (a module with children, or an embedding), or
    - it is part of a repeated block, and has both the name and the size (multi-token prediction).

    A layer of this size that is tied or has a usual name is the head rather than others. A table
    of positions is an embedding too, so that feed-forward layers may have its size by chance.

    A part of a repeated block lies below an entry of an ``nn.ModuleList``, or of another container
    with several entries of one class. Layers that peft has wrapped, and its copies of them, are
    judged in the place of the wrapper.
    """
    names, adapters = names_without_adapters(model), adapters_of(model)
    # of several with one name, the first: a copy has the name of its original
    modules = {names[x]: without_adapters(x) for x in reversed(names)}
    vocabularies: dict[int, str] = {}  # the reason, by the number of entries
    for module, name in names.items():
        if isinstance(module, nn.Embedding):
            n = module.num_embeddings
            vocabularies.setdefault(n, f"{HEAD}: {n} outputs, the entries of {name!r}")
    embedded = {id(x.weight) for x in names if isinstance(x, nn.Embedding)}
    heads: dict[nn.Module, str] = {}
    sure: set[int] = set()  # sizes of heads that are tied or named
    by_size: dict[int, dict[str, list[nn.Module]]] = defaultdict(lambda: defaultdict(list))
    for module, name in names.items():
        if not is_linear(module) or why_unconvertible(module, "weight") is not None:
            continue
        if module in adapters:
            continue
        is_named = name.rpartition(".")[2] in HEAD_NAMES
        if isinstance(module, nn.Linear):  # the weight of an nn.LazyLinear has no shape
            n, k = module.out_features, module.in_features
        else:
            _, n, k = Matrix(name, "weight", module).sizes
        has_size = n in vocabularies and n != k
        if has_size and (is_named or id(module.weight) in embedded):
            sure.add(n)
            heads[module] = vocabularies[n]
        elif has_size and not _is_repeated(name, modules):
            by_size[n][_list_of(name, modules)].append(module)
        elif is_named and not _is_repeated(name, modules) and _is_beside_body(name, modules):
            heads[module] = f"{HEAD}: by name and place"
    for n, lists in by_size.items():
        if n not in sure and len(lists) == 1:
            heads.update((module, vocabularies[n]) for module in next(iter(lists.values())))
    reasons = {names[head]: reason for head, reason in heads.items()}
    copies = ((module, reasons[name]) for module, name in names.items() if name in reasons)
    heads.update((module, reason) for module, reason in copies if is_linear(module))
    return heads


def _list_of(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the list that a layer is a numbered entry of, else its own name."""
    parent, _, last = name.rpartition(".")
    # layers of an nn.Sequential follow each other: they are not heads of one body
    is_entry = last.isdigit() and not isinstance(modules[parent], nn.Sequential)
    return parent if is_entry else name


def _is_repeated(name: str, modules: Mapping[str, nn.Module]) -> bool:
    for above in with_all_above(name)[:-1]:
        parent, _, last = above.rpartition(".")
        container = modules[parent]
        in_dict = isinstance(container, nn.ModuleDict)
        if isinstance(container, nn.ModuleList) or (in_dict and last.isdigit()):
            return True
        if in_dict or isinstance(container, nn.Sequential):
            kinds = [type(without_adapters(entry)) for entry in container.children()]
            if kinds.count(type(modules[above])) > 1:
                return True
    return False


def _is_beside_body(name: str, modules: Mapping[str, nn.Module]) -> bool:
    for child in reversed(with_all_above(name)):
        parent = modules[child.rpartition(".")[0]]
        siblings = [m for m in map(without_adapters, parent.children()) if m is not modules[child]]
        if any(isinstance(m, nn.Embedding) or next(m.children(), None) for m in siblings):
            return True
        if not isinstance(parent, nn.Sequential):
            return False
    return False
