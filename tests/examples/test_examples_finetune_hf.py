"""The example of transformers: both ways learn, and leave ordinary checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("rich")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

from transformers import AutoModelForCausalLM

from tests.support.pretrained import silent as silent

TINY = ["--dim", "64", "--layers", "1", "--seq", "32", "--batch", "4", "--device", "cpu"]

EXAMPLE = "finetune_hf"


def test_both_ways_learn(example: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    files = ["--text", str(text), "--out", str(tmp_path)]
    rates = ["--lr", "1e-2", "--lora-lr", "1e-2", "--rank", "4"]
    assert example.main([*TINY, *files, *rates, "--steps", "8"]) == 0
    full, lora = json.loads((tmp_path / "result.json").read_text())["results"]
    assert [full["way"], lora["way"]] == ["full", "lora"]
    assert len(full["losses"]) == len(lora["losses"]) == 8
    assert full["final_loss"] < 0.8 * full["losses"][0]
    assert lora["losses"][0] < full["losses"][0]
    assert lora["final_loss"] < lora["losses"][0]
    assert lora["trained_parameters"] < full["trained_parameters"] / 3
    assert lora["model_bytes"] < full["model_bytes"] / 2  # bytes in place of fp32 masters
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "full", output_loading_info=True)
    assert not any(info.values())
    assert getattr(model.config, "quantization_config", None) is None
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()


def test_a_model_of_which_nothing_is_in_fp8_is_refused(example: ModuleType, tmp_path: Path) -> None:
    example.random_llama(tmp_path / "small", dim=64, layers=1, seq=32)
    options = example.parse(["--model", str(tmp_path / "small"), "--device", "cpu"])
    with pytest.warns(UserWarning, match="no weight"), pytest.raises(SystemExit, match="--small"):
        example.fine_tune("full", tmp_path / "small", [], options, lambda step, loss: None)
