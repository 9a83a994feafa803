"""A small model with all that a checkpoint holds: linears, a bias, a norm, a tie, a buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, CheckpointError, Recipe, load_fp8
from blocktensor import convert as convert_model

N, K, VOCABULARY = 200, 300, 32


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
    if frozen:
        model.up.weight.requires_grad_(False)
        model.down.weight.requires_grad_(False)
    if convert:
        convert_model(model, recipe or Recipe(), skip_small=False)
    return model


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, for comparison."""
    return x.contiguous().flatten().view(torch.uint8)


def state(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of everything in a model, by name."""
    found: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        parts = [x]
        if isinstance(x, BlockwiseFP8Tensor):
            parts = list(x.rowwise()[:2])
        found |= {f"{name} {i}": bits(part).clone() for i, part in enumerate(parts)}
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def on_meta(dtype: torch.dtype = torch.bfloat16) -> Model:
    with torch.device("meta"):
        return Model().to(dtype)


def assert_refused(folder: Path, model: nn.Module, message: str, **options: Any) -> None:
    """``load_fp8`` raises an error that names the folder, and the model stays as it was."""
    is_meta = any(x.is_meta for x in model.parameters())
    before = {} if is_meta else state(model)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_fp8(model, folder, **options)
    assert str(folder) in str(caught.value)
    if is_meta:
        assert all(x.is_meta for x in model.state_dict().values())
    else:
        assert_same(state(model), before)
