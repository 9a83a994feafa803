"""A small model with all that a checkpoint holds, and folders with checkpoints of it.

It has linears, a bias, a norm, a tie and buffers. A seed tells the checkpoints from each other.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, CheckpointError, Recipe, load_fp8, save_fp8
from blocktensor import convert as convert_model

N, K, VOCABULARY = 200, 300, 32
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OLD, NEW, NEXT = 1, 2, 3
SHARD = 70_000
"""Bytes: the small model then has three shards."""


TAG = r"\.save_fp8\.\w{8}"
"""A part of the names of shards where they replace others."""


class Model(nn.Module):
    """Embedding, two linears, a norm, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, K)
        self.up = nn.Linear(K, N)
        self.down = nn.Linear(N, K, bias=False)
        self.norm = nn.LayerNorm(K)
        self.head = nn.Linear(K, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(self.up(x))))


def filled(
    seed: int = 0, *, convert: bool = True, frozen: bool = False, recipe: Recipe | None = None
) -> Model:
    """A model in bf16 with values that follow from ``seed``."""
    model = Model().bfloat16()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model.steps.fill_(seed + 7)
    for linear in (model.up, model.down):
        linear.weight.requires_grad_(not frozen)
    if convert:
        convert_model(model, recipe or Recipe(), skip_small=False)
    return model


def on_meta(dtype: torch.dtype = torch.bfloat16) -> Model:
    with torch.device("meta"):
        return Model().to(dtype)


TARGETS: dict[str, Callable[[], Model]] = {
    "plain": lambda: filled(5, convert=False),
    "frozen": lambda: filled(5, frozen=True),
    "meta": on_meta,
}
"""Models to load into."""


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, for comparison."""
    return x.contiguous().flatten().view(torch.uint8)


def state(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of everything in a model that is not on meta, by name."""
    found: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        if not x.is_meta:
            parts = x.rowwise()[:2] if isinstance(x, BlockwiseFP8Tensor) else [x]
            found |= {f"{name} {i}": bits(part).clone() for i, part in enumerate(parts)}
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_refused(folder: Path, model: nn.Module, message: str, **options: Any) -> None:
    """``load_fp8`` raises an error that names the folder, and the model stays as it was."""
    before = state(model)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_fp8(model, folder, **options)
    assert str(folder) in str(caught.value)
    assert_same(state(model), before)


def files(count: int) -> set[str]:
    """The files of a checkpoint of so many shards."""
    shards = {f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
    return {INDEX, "config.json"} | shards


def found(folder: Path) -> set[str]:
    """The names in a folder, those of shards as a save into a new folder gives them."""
    names = os.listdir(folder)
    plain = {re.sub(TAG, "", name) for name in names}
    assert len(plain) == len(names)
    return plain


def untagged(files: dict[str, bytes]) -> dict[str, bytes]:
    """The content of a folder, as of a save into a new folder."""
    return {re.sub(TAG, "", x): re.sub(TAG.encode(), b"", data) for x, data in files.items()}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@functools.cache
def unchanged(seed: int) -> Model:
    """A frozen model, which nobody changes."""
    return filled(seed, frozen=True)


def save(seed: int, folder: Path | str, overwrite: bool = True, size: int = SHARD) -> Path:
    return save_fp8(unchanged(seed), folder, overwrite=overwrite, max_shard_bytes=size)


def seed_in(folder: Path) -> int:
    """The seed of the model whose values a folder holds, all of them."""
    model = filled(9, convert=False)
    load_fp8(model, folder)
    seed = int(model.steps) - 7
    assert_same(state(model), state(unchanged(seed)))
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three shards."""
    save(OLD, tmp_path / "fp8")
    assert found(tmp_path / "fp8") == files(3)
    return tmp_path / "fp8"
