"""``from_pretrained`` with our config, and both ways to save: what is converted, for whom."""

from __future__ import annotations

import json
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, CompileConfig, LlamaForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.trainer_utils import validate_quantization_for_training

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, MinSizes, Recipe, convert, unfuse
from blocktensor.integrations.transformers import BlockwiseFP8Quantizer, save_pretrained_fp8
from blocktensor.integrations.transformers import quantizer as quantizer_module
from tests.support.checkpoint_models import assert_same, bits, state
from tests.support.compiling import fresh, graphs
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import (
    MODELS,
    UNREADABLE,
    choices,
    fp8_names,
    llama,
    loaded,
    logits,
    saved,
    values,
)


def by_hand(folder: Path, frozen: bool = False, dtype: Any = None, **options: Any) -> Any:
    """The same checkpoint, converted after ``from_pretrained``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.requires_grad_(not frozen)
    convert(model, **{"skip_small": False, **options})
    return model


def kinds(model: nn.Module) -> dict[str, tuple[type, torch.dtype, bool]]:
    return {n: (type(x), x.dtype, x.requires_grad) for n, x in model.named_parameters()}


frozen_or_not = pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])


@frozen_or_not
@pytest.mark.parametrize("kind", MODELS)
def test_it_converts_as_convert_does(kind: str, frozen: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, MODELS[kind]())
    model, wanted = loaded(folder, choices(frozen=frozen)), by_hand(folder, frozen)
    assert kinds(model) == kinds(wanted)
    fp8 = BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight
    in_fp8 = fp8_names(model)
    assert {type(model.get_parameter(name)) for name in in_fp8} == {fp8}
    assert len(in_fp8) == {"llama": 14, "tied": 14, "gpt2": 8}.get(kind, len(in_fp8)) > 7
    assert any(".experts." in name for name in in_fp8) == (kind in ("qwen3", "deepseek"))
    assert torch.equal(logits(model), logits(wanted))
    report = model.hf_quantizer.report
    assert {entry.name for entry in report.converted} == {x.removesuffix(".weight") for x in in_fp8}
    assert not model.training
    if kind == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


# name: options of convert, and of from_pretrained
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {"dtype": "auto"}),
    "fp32": ({}, {"dtype": "float32"}),
    "bf16": ({}, {"dtype": torch.bfloat16}),
    "fp16": ({}, {"dtype": torch.float16}),
    "recipe": ({"recipe": Recipe(scale="power_of_two", wgrad_input="1x128")}, {}),
    "skip": ({"skip": ["*.q_proj", "model.layers.1"]}, {}),
    "sizes": ({"skip_small": MinSizes(n=200, k=1, size=1)}, {}),
    "head": ({"convert_head": True}, {}),
    "some device": ({}, {"device_map": "auto"}),
    "cpu": ({}, {"device_map": "cpu"}),
    "one entry": ({}, {"device_map": {"": "cpu"}}),
    "entries": ({}, {"device_map": {"model": "cpu", "lm_head": "cpu"}}),
    "low memory": ({}, {"low_cpu_mem_usage": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_options_are_those_of_convert_and_from_pretrained(
    llama_folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options, others = WAYS[way]
    model = loaded(llama_folder, choices(**options), **others)
    wanted = by_hand(llama_folder, dtype=others.get("dtype"), **options)
    assert kinds(model) == kinds(wanted)
    assert torch.equal(logits(model), logits(wanted))
    counts = way in ("bf16", "fp16", "skip", "sizes", "head")
    assert (kinds(model) != kinds(by_hand(llama_folder))) == counts
    for name, x in model.named_parameters():
        if isinstance(x, BlockwiseFP8Weight):
            assert x.recipe == wanted.get_parameter(name).recipe


def test_experts_are_an_option(tmp_path: Path) -> None:
    folder = saved(tmp_path, transformers_moe("qwen3"))
    stacks = {"gate_up_proj", "down_proj"}
    for experts, wanted in ((True, stacks), (False, set()), ({"*.experts": ["down_proj"]}, stacks)):
        model = loaded(folder, choices(experts=experts))
        assert {name.rpartition(".")[2] for name in fp8_names(model) if "experts" in name} == wanted
        assert type(model.model.layers[0].self_attn.q_proj.weight) is BlockwiseFP8Weight


class WithStacks(LlamaForCausalLM):
    """A Llama with a stack of matrices whose name says nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.moe = nn.Module()
        self.moe.w_up = nn.Parameter(torch.zeros(2, 256, 128))


def test_stacks_that_the_config_names(tmp_path: Path) -> None:
    WithStacks(llama().config).save_pretrained(tmp_path)
    for names, wanted in (({"moe": ["w_up"]}, True), (False, False)):
        model = WithStacks.from_pretrained(tmp_path, quantization_config=choices(experts=names))
        assert isinstance(model.moe.w_up, BlockwiseFP8Weight) == wanted
        assert "model.layers.0.mlp.up_proj.weight" in fp8_names(model)


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
    with monkeypatch.context() as patch:
        patch.setattr(quantizer_module, "is_deepspeed_zero3_enabled", lambda: True)
        with pytest.raises(NotImplementedError, match="ZeRO-3 keeps no whole weights"):
            loaded(llama_folder)
    quantizer = BlockwiseFP8Quantizer(choices())
    with torch.device("meta"), pytest.raises(NotImplementedError, match="not on a device"):
        quantizer.postprocess_model(llama())


