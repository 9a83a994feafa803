"""FP8 weights that transformers renames as it loads them, or that no config.json tells of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from blocktensor import CheckpointError, convert, save_fp8
from tests.support.checkpoint_experts import read
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, fp8_names, llama, loaded, values
from tests.support.vision_models import qwen


def written(model: Any, folder: Path) -> dict[str, Tensor]:
    """The values in a folder in which the model is in FP8, by the model's names."""
    model = model.bfloat16().requires_grad_(False)
    convert(model, skip_small=False)
    config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    save_fp8(model, folder, config={**config, "dtype": "bfloat16"})
    return values(model)


def forget(folder: Path) -> None:
    """Take the word of FP8 out of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def to_text(name: str) -> str:
    return name.replace("model.language_model.", "model.")


def swapped(name: str) -> str:
    for old, new in (("gate_proj", "@"), ("up_proj", "gate_proj"), ("@", "up_proj")):
        name = name.replace(old, new)
    return name


SWAP = {"gate_proj": "upproj", "up_proj": "gate_proj", "upproj": "up_proj"}
"""Renames gate to up and up to gate, of the same shape."""

CASES: dict[str, tuple[Callable[[], Any], str, Callable[[str], str], dict[str, Any]]] = {
    "text model": (lambda: qwen("Qwen3_5"), "Qwen3_5ForCausalLM", to_text, {}),
    "experts": (lambda: qwen("Qwen3_5Moe"), "Qwen3_5MoeForCausalLM", to_text, {}),
    "body": (llama, "LlamaModel", lambda name: name.removeprefix("model."), {}),
    "whole": (lambda: llama().model, "LlamaForCausalLM", "model.{}".format, {}),
    "body of experts": (
        lambda: transformers_moe("mixtral"),
        "MixtralModel",
        lambda name: name.removeprefix("model."),
        {},
    ),
    "user's names": (llama, "LlamaForCausalLM", swapped, {"key_mapping": SWAP}),
}


@pytest.mark.parametrize("with_config", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize("case", CASES)
def test_renamed_weights_have_the_values_of_the_files(
    case: str, with_config: bool, tmp_path: Path
) -> None:
    make, kind, renamed, options = CASES[case]
    source = make()
    wanted = {renamed(name): x for name, x in written(source, tmp_path).items()}
    in_fp8 = {renamed(name) for name in fp8_names(source)}
    if not with_config:
        forget(tmp_path)
    model = getattr(transformers, kind).from_pretrained(
        tmp_path, dtype="auto", quantization_config=choices(frozen=True), **options
    )
    found = values(model)
    shared = found.keys() & wanted.keys()
    assert found.keys() - shared <= {"lm_head.weight"} and len(shared) > 10
    for name in shared:
        assert torch.equal(found[name], wanted[name].to(found[name].dtype)), name
    assert fp8_names(model) == in_fp8 & shared and len(in_fp8) > 7


# What is in FP8 the tensors say, and nothing else


def rewritten(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file without an index, and no word of FP8 in the config."""
    for file in folder.glob("model*"):
        file.unlink()
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    forget(folder)


def test_one_file_and_no_config(tmp_path: Path) -> None:
    wanted = written(llama(), tmp_path)
    rewritten(tmp_path, read(tmp_path))
    for options in ({}, {"disable_mmap": True}):
        found = values(loaded(tmp_path, choices(frozen=True), dtype="auto", **options))
        assert all(torch.equal(found[name], wanted[name]) for name in found)


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_values_without_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    written(llama(), tmp_path)
    tensors = read(tmp_path)
    tensors[UP] = tensors[UP].view(dtype)
    if dtype == torch.float8_e4m3fn:
        del tensors[f"{UP}_scale_inv"]
    rewritten(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"up_proj.weight' is .*(without its|has 0) scales"):
        loaded(tmp_path, choices(frozen=True), dtype="auto")


def test_files_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    written(llama(), tmp_path)
    tensors = read(tmp_path)
    with pytest.raises(CheckpointError, match=r"state_dict: .* read from safetensors files only"):
        transformers.LlamaForCausalLM.from_pretrained(
            None, config=llama().config, state_dict=tensors, quantization_config=choices()
        )
    rewritten(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.bin: .* read from safetensors files only"):
        loaded(tmp_path, dtype="auto")


def test_a_variant_beside_other_weights_is_refused(tmp_path: Path) -> None:
    """Its files are not those that the folder's index names."""
    written(llama(), tmp_path)
    rewritten(tmp_path, read(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp8.safetensors")
    llama(seed=1).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="keep this variant in a folder of its own"):
        loaded(tmp_path, variant="fp8", dtype="auto")
    folder = tmp_path / "own"
    folder.mkdir()
    (tmp_path / "model.fp8.safetensors").rename(folder / "model.safetensors")
    (tmp_path / "config.json").rename(folder / "config.json")
    assert fp8_names(loaded(folder, choices(frozen=True), dtype="auto"))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    written(llama(), tmp_path)
    tensors = read(tmp_path)
    tensors |= {name.removeprefix("model."): x.clone() for name, x in tensors.items() if UP in name}
    rewritten(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="would both be loaded into"):
        loaded(tmp_path, dtype="auto")


def test_weights_that_transformers_computes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in another order are other values."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    written(llama(), tmp_path)
    rule = WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [Transpose()])
    theirs = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: [rule] if kind == "llama" else theirs(kind),
    )
    with pytest.raises(CheckpointError, match=r"q_proj.weight' is F8_E4M3 and would be loaded"):
        loaded(tmp_path, dtype="auto")
