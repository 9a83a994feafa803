"""Patterns of module names: which weights they leave out, and what to say of those that miss."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .experts import Named
from .module_names import with_all_above
from .product_weights import label_of, weights_of, why_unconvertible

Weight = tuple[nn.Module, str]
"""A parameter: its module, and its name there."""


def weights_to_skip(
    model: nn.Module, patterns: Sequence[str], named: Named | None = None
) -> dict[Weight, str]:
    """The weights that shell-style ``patterns`` name, each with the first pattern that does.

    A pattern names a module, by any name that the model has for it, and all modules below it; or a
    stack of experts. ``named``: stacks that are known by their names.

    Raises:
        TypeError: patterns that are not a sequence of str.
        ValueError: a pattern that names no weight that could be converted.
    """
    given: Any = patterns
    if isinstance(given, str) or not isinstance(given, Iterable):
        example = given if isinstance(given, str) else "*.router"
        raise TypeError(
            f"skip={given!r} is a {type(given).__name__}: expected a list of patterns, e.g. "
            f"[{example!r}]"
        )
    patterns = tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"skip holds {pattern!r}, a {type(pattern).__name__}: expected patterns of module "
                f"names, e.g. ['*.router']"
            )
    modules = dict(model.named_modules(remove_duplicate=False)) if patterns else {}
    weights = {
        label_of(name, key): (module, key)
        for name, module in modules.items()
        for key in weights_of(module, named)
        if why_unconvertible(module, key) is None
    }
    skipped: dict[Weight, str] = {}
    for pattern in patterns:
        matches = re.compile(fnmatch.translate(pattern)).match
        found = [w for name, w in weights.items() if any(map(matches, with_all_above(name)))]
        if not found:
            raise ValueError(_complaint(model, pattern, modules, weights))
        for weight in found:
            skipped.setdefault(weight, pattern)
    return skipped


def _complaint(
    model: nn.Module, pattern: str, modules: dict[str, nn.Module], weights: Iterable[str]
) -> str:
    found = fnmatch.filter(modules, pattern)
    known = dict.fromkeys(above for name in weights for above in with_all_above(name) if above)
    last = dict.fromkeys(name.rpartition(".")[2] for name in known)
    near = difflib.get_close_matches(pattern, known, n=3) or [
        f"*.{name}" for name in difflib.get_close_matches(pattern.split(".")[-1], last, n=3)
    ]
    if found:
        kind = type(modules[found[0]]).__name__
        what = (
            f"matches only modules that convert leaves alone anyway, such as {found[0]!r} ({kind})"
        )
    else:
        what = f"matches no module of this {type(model).__name__}"
    hint = f"; near it: {', '.join(map(repr, near))}" if near else ""
    return (
        f"skip pattern {pattern!r} {what}: expected a pattern that names linears or modules above "
        f"them{hint}"
    )
