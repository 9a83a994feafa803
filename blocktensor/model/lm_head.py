"""Which linear of a model is its head: by its size and its place, not by its name alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from .linears import is_linear, sizes_of, why_unconvertible
from .module_names import with_all_above

HEAD_NAMES = (
    *("lm_head", "output", "output_layer", "head", "embed_out", "output_projection", "logits"),
    *("proj_out", "classifier", "score"),
)
"""Usual last names of a linear that maps to the vocabulary, or to classes."""


def heads_of(model: nn.Module) -> dict[nn.Module, str]:
    """The linears that are heads, each with the reason.

    A linear is a head if

    - it has as many outputs as an embedding of the model has entries (and not as many inputs), and
      is not part of a repeated block, or
    - it has one of the usual names, is not part of a repeated block, and the body of the model lies
      beside it: a module with children of its own, or an embedding, or
    - it is part of a repeated block, and has both the name and the size (multi-token prediction).

    A part of a repeated block lies below an entry of an ``nn.ModuleList``, or of another container
    with several entries of one class.
    """
    modules = dict(model.named_modules())
    vocabularies: dict[int, str] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            vocabularies.setdefault(module.num_embeddings, name)
    heads: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if not is_linear(module) or why_unconvertible(module) is not None:
            continue
        is_named = name.rpartition(".")[2] in HEAD_NAMES
        n, k = _sizes(module)
        has_size = n in vocabularies and n != k
        if not (is_named or has_size):
            continue
        repeated = _is_repeated(name, modules)
        if has_size and (is_named or not repeated):
            heads[module] = f"lm head: {n} outputs, the entries of {vocabularies[n]!r}"
        elif is_named and not repeated and _is_beside_body(name, modules):
            heads[module] = "lm head: by name and place"
    return heads


def _sizes(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):  # the weight of an nn.LazyLinear has no shape
        return module.out_features, module.in_features
    assert isinstance(module.weight, nn.Parameter)
    return sizes_of(module, module.weight)


def _levels(name: str) -> Iterator[tuple[str, str]]:
    """The names of a module and of all above it, from below, each with its parent's."""
    for above in reversed(with_all_above(name)):
        yield above, above.rpartition(".")[0]


def _is_repeated(name: str, modules: dict[str, nn.Module]) -> bool:
    for above, parent in list(_levels(name))[1:]:
        container = modules[parent]
        if isinstance(container, nn.ModuleList):
            return True
        if isinstance(container, (nn.ModuleDict, nn.Sequential)):
            kinds = Counter(type(entry) for entry in container.children())
            is_number = above.rpartition(".")[2].isdigit()
            in_dict = isinstance(container, nn.ModuleDict) and is_number
            if in_dict or kinds[type(modules[above])] > 1:
                return True
    return False


def _is_beside_body(name: str, modules: dict[str, nn.Module]) -> bool:
    for child, parent in _levels(name):
        beside = [m for m in modules[parent].children() if m is not modules[child]]
        if any(isinstance(m, nn.Embedding) or next(m.children(), None) for m in beside):
            return True
        if not isinstance(modules[parent], nn.Sequential):
            return False
    return False
