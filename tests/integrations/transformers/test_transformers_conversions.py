"""FP8 checkpoints that somebody else has written, and weights that transformers converts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import core_model_loading

from blocktensor import BlockwiseFP8Tensor, CheckpointError, convert, load_fp8, save_fp8
from tests.support.checkpoint_experts import read, rewrite
from tests.support.pretrained import TOKENS, choices, fp8_names, llama, loaded, values


def frozen_in_fp8(folder: Path) -> dict[str, Tensor]:
    """The values of a Llama that is in FP8 in a folder."""
    model = llama().bfloat16().requires_grad_(False)
    convert(model, skip_small=False)
    config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    save_fp8(model, folder, config={**config, "dtype": "bfloat16"})
    return values(model)


# Conversions by transformers


def with_rule(monkeypatch: pytest.MonkeyPatch, operation: Any) -> None:
    """Make transformers compute the weights of q of Llama as it loads and saves them."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    name = "self_attn.q_proj.weight"
    theirs = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: (
            [WeightConverter(name, name, [operation])] if kind == "llama" else theirs(kind)
        ),
    )


def test_weights_that_transformers_transposes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = frozen_in_fp8(tmp_path)
    with_rule(monkeypatch, core_model_loading.Transpose())
    found = loaded(tmp_path, choices(frozen=True), dtype="auto")
    assert len(fp8_names(found)) == 14
    for name, x in values(found).items():
        assert torch.equal(x, wanted[name].t() if "q_proj" in name else wanted[name]), name


def test_weights_that_transformers_computes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one block that lie in several blocks."""
    frozen_in_fp8(tmp_path)
    with_rule(monkeypatch, core_model_loading.Interleave())
    message = r"q_proj.weight' is in FP8, and transformers would compute .* from it otherwise than"
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path, dtype="auto")
    with pytest.raises(CheckpointError, match=message):
        load_fp8(llama(), tmp_path)


class Doubled(core_model_loading.ConversionOps):
    """Writes to the tensor that it gets."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        (x,) = input_dict.values()
        return {target_patterns[0]: (x[0] if isinstance(x, list) else x).mul_(2)}

    @property
    def reverse_op(self) -> Doubled:
        return self


@pytest.mark.parametrize("high_precision", [False, True])
def test_conversions_that_cannot_be_traced_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, high_precision: bool
) -> None:
    """The name of the tensor alone would give values that are not converted."""
    if high_precision:
        llama().bfloat16().save_pretrained(tmp_path)
    else:
        frozen_in_fp8(tmp_path)
    with_rule(monkeypatch, Doubled())
    with pytest.raises(CheckpointError, match=r"q_proj.weight' cannot be loaded from .* writes to"):
        load_fp8(llama(), tmp_path)
    if not high_precision:
        with pytest.raises(CheckpointError, match=r"q_proj.weight"):
            loaded(tmp_path, dtype="auto")
        model = llama().requires_grad_(False)
        convert(model, skip_small=False)
        with pytest.raises(ValueError, match=r"q_proj.weight .* all_in_fp8=True stores the model"):
            save_fp8(model, tmp_path / "other")


def test_conversions_of_a_model_inside_of_another_that_cannot_be_traced_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def under_lm(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"lm.{name}"] = tensors.pop(name)

    frozen_in_fp8(tmp_path)
    rewrite(tmp_path, under_lm)
    with_rule(monkeypatch, Doubled())
    message = r"lm\.model.*q_proj.weight' cannot be loaded from .* writes to"
    with pytest.raises(CheckpointError, match=message):
        load_fp8(nn.ModuleDict({"lm": llama()}), tmp_path, strict=False)


# Files of other libraries


def as_compressed(folder: Path, format: str = "float-quantized") -> None:
    """Rewrite a folder as compressed-tensors would write it, with 128x128 blocks."""
    tensors = {name.replace("_scale_inv", "_scale"): x for name, x in read(folder).items()}
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    wanted = frozen_in_fp8(tmp_path)
    as_compressed(tmp_path)
    model, info = loaded(tmp_path, choices(frozen=True), dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    found = values(model)
    assert len(fp8_names(model)) == 14
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    as_compressed(tmp_path, format="pack-quantized")
    with pytest.raises(ValueError, match="by 'compressed-tensors', 'pack-quantized', which block"):
        loaded(tmp_path, choices(frozen=True), dtype="auto")


def test_a_stack_that_experts_names_and_nobody_has(llama_folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"stacks pattern '\*.moe' matches no module of this Llama"
    ):
        loaded(llama_folder, choices(experts={"*.moe": ["w_up"]}))
    with pytest.raises(ValueError, match=r"stacks names 'w_up' of 'model.layers.0.mlp', which has"):
        loaded(llama_folder, choices(experts={"model.layers.0.mlp": ["w_up"]}))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_in_fp8_is_dequantized(tied: bool, frozen: bool, tmp_path: Path) -> None:
    """It has no matmul that could read FP8, nor has a head that shares its weight."""
    model = llama(tied=tied).bfloat16().requires_grad_(False)
    convert(model, skip_small=False)
    config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    save_fp8(model, tmp_path, config={**config, "dtype": "bfloat16"})
    name = "model.embed_tokens.weight"
    embedding = BlockwiseFP8Tensor.from_values(model.get_parameter(name), (128, 128))
    stored = {name: embedding.rowwise().data, f"{name}_scale_inv": embedding.rowwise().scale}
    rewrite(tmp_path, lambda tensors: tensors.update(stored))
    found = loaded(tmp_path, choices(frozen=frozen), dtype="auto")
    assert torch.equal(found.get_parameter(name), embedding.dequantize())
    assert (found.lm_head.weight is found.get_parameter(name)) == tied
    assert len(fp8_names(found)) == 14
    assert found(TOKENS).logits.isfinite().all()
