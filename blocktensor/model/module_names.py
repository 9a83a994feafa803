"""The names of the modules that a module is part of."""

from __future__ import annotations


def with_all_above(name: str) -> list[str]:
    """The names of all modules above one but the model itself, from the top, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
