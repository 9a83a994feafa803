"""The names under which tensors are stored: those of transformers' save_pretrained, and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

from transformers import core_model_loading

from blocktensor import BlockwiseFP8Tensor, convert, iter_fp8, load_fp8, save_fp8
from blocktensor.checkpoint.names import possible_names
from blocktensor.checkpoint.stored import Group, groups_of, stored_as
from tests.support.checkpoint_experts import Tensors, read
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import llama


def names_of(groups: list[Group]) -> set[str]:
    return {stored.name for group in groups for stored in group}


def stored_names(model: nn.Module) -> dict[str, list[str]]:
    """The names under which each tensor is stored, where these are not its own."""
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    found: dict[str, list[str]] = {}
    for group in stored_as(groups_of(model), shapes, ()):
        for stored in group:
            for name in stored.of:
                found.setdefault(name, []).append(stored.name)
    return {name: others for name, others in found.items() if others != [name]}


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek", "gpt_oss", "llama4"])
def test_they_are_those_it_writes(tmp_path: Path, kind: str) -> None:
    model = transformers_moe(kind)
    model.save_pretrained(tmp_path)
    groups = groups_of(model)
    assert names_of(groups) == read(tmp_path).keys()
    model._weight_conversions = []  # what it was loaded from does not matter
    assert groups_of(model) == groups
    assert model._weight_conversions == []


def test_models_inside_of_a_module() -> None:
    holder = nn.Module()
    holder.a, holder.b = nn.Linear(2, 2), transformers_moe("mixtral")
    holder.register_parameter("w1", None)
    holder.w2 = nn.Parameter(torch.ones(2, 2))
    found = stored_names(holder)
    stack = "model.layers.1.mlp.experts.down_proj"
    matrices = [f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight" for e in range(4)]
    assert sorted(found[f"b.{stack}"]) == [f"b.{name}" for name in matrices]
    assert found["b.model.layers.0.mlp.gate.weight"] == [
        "b.model.layers.0.block_sparse_moe.gate.weight"
    ]
    assert not any(name.startswith(("a.", "w2")) for name in found)
    inner = stored_names(holder.b.model)
    assert sorted(inner[stack.removeprefix("model.")]) == [
        name.removeprefix("model.") for name in matrices
    ]


def test_one_expert() -> None:
    model = transformers_moe("qwen3", num_experts=1, num_experts_per_tok=1)
    assert stored_names(model)["model.layers.0.mlp.experts.down_proj"] == [
        "model.layers.0.mlp.experts.0.down_proj.weight"
    ]


STACK, OTHER = (f"model.layers.{i}.mlp.experts.down_proj" for i in range(2))
UP, GATE, NORM = (
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.gate.weight",
    "model.norm.weight",
)
Q, KEY = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")


def test_without_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    assert stored_names(transformers_moe("qwen3")) == {}


def renaming(names: Mapping[str, str]) -> Callable[[Tensors], Tensors]:
    return lambda state: {names.get(name, name): x for name, x in state.items()}


def halves_of_two_stacks(state: Tensors) -> Tensors:
    first, second = state.pop(STACK), state.pop(OTHER)
    return {**state, "a.0.weight": torch.cat([first[:2], second[2:]])}


def matrices(state: Tensors) -> Tensors:
    return state | {f"a.{e}.weight": x for e, x in enumerate(state.pop(STACK))}


def sums(state: Tensors) -> Tensors:
    """Values that no joining and splitting gives."""
    first, second = state.pop(STACK), state.pop(OTHER)
    return {**state, "a": first + second, "b": first - second}


def joined(state: Tensors) -> Tensors:
    return {"qk": torch.cat([state.pop(Q), state.pop(KEY)]), **state}


def inside_blocks(state: Tensors) -> Tensors:
    return {f"q.{i}": x.clone() for i, x in enumerate(state.pop(Q).chunk(2))} | state


def in_lists(state: Tensors) -> Any:
    """Transformers gives tensors that its operations have made so."""
    return {("g" if name == GATE else name): [x] for name, x in state.items()}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda state: {key: x for key, x in state.items() if key != name}


SPLIT = {STACK: [f"a.{e}.weight" for e in range(4)]}
REVERTED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, list[str]]]] = {
    "other names": (renaming({GATE: "g", NORM: "n"}), {GATE: ["g"], NORM: ["n"]}),
    "exchanged names": (renaming({GATE: NORM, NORM: GATE}), {GATE: [NORM], NORM: [GATE]}),
    "matrices": (matrices, SPLIT),
    "matrices, and other names": (
        lambda x: renaming({GATE: "g"})(matrices(x)),
        {**SPLIT, GATE: ["g"]},
    ),
    "one name of two tensors": (renaming({GATE: "x", NORM: "x"}), {NORM: ["x"]}),
    # half of each stack would be lost
    "parts of several stacks": (halves_of_two_stacks, {}),
    "without one": (without(NORM), {}),
    "joined": (joined, {Q: ["qk"], KEY: ["qk"]}),
    "cut inside blocks": (inside_blocks, {Q: ["q.0", "q.1"]}),
    "in lists": (in_lists, {GATE: ["g"]}),
    "computed": (sums, {STACK: ["a", "b"], OTHER: ["a", "b"]}),
}


@pytest.mark.parametrize("case", REVERTED)
def test_other_functions_in_place_of_its_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    revert, wanted = REVERTED[case]
    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda model, state: revert(dict(state))
    )
    found = stored_names(transformers_moe("qwen3"))
    assert {name: sorted(others) for name, others in found.items()} == wanted


def test_a_tensor_of_many_names_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks gather in this order, and sets of names have another order in each process."""
    norms = [
        f"model.layers.{i}.{name}_layernorm.weight"
        for i in range(2)
        for name in ("input", "post_attention")
    ]

    def revert(model: Any, state: Tensors) -> Tensors:
        return {"sum": torch.stack([state.pop(x) for x in (NORM, *norms)]).sum(0), **state}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", revert)
    found = [x for group in groups_of(transformers_moe("qwen3")) for x in group if x.name == "sum"]
    assert [x.of for x in found] == [tuple(sorted((NORM, *norms)))]


