"""``from_pretrained`` with our config: what is converted, for whom, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.trainer_utils import validate_quantization_for_training

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, SmallKN, convert, unfuse
from blocktensor.integrations.transformers import BlockwiseFP8Config, BlockwiseFP8Quantizer
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, gpt2, llama, loaded, logits, saved

MODELS = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "qwen3": lambda: transformers_moe("qwen3"),
    "deepseek": lambda: transformers_moe("deepseek"),
}


def by_hand(folder: Path, frozen: bool = False, dtype: Any = None, **options: Any) -> Any:
    """The same checkpoint, converted after ``from_pretrained``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.requires_grad_(not frozen)
    convert(model, **{"auto_filter_small_kn": False, **options})
    return model


def kinds(model: nn.Module) -> dict[str, tuple[type, torch.dtype, bool]]:
    return {n: (type(x), x.dtype, x.requires_grad) for n, x in model.named_parameters()}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_converts_as_convert_does(kind: str, frozen: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, MODELS[kind]())
    model, wanted = loaded(folder, choices(frozen=frozen)), by_hand(folder, frozen)
    assert kinds(model) == kinds(wanted)
    fp8 = BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight
    in_fp8 = {name for name, x in model.named_parameters() if type(x) is fp8}
    assert len(in_fp8) == {"llama": 14, "tied": 14, "gpt2": 8}.get(kind, len(in_fp8)) > 7
    assert any(".experts." in name for name in in_fp8) == (kind in ("qwen3", "deepseek"))
    assert torch.equal(logits(model), logits(wanted))
    report = model.hf_quantizer.report
    assert {entry.name for entry in report.converted} == {x.removesuffix(".weight") for x in in_fp8}
    assert not model.training
    if kind == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", ["auto", "float32", torch.bfloat16, torch.float16])
def test_dtypes(llama_folder: Path, dtype: Any) -> None:
    model, wanted = loaded(llama_folder, dtype=dtype), by_hand(llama_folder, dtype=dtype)
    assert kinds(model) == kinds(wanted)
    assert torch.equal(logits(model), logits(wanted))


