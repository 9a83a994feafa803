"""Folders with checkpoints of the small model, told apart by the seed of its values."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocktensor import load_fp8, save_fp8
from tests.support.checkpoint_models import Model, assert_same, filled, state

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OLD, NEW, NEXT = 1, 2, 3
SHARD = 70_000
"""Bytes: the small model then has three shards."""


def shards(count: int) -> set[str]:
    return {f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}


def files(count: int) -> set[str]:
    """The files of a checkpoint of so many shards."""
    return {INDEX, "config.json"} | shards(count)


def found(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@functools.cache
def _model(seed: int) -> Model:
    """Return a frozen model, which nobody changes."""
    return filled(seed, frozen=True)


def save(seed: int, folder: Path, overwrite: bool = True, size: int = SHARD) -> None:
    save_fp8(_model(seed), folder, overwrite=overwrite, max_shard_bytes=size)


def seed_in(folder: Path) -> int:
    """The seed of the model whose values a folder holds, all of them."""
    model = filled(9, convert=False)
    load_fp8(model, folder)
    seed = int(model.steps) - 7
    assert_same(state(model), state(_model(seed)))
    return seed


def blank(folder: Path) -> None:
    """Overwrite the files of tensors, in which a model that was loaded must not lie."""
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three shards."""
    save(OLD, tmp_path / "fp8")
    assert found(tmp_path / "fp8") == files(3)
    return tmp_path / "fp8"
