"""Checkpoints in FP8 by ``from_pretrained`` with our config: what is in FP8 the files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    load_fp8,
    save_fp8,
    unfreeze,
)
from blocktensor.integrations.transformers import BlockwiseFP8Quantizer
from blocktensor.integrations.transformers.loading import FP8Checkpoint
from tests.support.checkpoint_experts import read
from tests.support.checkpoint_models import assert_same, state
from tests.support.pretrained import MODELS, choices, fp8_names, llama, loaded, logits, values


def built(kind: str, folder: Path) -> Any:
    """In bf16 but for what transformers keeps in fp32."""
    MODELS[kind]().bfloat16().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def written(folder: Path, kind: str = "llama", recipe: Recipe | None = None, **options: Any) -> Any:
    """A model whose checkpoint is in the folder, in FP8."""
    model = built(kind, folder.parent / "plain")
    convert(model, recipe or Recipe(), skip_small=False)
    save_fp8(model, folder, **options)
    return model


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("kind", MODELS)
def test_its_bytes_are_the_weights(kind: str, frozen: bool, tmp_path: Path) -> None:
    source = written(tmp_path / "fp8", kind)
    model, info = loaded(
        tmp_path / "fp8", choices(frozen=frozen), dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    wanted = built(kind, tmp_path / "wanted")
    report = load_fp8(wanted, tmp_path / "fp8")
    if not frozen:
        unfreeze(wanted)
    assert_same(state(model), state(wanted))
    found = fp8_names(model)
    assert found == set(report.fp8) and len(found) > 7
    fp8 = BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight
    assert {type(model.get_parameter(name)) for name in found} == {fp8}
    assert {x.requires_grad for x in model.parameters()} == {not frozen}
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    if frozen:
        assert torch.equal(logits(model), logits(source))
    if kind == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("format", ["deepseek", "compressed-tensors"])
def test_spellings_and_recipes(format: str, tmp_path: Path) -> None:
    recipe = Recipe(scale="power_of_two")
    source = written(tmp_path / "fp8", recipe=recipe, format=format)
    config = choices(frozen=True, recipe=recipe)
    model = loaded(tmp_path / "fp8", config, dtype="auto")
    assert model.model.layers[0].mlp.up_proj.weight.recipe == recipe
    assert torch.equal(logits(model), logits(source))
    assert config == choices(frozen=True, recipe=recipe)


def test_what_the_file_holds_in_high_precision_stays_so(tmp_path: Path) -> None:
    source = llama().bfloat16()
    convert(source, skip=["*.q_proj"], skip_small=False)
    save_fp8(source, tmp_path)
    found = []
    for options in ({}, {"skip": ["*.k_proj"]}, {"convert_head": True}):
        model = loaded(tmp_path, choices(**options), dtype="auto")
        found.append({name.split(".")[-2] for name in fp8_names(model)})
        with torch.no_grad():
            k = model.model.layers[0].self_attn.k_proj.weight
            wanted = source.model.layers[0].self_attn.k_proj.weight.master
            assert (k - wanted).abs().max() < 0.05 * wanted.abs().max()
    names = {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert found == [names, names - {"k_proj"}, names | {"lm_head"}]


def test_loading_takes_a_byte_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 weights never are in high precision while a frozen model loads."""
    folder = tmp_path / "fp8"
    written(folder)
    made: list[Any] = []
    load = FP8Checkpoint.load

    def watched(self: Any, model: nn.Module, *args: Any) -> None:
        made.append({name: x.is_meta for name, x in model.named_parameters()})
        load(self, model, *args)

    monkeypatch.setattr(FP8Checkpoint, "load", watched)
    model = loaded(folder, choices(frozen=True), dtype="auto")
    fp8 = fp8_names(model)
    assert {name for name, is_meta in made[0].items() if is_meta} == fp8 and len(fp8) == 14


# What transformers itself has written


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """It keeps FP8 layers on a CPU if it does not look for a GPU."""
    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None
    )
    return monkeypatch


@pytest.mark.parametrize("kind", ["deepseek", "llama"])
def test_a_checkpoint_of_transformers(
    kind: str, tmp_path: Path, keeping: pytest.MonkeyPatch
) -> None:
    """Dequantized values and their logits to the bit; in FP8 as those cast again, to fp32 order."""
    MODELS[kind]().save_pretrained(tmp_path / "plain")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=FineGrainedFP8Config(), device_map="cpu"
    ).save_pretrained(tmp_path / "fp8")
    keeping.undo()
    keeping.setattr(torch.cuda, "is_available", lambda: False)
    ours = loaded(tmp_path / "fp8", choices(frozen=True), dtype=torch.float32)
    stored = read(tmp_path / "fp8")
    fp8 = {n: x for n, x in ours.named_parameters() if isinstance(x, BlockwiseFP8Tensor)}
    assert any(".experts." in name for name in fp8) == (kind == "deepseek")
    for name, x in fp8.items():
        if name in stored:
            assert torch.equal(x.rowwise().data.view(torch.uint8), stored[name].view(torch.uint8))
            scale = stored[f"{name}_scale_inv"].float().view(x.rowwise().scale.shape)
            assert torch.equal(x.rowwise().scale, scale)
    in_fp8 = logits(ours)
    again = MODELS[kind]()
    again.load_state_dict({**ours.state_dict(), **values(ours)})
    again.eval()
    plain = logits(again)
    convert(again.requires_grad_(False), filter=lambda module, name: any(
        n.startswith(name) for n in fp8), skip_small=False)  # fmt: skip
    assert sum(isinstance(x, BlockwiseFP8Tensor) for x in again.parameters()) == len(fp8)
    torch.testing.assert_close(logits(again), in_fp8, rtol=2e-4, atol=2e-5)
    ours.dequantize()
    assert torch.equal(logits(ours), plain)
    error = (in_fp8 - plain).norm() / plain.norm()
    assert 1e-3 < error < 0.2  # of FP8
    if kind == "llama":  # 5.23 cannot dequantize its own experts
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
        torch.testing.assert_close(logits(theirs), plain, rtol=2e-2, atol=1e-2)


# What does not fit


def test_a_layer_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    """As DeepSeek-V3's prediction of further tokens."""
    folder = tmp_path / "fp8"
    written(folder)
    model, info = loaded(folder, num_hidden_layers=1, output_loading_info=True, dtype="auto")
    assert info["unexpected_keys"] and not info["missing_keys"]
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, BlockwiseFP8Weight)


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    written(folder)
    entries = json.loads((folder / "config.json").read_text())
    entries["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(NotImplementedError, match=r"blocks of \[64, 64\]"):
        loaded(folder)


def test_several_devices_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    written(folder)
    quantizer = BlockwiseFP8Quantizer(choices())
    (file,) = folder.glob("*.safetensors")
    quantizer.preprocess_model(model := llama(), checkpoint_files=[str(file)])
    with pytest.raises(NotImplementedError, match="expected one device"):
        quantizer.before_loading(model, load_file(file), (), {"model": 0, "lm_head": 1})
