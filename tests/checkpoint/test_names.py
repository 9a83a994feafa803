"""The names that transformers' save_pretrained writes, as it itself says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

from transformers import core_model_loading

from blocktensor.checkpoint.names import Names, possible_names, pretrained_names, whole
from tests.support.checkpoint_experts import read
from tests.support.moe_models import transformers_moe

KINDS = ("qwen3", "mixtral", "deepseek", "gpt_oss", "llama4")


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_it_writes(tmp_path: Path, kind: str) -> None:
    model = transformers_moe(kind)
    model.save_pretrained(tmp_path)
    written = set()
    for ways in possible_names(model).values():
        written |= set(ways[0].all)
    assert written == set(read(tmp_path))


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_gate_comes_before_up(kind: str) -> None:
    model = transformers_moe(kind)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    made = core_model_loading.revert_weight_conversion(model, {stack: model.get_parameter(stack)})
    pieces = pretrained_names(model, {stack})[stack]
    for e in range(4):
        rows = torch.cat([made[name] for name in pieces.of_expert(e)])
        assert torch.equal(rows, model.get_parameter(stack)[e])


def test_models_inside_of_a_module() -> None:
    holder = nn.Module()
    holder.a, holder.b = nn.Linear(2, 2), transformers_moe("mixtral")
    stacks = {name for name, x in holder.named_parameters() if x.ndim == 3}
    stack = "b.model.layers.1.mlp.experts.down_proj"
    found = pretrained_names(holder, stacks)
    template = "b.model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    assert found[stack] == Names((template,), 4)
    assert found["b.model.layers.0.mlp.gate.weight"] == whole(
        "b.model.layers.0.block_sparse_moe.gate.weight"
    )
    assert not any(name.startswith("a.") for name in found)
    inner = pretrained_names(holder.b.model, {stack.removeprefix("b.model.")})
    assert inner[stack.removeprefix("b.model.")] == Names((template.removeprefix("b.model."),), 4)


def test_one_expert() -> None:
    """Its number is the last 0 of the name, not that of the layer."""
    model = transformers_moe("qwen3", num_experts=1, num_experts_per_tok=1)
    stack = "model.layers.0.mlp.experts.down_proj"
    template = "model.layers.0.mlp.experts.{}.down_proj.weight"
    assert pretrained_names(model, {stack})[stack] == Names((template,), 1)


def test_what_it_was_loaded_from_does_not_matter() -> None:
    model = transformers_moe("mixtral")
    wanted = possible_names(model)
    model._weight_conversions = []
    assert possible_names(model) == wanted
    assert model._weight_conversions == []


STACK, GATE = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.gate.weight"


def test_without_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    assert pretrained_names(transformers_moe("qwen3"), {STACK}) == {}


def test_operations_that_need_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of stacks do not depend on them; if theirs fails, too, they keep their own."""
    model, revert = transformers_moe("mixtral"), core_model_loading.revert_weight_conversion
    refused = {GATE}

    def fail(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Any]:
        if refused & state.keys():
            raise RuntimeError("shape '[2, 64]' is invalid for input of size 1")
        made: dict[str, Any] = revert(model, dict(state))
        return made

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", fail)
    found = pretrained_names(model, {STACK})
    assert found.keys() == {STACK}
    refused.add(STACK)
    assert pretrained_names(model, {STACK}) == {}


def renaming(names: Mapping[str, str]) -> Callable[..., dict[str, Tensor]]:
    """A function in place of transformers', which renames some tensors."""

    def revert(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {names.get(name, name): x for name, x in state.items()}

    return revert


NORM = "model.norm.weight"


def test_names_with_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the norm's name would hold the norm or the gate: all keep their own."""
    model = transformers_moe("mixtral")
    names = {GATE: "gate", NORM: "norm"}
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", renaming(names))
    assert pretrained_names(model, {STACK}) == {name: whole(other) for name, other in names.items()}
    names[GATE] = NORM
    assert pretrained_names(model, {STACK}) == {}


def test_one_name_of_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {GATE: "x", NORM: "x"}
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", renaming(names))
    assert pretrained_names(transformers_moe("mixtral"), {STACK}) == {NORM: whole("x")}


def test_stacks_that_are_cut_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of all experts, as of a model whose experts are of two kinds."""

    def revert(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = dict(state)
        first, second = made.pop(STACK).chunk(2)
        return {**made, "a.0.weight": first, "a.1.weight": second}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", revert)
    assert pretrained_names(transformers_moe("mixtral"), {STACK}) == {}


def test_matrices_of_several_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an expert of one and half an expert of another are no expert of either."""
    other = "model.layers.1.mlp.experts.down_proj"

    def revert(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = dict(state)
        first, second = made.pop(STACK), made.pop(other)
        return {**made, "a.0.weight": torch.cat([first[:, :1], second[:, 1:]])}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", revert)
    model = transformers_moe("qwen3", num_experts=1, num_experts_per_tok=1)
    assert pretrained_names(model, {STACK, other}) == {}
