"""Resolve the patterns of module names that a caller gives, to skip weights or name experts."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .. import text_table
from .matrix import Matrix
from .weights import Named, why_not_a_stack

Weight = tuple[nn.Module, str]
"""A parameter: its module, and its name there."""

Experts = Mapping[str, Sequence[str]]
"""Names of parameters that are stacks, by shell-style patterns of module names."""


def check_module(model: object, caller: str) -> None:
    """Raise TypeError unless ``model``, the first argument of ``caller``, is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a model, an nn.Module: got a {type(model).__name__}")


def with_all_above(name: str) -> list[str]:
    """Return the names of all modules above a module, from the top, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def ends_of(names: Iterable[str]) -> str:
    """List the last parts of the names of modules, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or "none"


def meant_by(pattern: str, names: Sequence[str]) -> str:
    """Return the end of a message that shows how to write a pattern that matches no name.

    Patterns are shell-style and match whole names; peft's match the ends of names, or are regular
    expressions.
    """
    for other in (f"*.{pattern}", pattern.replace(".*", "*"), f"*{pattern}*"):
        count = sum(matching(name, [other]) for name in names)
        if count:
            return f"; a pattern matches whole names: {other!r} matches {count} of {len(names)}"
    return ""


def check_patterns(patterns: Sequence[str], argument: str, example: str) -> tuple[str, ...]:
    """Return the patterns of module names that a caller gave.

    Raises:
        TypeError: they are no sequence of str. The message has the name of the ``argument``, and
            an ``example`` of a pattern.
    """
    given: Any = patterns
    if isinstance(given, str) or not isinstance(given, Iterable):
        example = given if isinstance(given, str) else example
        raise TypeError(
            f"{argument}={given!r} is a {type(given).__name__}: expected a list of patterns, e.g. "
            f"[{example!r}]"
        )
    patterns = tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{argument} holds {pattern!r}, a {type(pattern).__name__}: expected patterns of "
                f"module names, e.g. [{example!r}]"
            )
    return patterns


def matching(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a shell-style pattern matches ``name`` or the name of a module above it."""
    names = with_all_above(name)
    return any(fnmatch.fnmatchcase(above, pattern) for pattern in patterns for above in names)


def weights_to_skip(
    model: nn.Module, patterns: Sequence[str], matrices: Iterable[Matrix]
) -> dict[Weight, str]:
    """Return the weights that shell-style ``patterns`` name, each with its first pattern.

    A pattern names a stack of experts, or a module with all modules below it, by any of its names.
    ``matrices``: all matrices of the model.

    Raises:
        TypeError: patterns that are not a sequence of str.
        ValueError: a pattern that names no weight that could be converted.
    """
    patterns = check_patterns(patterns, "skip", "*.router")
    modules = dict(model.named_modules(remove_duplicate=False)) if patterns else {}
    known: dict[nn.Module, list[str]] = defaultdict(list)
    unknown: dict[str, Weight] = {}  # stacks that convert would warn about, adapters
    for matrix in matrices:
        if matrix.unconvertible is None:
            known[matrix.module].append(matrix.key)
        elif matrix.is_unknown_stack or matrix.is_adapter:
            unknown[matrix.label] = matrix.module, matrix.key
    weights = {
        Matrix(name, key, module).label: (module, key)
        for name, module in modules.items()
        for key in known[module]
    }
    skipped: dict[Weight, str] = {}
    for pattern in patterns:
        matches = [w for name, w in {**unknown, **weights}.items() if matching(name, [pattern])]
        if not matches:
            raise ValueError(
                f"skip pattern {pattern!r} matches no weight of this {type(model).__name__} that "
                f"could be converted: expected a pattern of the names of linear layers or modules "
                f"above them; names of such weights end in {ends_of(weights)}"
                f"{meant_by(pattern, list(weights))}"
            )
        for weight in matches:
            skipped.setdefault(weight, pattern)
    return skipped


def named_experts(model: nn.Module, stacks: Experts) -> Named:
    """Return the modules that the patterns of ``stacks`` match, each with its stacks.

    Raises:
        TypeError: ``stacks`` is no mapping of patterns to sequences of names.
        ValueError: a pattern matches no module, or a module lacks a parameter of that name or has
            one that is not ``[E, N, K]`` or ``[E, K, N]``.
    """
    given: Any = stacks
    if not isinstance(given, Mapping):
        raise TypeError(
            f"stacks={stacks!r} is a {type(stacks).__name__}: expected patterns of module names "
            f"with the names of their stacks, e.g. {{'*.experts': ['w1', 'w2']}}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    named: dict[nn.Module, tuple[str, ...]] = {}
    for pattern, names in given.items():
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not all(isinstance(x, str) for x in (pattern, *(names if is_list else [None]))):
            raise TypeError(
                f"stacks has {pattern!r}: {names!r}: expected a pattern with a list of the names "
                f"of stacks, e.g. {{'*.experts': ['w1', 'w2']}}"
            )
        matches = fnmatch.filter(modules, pattern)
        if not matches:
            held = ((n, p) for n, x in modules.items() for p in x._parameters.values())
            holders = ends_of(n for n, p in held if p is not None and p.ndim == 3)
            raise ValueError(
                f"stacks pattern {pattern!r} matches no module of this {type(model).__name__}: "
                f"expected a pattern of the names of modules that hold stacks; modules with "
                f"parameters of 3 dimensions have names that end in {holders}"
            )
        for module_name in matches:
            module = modules[module_name]
            for name in names:
                _check_stack(module_name, module, name)
            named[module] = tuple(dict.fromkeys((*named.get(module, ()), *names)))
    return named


def _check_stack(module_name: str, module: nn.Module, name: str) -> None:
    parameter = module._parameters.get(name)
    what = f"stacks names {name!r} of {module_name!r}"
    if parameter is None:
        has = ", ".join(key for key, x in module._parameters.items() if x is not None) or "none"
        raise ValueError(f"{what}, which has no such parameter: its parameters are {has}")
    reason = why_not_a_stack(parameter)
    if reason is not None:
        raise ValueError(f"{what}, {reason}: expected a parameter [E, N, K] or [E, K, N]")


def stacks_like(
    matrix: Matrix, matrices: Iterable[Matrix], model: nn.Module
) -> dict[str, list[str]]:
    """Return a value for ``stacks`` of ``convert`` that names an unknown stack and others like it.

    ``matrices``: all matrices of the model.
    """
    alike = text_table.pattern(matrix.name)
    keys: dict[str, list[str]] = {}
    for x in matrices:
        if x.is_unknown_stack and text_table.pattern(x.name) == alike:
            keys.setdefault(x.name, []).append(x.key)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    # * also matches dots: the pattern must match no module below
    is_exact = set(fnmatch.filter(names, alike)) == keys.keys()
    if is_exact and len(set(map(tuple, keys.values()))) == 1:
        return {alike: keys[matrix.name]}
    return keys
