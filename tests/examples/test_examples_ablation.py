"""The ablation: FP8 in one product changes what depends on that product, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLE = "ablation"
TINY = ["--dim", "128", "--layers", "1", "--heads", "2", "--seq", "64", "--batch", "4"]
TINY += ["--steps", "6", "--device", "cpu"]


def products(example: ModuleType, variant: str) -> list[Tensor]:
    options = example.parse_options(TINY)
    torch.manual_seed(0)
    model = example.GPT(options.model)
    example.prepare(model, variant)
    linear = model.blocks[0].mlp.gate
    x = torch.randn(128, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    return [y, *torch.autograd.grad(y, (x, linear.weight), torch.randn_like(y))]


@pytest.mark.parametrize(
    ("variant", "fp8"),
    [
        ("fprop alone", (True, False, False)),
        ("dgrad alone", (False, True, False)),
        ("wgrad alone", (False, False, True)),
        ("Recipe()", (True, True, True)),
    ],
)
def test_products_in_fp8(example: ModuleType, variant: str, fp8: tuple[bool, ...]) -> None:
    bf16, whole = products(example, "bf16"), products(example, "Recipe()")
    found = products(example, variant)
    for value, in_fp8, low, high in zip(found, fp8, whole, bf16, strict=True):
        assert not torch.equal(low, high)
        assert torch.equal(value, low if in_fp8 else high)


def test_moved_weights(example: ModuleType) -> None:
    model = example.GPT(example.parse_options(TINY).model)
    before = [parameter.clone() for parameter in model.parameters()]
    example.prepare(model, example.MOVED)
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)
        torch.testing.assert_close(old, new, rtol=1e-5, atol=0)


def test_the_head_alone_differs(example: ModuleType) -> None:
    model = example.GPT(example.parse_options(TINY).model)
    example.prepare(model, example.FP8_HEAD)
    assert type(model.lm_head.weight) is type(model.blocks[0].mlp.up.weight)
    assert type(model.lm_head.weight) is not type(model.embedding.weight)


def test_results(stdlib: Path, example: ModuleType, tmp_path: Path, capsys: Any) -> None:
    variants = ["fprop alone", "Recipe()"]
    example.main([*TINY, "--seeds", "2", "--out", str(tmp_path), "--variants", *variants])
    content = json.loads((tmp_path / "ablation.json").read_text())
    losses = {(run["variant"], run["seed"]): run["heldout_loss"] for run in content["runs"]}
    assert list(losses) == [(v, seed) for seed in (0, 1) for v in ("bf16", *variants)]
    percents = [(losses["Recipe()", seed] / losses["bf16", seed] - 1) * 100 for seed in (0, 1)]
    mean = sum(percents) / 2
    spread = abs(percents[0] - percents[1]) / 2**0.5
    row = [f"{percent:+.2f}%" for percent in (*percents, mean)]
    assert f"| Recipe() | {' | '.join(row)} | {spread:.2f}% |" in capsys.readouterr().out