OPTIONS: dict[str, dict[str, Any]] = {
    "recipe": {"recipe": Recipe(scale="power_of_two", wgrad_input="128x128")},
    "skip": {"skip": ["*.q_proj", "model.layers.1"]},
    "sizes": {"auto_filter_small_kn": SmallKN(n=200, k=1, size=1)},
    "head": {"head": "fp8"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_those_of_convert(llama_folder: Path, option: str) -> None:
    model = loaded(llama_folder, choices(**OPTIONS[option]))
    wanted = by_hand(llama_folder, **OPTIONS[option])
    assert kinds(model) == kinds(wanted)
    assert option == "recipe" or kinds(model) != kinds(by_hand(llama_folder))
    for name, x in model.named_parameters():
        if isinstance(x, BlockwiseFP8Weight):
            assert x.recipe == wanted.get_parameter(name).recipe


def test_experts_are_an_option(tmp_path: Path) -> None:
    folder = saved(tmp_path, transformers_moe("qwen3"))
    found = {}
    for experts in (True, False, {"*.experts": ["down_proj"]}):
        model = loaded(folder, choices(experts=experts))
        names = {n.rpartition(".")[2] for n, x in model.named_parameters() if "experts" in n
                 and isinstance(x, BlockwiseFP8Weight)}  # fmt: skip
        found[str(experts)] = names, type(model.model.layers[0].self_attn.q_proj.weight)
    stacks = {"gate_up_proj", "down_proj"}
    assert [names for names, _ in found.values()] == [stacks, set(), stacks]
    assert {kind for _, kind in found.values()} == {BlockwiseFP8Weight}


PLACES: dict[str, dict[str, Any]] = {
    "auto": {"device_map": "auto"},
    "cpu": {"device_map": "cpu"},
    "one entry": {"device_map": {"": "cpu"}},
    "entries": {"device_map": {"model": "cpu", "lm_head": "cpu"}},
    "low memory": {"low_cpu_mem_usage": True},
}


@pytest.mark.parametrize("place", PLACES)
def test_places(llama_folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = loaded(llama_folder, **PLACES[place])
    assert torch.equal(logits(model), logits(by_hand(llama_folder)))


def test_offloading_is_refused(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    some = {"offload_folder": str(tmp_path)}
    for device_map in ({"model": "cpu", "lm_head": "disk"}, {"model": 0, "lm_head": "cpu"}):
        with pytest.raises(NotImplementedError, match=r"device_map puts modules on .*FSDP2"):
            loaded(llama_folder, device_map=device_map, **some)
    with pytest.raises(NotImplementedError, match="'disk'"):
        loaded(llama_folder, device_map="auto", max_memory={"cpu": "600KB"}, **some)
    with torch.device("meta"):
        model = llama()
    with pytest.raises(NotImplementedError, match="weight' is not on a device"):
        BlockwiseFP8Quantizer(choices()).postprocess_model(model)


def test_a_dict_is_a_config(llama_folder: Path) -> None:
    entries = {"quant_method": "blocktensor", "auto_filter_small_kn": False, "skip": ["*.q_proj"]}
    model = loaded(llama_folder, entries)
    assert model.hf_quantizer.quantization_config == choices(skip=["*.q_proj"])
    assert kinds(model) == kinds(by_hand(llama_folder, skip=["*.q_proj"]))


def test_nothing_to_convert_warns(llama_folder: Path) -> None:
    with pytest.warns(UserWarning, match="no weight of this LlamaForCausalLM is in FP8"):
        loaded(llama_folder, BlockwiseFP8Config())


def test_a_bad_pattern_raises(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"vision_tower"):
        loaded(llama_folder, choices(skip=["vision_tower"]))


def test_fused_modules_keep_their_bits(llama_folder: Path) -> None:
    model, wanted = loaded(llama_folder, choices(fuse=True)), loaded(llama_folder)
    assert {entry.name for entry in model.hf_quantizer.fusion.fused} == {
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in ("mlp", "input_layernorm", "post_attention_layernorm")
    }
    assert wanted.hf_quantizer.fusion is None
    assert model.state_dict().keys() == wanted.state_dict().keys()
    assert torch.equal(logits(model), logits(wanted))
    assert len(unfuse(model)) == 6


def test_trainer_may_train_what_is_not_frozen(llama_folder: Path) -> None:
    model = loaded(llama_folder)
    validate_quantization_for_training(model)
    assert model.hf_quantizer.is_trainable and model.hf_quantizer.is_qat_trainable
    frozen = loaded(llama_folder, choices(frozen=True))
    with pytest.raises(ValueError, match="attach trainable adapters"):
        validate_quantization_for_training(frozen)
    frozen._hf_peft_config_loaded = True
    validate_quantization_for_training(frozen)


@pytest.mark.parametrize("frozen", [False, True])
def test_dequantize_gives_the_values(llama_folder: Path, frozen: bool) -> None:
    model = loaded(llama_folder, choices(frozen=frozen))
    plain = AutoModelForCausalLM.from_pretrained(llama_folder)
    wanted = {n: x.dequantize() if frozen and isinstance(x, BlockwiseFP8Tensor) else
              plain.get_parameter(n) for n, x in model.named_parameters()}  # fmt: skip
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    wanted["model.layers.1.mlp.up_proj.weight"] = wanted["model.layers.0.mlp.up_proj.weight"]
    model.dequantize()
    assert layers[1].mlp.up_proj.weight is layers[0].mlp.up_proj.weight
    assert {type(x) for x in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(x, wanted[n]) for n, x in model.named_parameters())
    assert {x.requires_grad for x in model.parameters()} == {not frozen}
    assert getattr(model, "hf_quantizer", None) is None


# The config in a file


def entry_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def test_a_checkpoint_is_marked_if_asked(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(llama_folder).save_pretrained(tmp_path / "plain")
    assert entry_of(tmp_path / "plain") is None
    config = choices(mark=True, skip=["*.q_proj"])
    model = loaded(llama_folder, config)
    assert model.config.quantization_config == config
    model.save_pretrained(tmp_path / "marked")
    assert entry_of(tmp_path / "marked") == config.to_dict()

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "marked")
    assert again.config.quantization_config == again.hf_quantizer.quantization_config == config
    assert kinds(again) == kinds(model)
    assert torch.equal(logits(again), logits(model))
    # what is given counts more than what is stored
    other = loaded(tmp_path / "marked", choices())
    assert kinds(other) == kinds(by_hand(llama_folder))
    # and who has not imported us gets an ordinary model
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "blocktensor")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "marked")
    assert kinds(plain) == kinds(AutoModelForCausalLM.from_pretrained(llama_folder))
    assert AutoConfig.from_pretrained(tmp_path / "marked").quantization_config == config.to_dict()


def test_the_checkpoint_of_another_method_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    for file in llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=re.escape("quantized by 'gptq', which blocktensor does")):
        loaded(tmp_path)