def exported(model: nn.Module) -> Tensors:
    """Return the values that ``iter_fp8`` yields; each name comes once."""
    pairs = list(iter_fp8(model))
    found = dict(pairs)
    assert len(found) == len(pairs)
    values = {name: x for name, x in pairs if not name.endswith("_scale_inv")}
    for name in values:
        if (scale := found.get(f"{name}_scale_inv")) is not None:
            form = BlockwiseFP8Tensor.from_data(
                values[name], scale, block_shape=(128, 128), dtype=torch.float32
            )
            values[name] = form.dequantize()
    return values


@pytest.mark.parametrize(
    "skip",
    [(), ("*.experts", "*.q_proj"), ("*.k_proj",)],
    ids=["all in FP8", "experts and queries are not", "keys are not"],
)
@pytest.mark.parametrize("case", REVERTED)
def test_what_is_stored_under_other_names(
    case: str, skip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the values that the function gives, in the order of the model's tensors."""
    revert, others = REVERTED[case]
    model, patched = transformers_moe("qwen3"), "revert_weight_conversion"
    convert(model, skip=skip, skip_small=False)
    monkeypatch.setattr(core_model_loading, patched, lambda model, state: dict(state))
    own = exported(model)
    assert own.keys() == model.state_dict().keys()
    monkeypatch.setattr(core_model_loading, patched, lambda model, state: revert(dict(state)))
    found, wanted = exported(model), revert(dict(own))
    for name, x in found.items():
        y = wanted.get(name, own.get(name))
        assert torch.equal(x, y[0] if isinstance(y, list) else y), name
    first: dict[str, int] = {}
    for place, name in enumerate(own):
        names = others.get(name, [name])
        for stored in names if found.keys() >= {*names} else [name]:
            first.setdefault(stored, place)
    assert list(found) == sorted(found, key=first.__getitem__)


@pytest.mark.parametrize("rows", [128, 192])
def test_stacks_whose_blocks_it_would_cut_stay_whole(rows: int) -> None:
    """All of a module: of 192 rows of gate and of up, the second block has rows of both."""
    model = transformers_moe("qwen3", moe_intermediate_size=rows)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    names = names_of(stored_as(groups_of(model), shapes, {UP, STACK}))
    assert ({UP, STACK} <= names) == (rows == 192)
    assert OTHER not in names


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard", [fully_shard, replicate], ids=["fully_shard", "replicate"])
def test_a_model_whose_root_is_sharded(shard: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    """The root gets a class whose copies would run the model's constructor."""
    model, root = (llama() for _ in range(2))
    for each in (model, root):
        convert(each, skip_small=False)
    shard(root)
    assert possible_names(root) == possible_names(model)
    assert groups_of(root) == groups_of(model)
    for name, each in (("whole", model), ("root", root)):
        save_fp8(each, tmp_path / name)
    whole, written = read(tmp_path / "whole"), read(tmp_path / "root")
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], x) for name, x in whole.items())
    frozen = llama().requires_grad_(False)
    convert(frozen, skip_small=False)
    shard(frozen)
    assert len(load_fp8(frozen, tmp_path / "whole").fp8) > 0
