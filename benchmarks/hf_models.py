"""What the benchmarks of transformers' models share: how they are made, and a training step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .timing import Call


def absent() -> dict[str, str]:
    """Why the model cannot be made here; empty if it can."""
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        return {"transformers": f"{type(error).__name__}: {error}"}
    return {}


def in_bf16(make: Callable[[Any], Any], config: Any, device: torch.device | str) -> Any:
    """The model that ``make`` makes of ``config``, of the same values in every call."""
    torch.manual_seed(0)
    with torch.device(device):
        model = make(config)
    return model.to(torch.bfloat16)


def adamw(model: Any) -> torch.optim.Optimizer:
    """The optimizer of the steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Call:
    """A forward, backward and optimizer step of one batch ``[batch, time]``."""

    def once() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once
