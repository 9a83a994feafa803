"""peft's adapters in a model: conversions and ``freeze`` leave them as they are."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, freeze
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.conversion.plan import heads_of
from blocktensor.model.adapters import adapters_of, names_without_adapters
from tests.support.models import Model, reasons

WHY = "adapter of peft: stays in high precision"


def adapted() -> PeftModel:
    """Two adapters on each ``up``, one of them with DoRA; one on the embedding."""
    model = get_peft_model(Model(256).bfloat16(), LoraConfig(r=128, target_modules=["up", "embed"]))
    model.add_adapter("other", LoraConfig(r=4, target_modules=["up"], use_dora=True))
    return model


def adapters_in(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def test_modules_of_adapters_are_found() -> None:
    model = adapted()
    names, found = dict(model.named_modules()), adapters_of(model)
    assert {name for name, x in names.items() if x in found} == {x for x in names if ".lora_" in x}
    assert names["base_model.model.blocks.1.up.lora_B.default"] in found


def test_no_module_is_an_adapter_before_peft_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    monkeypatch.delitem(sys.modules, "peft.tuners.tuners_utils")
    assert adapters_of(model) == set()


def test_a_conversion_leaves_adapters_alone_whatever_their_size() -> None:
    model = adapted()
    before = {name: p.clone() for name, p in adapters_in(model).items()}
    report = convert(model, skip_small=False)
    assert isinstance(
        model.get_submodule("base_model.model.blocks.0.down").weight, BlockwiseFP8Tensor
    )
    why = reasons(report)
    assert why["base_model.model.blocks.0.up.lora_A.default"] == WHY
    assert why["base_model.model.embed.lora_embedding_B.default"] == WHY
    for name, p in adapters_in(model).items():
        assert type(p) is nn.Parameter and torch.equal(p, before[name]), name


def test_a_pattern_may_name_adapters_alone() -> None:
    report = convert(adapted(), skip_small=False, skip=["*.lora_*"])
    assert reasons(report)["base_model.model.blocks.0.up.lora_A.default"] == WHY
    assert len(report.converted) == 4


def test_freezing_keeps_adapters_trainable_that_apply_has_converted() -> None:
    """``apply`` gets each layer without its place."""
    model = get_peft_model(Model(256), LoraConfig(r=8, target_modules=["up"])).requires_grad_(True)
    model.apply(apply)
    assert len(adapters_in(model)) == 4
    assert freeze(model) == [
        f"base_model.model.blocks.{i}.{name}"
        for i in range(2)
        for name in ("up.base_layer", "down")
    ] + ["base_model.model.lm_head"]
    for p in adapters_in(model).values():
        assert type(p) is BlockwiseFP8Weight and p.requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["up", "lm_head"]},
        {"target_modules": ["up"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["up", "embed"], "modules_to_save": ["lm_head", "down"]},
    ],
    ids=["adapted", "saved whole", "saved whole, as a layer of a block"],
)
def test_a_head_that_peft_has_wrapped_stays_a_head(options: Any) -> None:
    model = Model(256)
    convert(model, skip_small=False)
    assert not isinstance(model.lm_head.weight, BlockwiseFP8Weight)
    late = get_peft_model(Model(256), LoraConfig(r=8, **options))
    convert(late, skip_small=False)
    early = get_peft_model(model, LoraConfig(r=8, **options))
    kinds = [{n: type(p).__name__ for n, p in x.named_parameters()} for x in (early, late)]
    heads = [{n: kind for n, kind in x.items() if "lm_head" in n} for x in kinds]
    assert heads[0] == heads[1] and set(heads[0].values()) == {"Parameter"}


@pytest.mark.parametrize("saved", ["cls", "decoder"])
def test_copies_of_a_tied_head_are_heads(saved: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=512, **sizes))
    options = {"target_modules": ["query"], "modules_to_save": [saved]}
    model = get_peft_model(model, LoraConfig(r=8, **options))
    convert(model, skip_small=False)
    heads = {n: p for n, p in model.named_parameters() if n.endswith("weight") and "decoder" in n}
    assert any("modules_to_save" in name for name in heads)
    assert not any(isinstance(p, BlockwiseFP8Weight | BlockwiseFP8Tensor) for p in heads.values())


class Nested(nn.Module):
    """A model whose head has layers in containers, one of them of the head's size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.body = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.head = nn.Module()
        self.head.steps = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 512))
        self.after = nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 256))
        self.part = nn.Module()
        self.part.qkv, self.part.output = nn.Linear(256, 768), nn.Linear(256, 384)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["body.0"], "modules_to_save": ["head"]},
        {"target_modules": ["body.0"], "modules_to_save": ["head.steps", "after"]},
        {"target_modules": ["body.0", "head.steps.2", "after.0", "part.qkv"]},
    ],
    ids=["a module with containers", "containers", "entries"],
)
def test_heads_are_the_same_with_and_without_wrappers(options: Any) -> None:
    """A wrapper hides the class of a container, and holds children where a layer has none."""
    plain, model = Nested(), get_peft_model(Nested(), LoraConfig(r=8, **options))
    heads = {name for name, x in plain.named_modules() if x in heads_of(plain)}
    names = names_without_adapters(model)
    prefix = "base_model.model."
    assert {names[x].removeprefix(prefix) for x in heads_of(model)} == heads == {"head.steps.2"}
    convert(model, skip_small=False)


def test_what_a_tuner_holds_besides_the_model_is_left_alone() -> None:
    """X-LoRA's classifier, which it trains, is next to the LoRA model that it holds."""

    class Tuner(BaseTuner):
        def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("it has no layers of its own")

    tuner = Tuner.__new__(Tuner)
    nn.Module.__init__(tuner)
    tuner.lora_model = get_peft_model(Model(256), LoraConfig(target_modules=["up"])).base_model
    tuner.classifier = Model(256)
    convert(tuner, skip_small=False)
    assert not any(isinstance(p, BlockwiseFP8Weight) for p in tuner.classifier.parameters())
    assert all(name.startswith("lora_model.model.") for name in freeze(tuner))
    assert all(p.requires_grad for p in tuner.classifier.parameters())
    assert isinstance(tuner.lora_model.model.blocks[0].down.weight, BlockwiseFP8Tensor)


def test_freezing_keeps_trainable_what_else_peft_trains() -> None:
    """Copies of ``modules_to_save``, and encoders of prompts."""
    model = Model(256)
    convert(model, skip_small=False)
    config = LoraConfig(r=8, target_modules=["up"], modules_to_save=["down"])
    adapted = get_peft_model(model, config)
    copies = [p for name, p in adapted.named_parameters() if ".modules_to_save." in name]
    assert len([p for p in copies if isinstance(p, BlockwiseFP8Weight)]) == 2
    assert not any(".modules_to_save." in name for name in freeze(adapted))
    assert all(p.requires_grad for p in copies)

    held = PeftModel.__new__(PeftModel)
    nn.Module.__init__(held)
    held.base, held.prompt_encoder = nn.Linear(256, 256), nn.ModuleDict({"default": Model(256)})
    convert(held, skip_small=False)
    assert freeze(held) == ["base"]
