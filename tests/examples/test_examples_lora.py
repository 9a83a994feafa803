"""The LoRA example: what it reports, and that the base stays what it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("safetensors")

from blocktensor import BlockwiseFP8Tensor, load_fp8

EXAMPLE = "lora_fp8"
TINY = ["--dim", "32", "--layers", "1", "--seq", "16", "--batch", "2", "--device", "cpu"]


def test_both_bases_learn_alike_and_do_not_change(example: ModuleType, tmp_path: Path) -> None:
    steps = ["--steps", "40", "--base-steps", "60", "--rank", "4", "--lr", "0.01", "--batch", "8"]
    assert example.main([*TINY, *steps, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "result.json").read_text())
    bf16, fp8 = report["results"]
    assert [bf16["base"], fp8["base"]] == ["bf16", "FP8"]
    for result in (bf16, fp8):
        assert result["base_unchanged"] and result["final_loss"] < result["first_loss"]
    assert abs(report["change_percent"]) < 1
    assert fp8["base_bytes"] < 0.8 * bf16["base_bytes"]  # norms, embedding and head are not FP8
    # again, over the checkpoint that is there; it loads elsewhere too
    assert example.main([*TINY, "--steps", "1", "--base-steps", "1", "--out", str(tmp_path)]) == 0
    model = example.GPT(example.ModelConfig(dim=32, layers=1, seq=16))
    assert len(load_fp8(model, tmp_path / "base-fp8").fp8) == 7


def test_an_adapter_starts_as_nothing_and_is_all_that_trains(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(example.ModelConfig(dim=32, layers=1, seq=16))
    tokens = torch.randint(256, (2, 16))
    wanted = model(tokens)
    count = len(list(model.parameters()))
    example.add_adapters(model, rank=2)
    assert torch.equal(model(tokens), wanted)
    model(tokens).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained and all(name.endswith((".down.weight", ".up.weight")) for name in trained)
    assert len(trained) == 2 * 7
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".base." in n)
    assert len(list(model.parameters())) == count + 2 * 7


def test_a_changed_base_is_noticed(example: ModuleType) -> None:
    layer = torch.nn.Linear(256, 128).bfloat16().requires_grad_(False)
    frozen = BlockwiseFP8Tensor.from_values(layer.weight, (128, 128))
    layer.weight = torch.nn.Parameter(frozen, requires_grad=False)
    before = example.digest(layer)
    frozen.rowwise_scale.mul_(2)
    assert example.digest(layer) != before
    with torch.no_grad():
        frozen.rowwise_scale.div_(2)
        layer.bias.add_(1)
    assert example.digest(layer) != before
