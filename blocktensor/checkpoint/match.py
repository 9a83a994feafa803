"""Which tensors of a checkpoint belong to which of a model, by their names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from .names import Spelling
from .on_disk import CheckpointError
from .pretrained_names import Pieces


def matched(
    folder: Path, known: Mapping[str, Sequence[Spelling]], stored: Container[str]
) -> dict[str, Spelling]:
    """How each tensor of the model is named in a checkpoint, of those that are there.

    Args:
        folder: the checkpoint, for messages.
        known: the names that each tensor may have, by its own.
        stored: the names in the checkpoint.

    Raises:
        CheckpointError: a stack of which some experts are stored and others are not, or more.
    """
    found: dict[str, Spelling] = {}
    for name, ways in known.items():
        for way in ways:
            if way in stored if isinstance(way, str) else _are_stored(folder, name, way, stored):
                found[name] = way
                break
    return found


def names_of(way: Spelling) -> list[str]:
    """All names in the checkpoint, those of an expert after each other."""
    if isinstance(way, str):
        return [way]
    return [name for expert in range(way.experts) for name in way.names(expert)]


def _are_stored(folder: Path, name: str, pieces: Pieces, stored: Container[str]) -> bool:
    """Whether a stack is stored in pieces; a CheckpointError for more or fewer than it has."""
    names = names_of(pieces)
    missing = [piece for piece in names if piece not in stored]
    if len(missing) == len(names):
        return False
    if missing:
        raise CheckpointError(
            f"{folder}: the model's {name!r} is a stack of {pieces.experts} experts: of their "
            f"{len(names)} matrices {len(missing)} are missing ({_some(missing)})"
        )
    extra = [piece for piece in pieces.names(pieces.experts) if piece in stored]
    if extra:
        raise CheckpointError(
            f"{folder}: the model's {name!r} is a stack of {pieces.experts} experts: the "
            f"checkpoint has more ({_some(extra)})"
        )
    return True


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
