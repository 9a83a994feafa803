"""The models and calls that a worker of a benchmark makes on a rank."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch import nn

from benchmarks.timing import Call
from tests.support.scripts import examples


def calls_of(name: str, *arguments: Any) -> tuple[Any, list[nn.Module], dict[str, Call]]:
    """A worker's module, the models of its variants, and ``calls`` of its shape "tiny"."""
    models: list[nn.Module] = []
    with examples(), pytest.MonkeyPatch.context() as patch:
        worker = importlib.import_module(f"benchmarks.{name}")
        made = worker.variant

        def variant(*args: Any) -> nn.Module:
            models.append(made(*args))
            return models[-1]

        patch.setattr(worker, "variant", variant)
        return worker, models, worker.calls(worker.SHAPES["tiny"], *arguments)
