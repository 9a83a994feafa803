"""The names of modules: those above a module, and those of a pattern."""

from __future__ import annotations

import fnmatch

from torch import nn


def is_module(model: object, caller: str) -> None:
    """``model``, the first argument of ``caller``, is a module, else TypeError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a model, an nn.Module: got a {type(model).__name__}")


def with_all_above(name: str) -> list[str]:
    """The names of all modules above one but the model itself, from the top, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def matching(model: nn.Module, pattern: str, option: str, example: str) -> list[str]:
    """The names of the modules of ``model`` that a shell-style pattern of ``option`` names.

    Raises:
        ValueError: there are none.
    """
    found = fnmatch.filter((name for name, _ in model.named_modules()), pattern)
    if not found:
        raise ValueError(
            f"{option} pattern {pattern!r} matches no module of this {type(model).__name__}: "
            f"expected a pattern of module names, e.g. {example!r}"
        )
    return found