def test_a_dict_is_a_config(llama_folder: Path) -> None:
    entries = {"quant_method": "blocktensor", "skip_small": False, "skip": ["*.q_proj"]}
    model = loaded(llama_folder, entries)
    assert model.hf_quantizer.quantization_config == choices(skip=["*.q_proj"])
    assert kinds(model) == kinds(by_hand(llama_folder, skip=["*.q_proj"]))


def test_fused_modules_keep_their_bits(llama_folder: Path) -> None:
    model, wanted = loaded(llama_folder, choices(fuse=True)), loaded(llama_folder)
    fused = {entry.name for entry in model.hf_quantizer.fusion.fused}
    names = "mlp", "input_layernorm", "post_attention_layernorm"
    assert fused == {f"model.layers.{i}.{name}" for i in range(2) for name in names}
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


def test_generate_compiles_it(llama_folder: Path) -> None:
    model = loaded(llama_folder, choices(frozen=True))
    compiles = CompileConfig(backend="aot_eager", mode=None)
    compiles._compile_all_devices = True
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    with fresh():
        made = [
            model.generate(torch.arange(5)[None], compile_config=config, **options)
            for config in (None, compiles)
        ]
        assert graphs() == 1
    assert torch.equal(*made)


@frozen_or_not
def test_dequantize_gives_the_values(llama_folder: Path, frozen: bool) -> None:
    model = loaded(llama_folder, choices(frozen=frozen))
    wanted = values(model)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    wanted["model.layers.1.mlp.up_proj.weight"] = wanted["model.layers.0.mlp.up_proj.weight"]
    model.dequantize()
    assert layers[1].mlp.up_proj.weight is layers[0].mlp.up_proj.weight
    assert {type(x) for x in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(x, wanted[n]) for n, x in model.named_parameters())
    assert {x.requires_grad for x in model.parameters()} == {not frozen}
    assert getattr(model, "hf_quantizer", None) is None


def test_the_checkpoint_of_another_method_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=re.escape("quantized by 'gptq', which blocktensor does")):
        loaded(tmp_path)


# Saving


@frozen_or_not
@pytest.mark.parametrize("kind", MODELS)
def test_both_ways_to_save(kind: str, frozen: bool, tmp_path: Path) -> None:
    def config_of(name: str) -> Any:
        return json.loads((tmp_path / name / "config.json").read_text())

    config = choices(frozen=frozen)
    model = loaded(saved(tmp_path / "source", MODELS[kind]()), config)
    # an ordinary checkpoint is that of a model that never was in FP8
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    wanted = {**model.state_dict(), **values(model)}
    assert_same(state(plain), {f"{name} 0": bits(x) for name, x in wanted.items()})
    names = [load_file(tmp_path / x / "model.safetensors").keys() for x in ("source", "saved")]
    assert names[0] == names[1]
    assert config_of("saved") == config_of("source")
    assert torch.equal(logits(loaded(tmp_path / "saved", config)), logits(model))

    options: Any = {"all_in_fp8": kind in UNREADABLE}
    folder = save_pretrained_fp8(model, tmp_path / "fp8", max_shard_bytes=1 << 17, **options)
    assert len(list(folder.glob("*.safetensors"))) > 1
    entries = config_of("fp8")
    assert entries.pop("quantization_config")["quant_method"] == "fp8"
    assert entries == config_of("source")
    assert (folder / "generation_config.json").exists()
    assert torch.equal(logits(loaded(folder, choices(frozen=True))), logits(model))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_pretrained_fp8(model, folder, **options)
    save_pretrained_fp8(model, folder, overwrite=True, config={"a": 1}, **options)
    assert config_of("fp8").keys() == {"a", "quantization_config"}


def test_a_state_that_is_given_is_saved(llama_folder: Path, tmp_path: Path) -> None:
    """Transformers drops it for a quantized model; Trainer gathers it so under FSDP."""
    for frozen in (False, True):
        model = loaded(llama_folder, choices(frozen=frozen))
        given = dict(model.state_dict())
        given["model.norm.weight"] = torch.full_like(given["model.norm.weight"], 7)
        for kind in (dict, OrderedDict, MappingProxyType):
            model.save_pretrained(tmp_path / kind.__name__, state_dict=kind(given))
            stored = load_file(tmp_path / kind.__name__ / "model.safetensors")
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


def test_transformers_reads_it_as_its_fp8(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    save_pretrained_fp8(loaded(llama_folder), tmp_path / "fp8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", device_map="cpu")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"


def test_models_that_were_not_loaded(tmp_path: Path) -> None:
    """One in FP8 names its class; others are refused."""
    module: Any = nn.Linear(128, 128)
    with pytest.raises(TypeError, match=r"expected a transformers\.PreTrainedModel"):
        save_pretrained_fp8(module, tmp_path)
    model = llama().bfloat16()
    with pytest.raises(ValueError, match="no FP8 weight"):
        save_pretrained_fp8(model, tmp_path)
    convert(model, skip_small=False)
    for each in (model, model.model):  # the latter cannot generate
        folder = save_pretrained_fp8(each, tmp_path / type(each).__name__)
        config = json.loads((folder / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == ([folder.name], "bfloat16")
        assert (folder / "generation_config.json").exists() == (each is model)
