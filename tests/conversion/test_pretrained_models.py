"""Models of transformers that hold FP8 weights: what their own methods do then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    convert,
    load_fp8,
    save_fp8,
    to_blockwise_fp8_weights,
)
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import TOKENS, VOCABULARY, llama, saved, values
from tests.support.pretrained import silent as silent

# save_pretrained


def test_trainer_saves_and_resumes_a_frozen_body(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "source", llama().bfloat16()), tmp_path / "out"
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    ways = []
    for resume in (None, str(out / "checkpoint-2")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        convert(model, skip_small=False)
        arguments = TrainingArguments(
            str(out),
            max_steps=3,
            save_steps=1,
            report_to=[],
            use_cpu=True,
            per_device_train_batch_size=2,
            disable_tqdm=True,
            logging_steps=10,
        )
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        assert sum(isinstance(x, BlockwiseFP8Tensor) for x in model.parameters()) == 14
        ways.append(values(model))
    assert all(torch.equal(ways[0][name], ways[1][name]) for name in ways[0])
    plain = AutoModelForCausalLM.from_pretrained(out / "checkpoint-3", dtype="auto")
    assert all(torch.equal(x, ways[0][name]) for name, x in plain.named_parameters())


def test_what_load_fp8_froze_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama().bfloat16()
    convert(source, skip_small=False)
    save_fp8(source, tmp_path / "fp8")
    theirs = PreTrainedModel.save_pretrained.__wrapped__  # as in a process that converts nothing
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", theirs)
    model = llama(seed=1).bfloat16()
    load_fp8(model, tmp_path / "fp8")
    model.save_pretrained(tmp_path / "plain")
    given = {name: x for name, x in model.state_dict().items() if "norm" not in name}
    model.save_pretrained(tmp_path / "part", True, given)
    wanted = values(model)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert all(torch.equal(x, wanted[name]) for name, x in plain.named_parameters())
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, BlockwiseFP8Tensor)
    part = load_file(tmp_path / "part" / "model.safetensors")
    assert part.keys() == given.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in part.items())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_that_transformers_dequantized_is_saved_in_high_precision(
    tmp_path: Path, frozen: bool
) -> None:
    """By itself transformers would write FP8 and scales, and a config that does not say so."""
    source = transformers_moe("qwen3").bfloat16()
    source.save_pretrained(tmp_path / "plain")
    convert(source, skip_small=False)
    save_fp8(source, tmp_path / "fp8", all_in_fp8=True)
    how = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype="auto", quantization_config=how
    )
    convert(model.requires_grad_(not frozen), skip_small=False)
    rules = vars(model).get("_weight_conversions")  # transformers 5.24 drops them here
    model.save_pretrained(tmp_path / "again")
    assert vars(model).get("_weight_conversions") is rules
    written, plain = (load_file(tmp_path / x / "model.safetensors") for x in ("again", "plain"))
    assert {name: (x.dtype, x.shape) for name, x in written.items()} == {
        name: (x.dtype, x.shape) for name, x in plain.items()
    }
    wanted = values(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert all(torch.equal(x, wanted[name]) for name, x in loaded.named_parameters())


# get_memory_footprint


def test_a_frozen_weight_takes_a_byte_and_a_trainable_one_what_its_master_does() -> None:
    models = [llama().bfloat16() for _ in range(2)]
    before = models[0].get_memory_footprint()
    models[0].requires_grad_(False)
    for model in models:
        convert(model, skip_small=False)
    in_fp8 = [x for x in models[0].parameters() if isinstance(x, BlockwiseFP8Tensor)]
    assert len(in_fp8) == 14
    assert before - models[0].get_memory_footprint() == sum(x.numel() for x in in_fp8)
    assert {x.element_size() for x in in_fp8} == {1}
    assert models[1].get_memory_footprint() == before


# resize_token_embeddings


@pytest.mark.parametrize("kind", ["trainable", "frozen", "tied"])
def test_a_head_in_fp8_is_not_resized(kind: str) -> None:
    model = llama(tied=kind == "tied").requires_grad_(kind != "frozen")
    if kind == "tied":
        model.apply(to_blockwise_fp8_weights)
    else:
        convert(model, convert_head=True, skip_small=False)
    weight, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    assert type(weight) is (BlockwiseFP8Tensor if kind == "frozen" else BlockwiseFP8Weight)
    for given in ((VOCABULARY + 8,), (VOCABULARY - 24,), (None, 64)):
        with pytest.raises(NotImplementedError, match="Resize before the conversion"):
            model.resize_token_embeddings(*given)
    model.resize_token_embeddings(VOCABULARY)
    assert model.lm_head.weight is weight
    assert model.get_input_embeddings().weight is embedding
    assert model.config.vocab_size == VOCABULARY


def test_a_plain_head_is_resized() -> None:
    model = llama()
    convert(model, skip_small=False)
    model.resize_token_embeddings(VOCABULARY + 8)
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert model(TOKENS).logits.shape[-1] == VOCABULARY + 8
