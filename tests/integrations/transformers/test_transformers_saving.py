"""What ``save_pretrained`` writes: ordinary weights, and FP8 on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from blocktensor import BlockwiseFP8Tensor, convert
from blocktensor.integrations.transformers import save_pretrained_fp8
from tests.support.checkpoint_models import assert_same, bits, state
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, gpt2, llama, loaded, logits, saved

MODELS = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "qwen3": lambda: transformers_moe("qwen3"),
}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of all parameters, in high precision."""
    return {
        name: x.dequantize() if isinstance(x, BlockwiseFP8Tensor) else x.detach().clone()
        for name, x in model.state_dict().items()
    }


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_ordinary_checkpoint(kind: str, frozen: bool, tmp_path: Path) -> None:
    """It holds the values, under the names, and the config of a model that never was in FP8."""
    folder = saved(tmp_path / "source", MODELS[kind]())
    model = loaded(folder, choices(frozen=frozen))
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(state(plain), {f"{n} 0": bits(x)
                               for n, x in values(model).items()})  # fmt: skip
    names = [load_file(tmp_path / x / "model.safetensors").keys() for x in ("source", "saved")]
    assert names[0] == names[1]
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("source", "saved")]
    assert configs[0] == configs[1]
    again = loaded(tmp_path / "saved", choices(frozen=frozen))
    assert torch.equal(logits(again), logits(model))


def test_a_state_that_is_given_is_saved(llama_folder: Path, tmp_path: Path) -> None:
    """Transformers drops it for a quantized model; Trainer gathers it so under FSDP."""
    for frozen in (False, True):
        model = loaded(llama_folder, choices(frozen=frozen))
        given = dict(model.state_dict())
        given["model.norm.weight"] = torch.full_like(given["model.norm.weight"], 7)
        model.save_pretrained(tmp_path, state_dict=given)
        stored = load_file(tmp_path / "model.safetensors")
        assert stored["model.norm.weight"].eq(7).all()
        assert stored.keys() == given.keys()


def test_adapters_are_saved_without_their_base(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(BlockwiseFP8Tensor, "dequantize")  # a copy of the base for nothing
    peft = pytest.importorskip("peft")
    for frozen in (False, True):
        model = loaded(llama_folder, choices(frozen=frozen))
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.save_pretrained(tmp_path)
        stored = load_file(tmp_path / "adapter_model.safetensors")
        assert len(stored) == 4 and all("lora_" in name for name in stored)
        with pytest.raises(ValueError, match="has adapters"):
            save_pretrained_fp8(model, tmp_path / "fp8")
        again = loaded(llama_folder, choices(frozen=frozen))
        again.load_adapter(str(tmp_path))
        assert torch.equal(logits(again), logits(model))


# FP8


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_in_fp8(kind: str, frozen: bool, tmp_path: Path) -> None:
    model = loaded(saved(tmp_path / "source", MODELS[kind]()), choices(frozen=frozen))
    folder = save_pretrained_fp8(model, tmp_path / "fp8", max_shard_bytes=1 << 17)
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "fp8"
    assert config == json.loads((tmp_path / "source" / "config.json").read_text())
    assert (folder / "generation_config.json").exists()
    again = loaded(folder, choices(frozen=True))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_pretrained_fp8(model, folder)


def test_a_model_that_was_not_loaded_names_its_class(tmp_path: Path) -> None:
    model = llama().bfloat16()
    convert(model, auto_filter_small_kn=False)
    config = json.loads((save_pretrained_fp8(model, tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_transformers_reads_it_as_its_fp8(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    save_pretrained_fp8(loaded(llama_folder), tmp_path / "fp8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", device_map="cpu")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"


def test_other_models_are_refused(tmp_path: Path) -> None:
    module: Any = nn.Linear(128, 128)
    with pytest.raises(TypeError, match=r"expected a transformers\.PreTrainedModel"):
        save_pretrained_fp8(module, tmp_path)
    with pytest.raises(ValueError, match="no FP8 weight"):
        save_pretrained_fp8(llama(), tmp_path)
