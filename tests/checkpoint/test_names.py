"""The names that transformers' save_pretrained writes, as it itself says, and other names.

``CHECKPOINT_NAMES_FUZZ`` is the number of random histories; ``CHECKPOINT_FUZZ_SEED`` the first
seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

import transformers
from safetensors.torch import save_file
from transformers import core_model_loading

from blocktensor import BlockwiseFP8Tensor, CheckpointError, convert, load_fp8, save_fp8
from blocktensor.checkpoint.names import Names, possible_names, pretrained_names, whole
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import Tensors, read, save_whole
from tests.support.checkpoint_models import edit_json
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, llama, quiet, qwen, values

CASES = int(os.environ.get("CHECKPOINT_NAMES_FUZZ", "25"))
FIRST = int(os.environ.get("CHECKPOINT_FUZZ_SEED", "25"))


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek", "gpt_oss", "llama4"])
def test_they_are_those_it_writes(tmp_path: Path, kind: str) -> None:
    model = transformers_moe(kind)
    model.save_pretrained(tmp_path)
    wanted = possible_names(model)
    written = {name for ways in wanted.values() for name in ways[0].all}
    assert written == read(tmp_path).keys()
    model._weight_conversions = []  # what it was loaded from does not matter
    assert possible_names(model) == wanted
    assert model._weight_conversions == []


def test_models_inside_of_a_module() -> None:
    holder = nn.Module()
    holder.a, holder.b = nn.Linear(2, 2), transformers_moe("mixtral")
    holder.register_parameter("w1", None)
    holder.w2 = nn.Parameter(torch.ones(2, 2))
    assert possible_names(holder)["w2"] == [whole("w2")]
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


STACK, OTHER = (f"model.layers.{i}.mlp.experts.down_proj" for i in range(2))
GATE, NORM = "model.layers.0.mlp.gate.weight", "model.norm.weight"


def test_without_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    assert pretrained_names(transformers_moe("qwen3"), {STACK}) == {}


def renaming(names: Mapping[str, str]) -> Callable[[Tensors], Tensors]:
    return lambda state: {names.get(name, name): x for name, x in state.items()}


def halves_of_all_experts(state: Tensors) -> Tensors:
    first, second = state.pop(STACK).chunk(2)
    return {**state, "a.0.weight": first, "a.1.weight": second}


def halves_of_two_experts(state: Tensors) -> Tensors:
    first, second = state.pop(STACK), state.pop(OTHER)
    return {**state, "a.0.weight": torch.cat([first[:, :1], second[:, 1:]])}


def matrices(state: Tensors) -> Tensors:
    return state | {f"a.{e}.weight": x for e, x in enumerate(state.pop(STACK))}


def matrices_unless(name: str) -> Callable[[Tensors], Tensors]:
    def revert(state: Tensors) -> Tensors:
        if name in state:
            raise RuntimeError("shape '[2, 64]' is invalid for input of size 1")
        return matrices(state)

    return revert


SPLIT = {STACK: Names(("a.{}.weight",), 4)}
REVERTED: dict[str, tuple[int, Callable[[Tensors], Tensors], dict[str, Names]]] = {
    "other names": (4, renaming({GATE: "g", NORM: "n"}), {GATE: whole("g"), NORM: whole("n")}),
    # a file with the norm's name would hold the norm or the gate: all keep their own
    "names with two readings": (4, renaming({GATE: NORM, NORM: "n"}), {}),
    "matrices beside them": (4, lambda x: renaming({GATE: NORM, NORM: "n"})(matrices(x)), SPLIT),
    "one name of two tensors": (4, renaming({GATE: "x", NORM: "x"}), {NORM: whole("x")}),
    # names of stacks do not depend on them; if theirs fails, too, they keep their own
    "operations that need other shapes": (4, matrices_unless(GATE), SPLIT),
    "of stacks, too": (4, matrices_unless(STACK), {}),
    # as of a model whose experts are of two kinds
    "stacks that are cut otherwise": (4, halves_of_all_experts, {}),
    "names that do not count": (4, lambda x: renaming({"a.2.weight": "b"})(matrices(x)), {}),
    # half an expert of one and half an expert of another are no expert of either
    "matrices of several stacks": (1, halves_of_two_experts, {}),
}


@pytest.mark.parametrize("case", REVERTED)
def test_other_functions_in_place_of_its_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, revert, wanted = REVERTED[case]
    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda model, state: revert(dict(state))
    )
    model = transformers_moe("qwen3", num_experts=experts, num_experts_per_tok=1)
    assert pretrained_names(model, {STACK, OTHER}) == wanted


# Random histories of names: every load gives the values of the files, or a CheckpointError. Beside
# each FP8 checkpoint lies the same with plain values in place of bytes and scales. It tells what a
# load must give: that of the same names by transformers, or by load_fp8.

SUFFIX = "_scale_inv"
ROOTS = ("model.", "language_model.", "model.language_model.", "transformer.", "module.")
PAIRS = (
    *(("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "o_proj"), ("w1", "w3")),
    *(("up_proj", "down_proj"), ("layers.0.", "layers.1.")),
)
MODULES = (("mlp.", "block_sparse_moe."), ("mlp.", "ffn."), ("self_attn.", "attention."))


def write(folder: Path, tensors: Tensors) -> None:
    """One file, without an index."""
    for file in folder.glob("model*"):
        file.unlink()
    made = {name: x.contiguous() for name, x in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def plain(tensors: Tensors) -> Tensors:
    """FP8 weights as the values of bytes and scales; NaN where a weight has no scales."""
    made, block = {}, BLOCKS_128X128.block_shape
    for name, x in tensors.items():
        if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in tensors:
            continue
        if x.dtype == torch.float8_e4m3fn:
            if name + SUFFIX in tensors:
                scale = tensors[name + SUFFIX].float()
                fp8 = BlockwiseFP8Tensor.from_data(x, scale, block_shape=block, dtype=torch.float32)
                x = fp8.dequantize()
            else:
                x = torch.full(x.shape, torch.nan)
        made[name] = x
    return made


HISTORY = (
    *("rooted", "unrooted", "moved", "swapped", "other modules", "other suffix", "lost"),
    *("no scales", "doubled"),
)


def changed(draw: random.Random, kind: str, tensors: Tensors) -> Tensors:
    root, other = draw.sample(ROOTS, 2)
    if kind == "lost":
        gone = draw.choice(sorted(tensors))
        return {name: x for name, x in tensors.items() if name != gone}
    if kind == "no scales":
        return {name: x for name, x in tensors.items() if not name.endswith(SUFFIX)}
    if kind == "doubled":  # a part under a second root, with other values
        part = draw.choice(["layers.0.", "up_proj", "norm", "lm_head"])
        return {root + name: x.flip(0) for name, x in tensors.items() if part in name} | tensors
    a, b = draw.choice(PAIRS)  # weights of one shape or of two
    old, new = draw.choice(MODULES)
    suffix = draw.choice(["_scale", "_scale_inv", ".scale", "_scales"])
    names: dict[str, Callable[[str], str]] = {
        "rooted": lambda name: root + name,
        "unrooted": lambda name: name.removeprefix(root),
        "moved": lambda name: other + name[len(root) :] if name.startswith(root) else name,
        "swapped": lambda name: name.replace(a, "@").replace(b, a).replace("@", b),
        "other modules": lambda name: name.replace(old, new),
        "other suffix": lambda name: name.replace("_scale_inv", suffix),
    }
    return {names[kind](name): x for name, x in tensors.items()}


def pair(draw: random.Random, source: Path, folder: Path) -> tuple[Path, Path, list[str]]:
    """A changed copy of a checkpoint, the same in plain values, and what was changed."""
    fp8, wanted = folder / "fp8", folder / "plain"
    shutil.copytree(source, fp8)
    history = draw.choices(HISTORY, k=draw.choice([0, 1, 1, 1, 2, 3]))
    tensors = read(fp8)
    for kind in history:
        tensors = changed(draw, kind, tensors)
    if history or draw.random() < 0.5:
        write(fp8, tensors)
    # each of these entries says nothing that the tensors do not say
    forgotten = ("quantization_config", "architectures", "dtype")
    drop(fp8 / "config.json", [name for name in forgotten if draw.random() < 0.6])
    shutil.copytree(fp8, wanted)
    write(wanted, plain(tensors))
    drop(wanted / "config.json", ["quantization_config"])
    return fp8, wanted, history


def drop(config: Path, names: list[str]) -> None:
    edit_json(config, lambda content: [content.pop(name, None) for name in names])


SOURCES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "llama": (llama, ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification")),
    "tied": (lambda: llama(tied=True), ("LlamaForCausalLM", "LlamaModel")),
    "body": (lambda: llama().model, ("LlamaModel", "LlamaForCausalLM")),
    "mixtral": (lambda: transformers_moe("mixtral"), ("MixtralForCausalLM", "MixtralModel")),
    "qwen3": (lambda: transformers_moe("qwen3"), ("Qwen3MoeForCausalLM", "Qwen3MoeModel")),
    **{
        kind: (partial(qwen, kind), (f"{kind}ForConditionalGeneration", f"{kind}ForCausalLM"))
        for kind in ("Qwen3_5", "Qwen3_5Moe")
    },
}
"""Models, and the classes that load them."""

MAPPINGS: tuple[Any, ...] = (
    *(None, None, None, {"up_proj": "down_proj"}, {r"^model\.": ""}),
    {"gate_proj": "upproj", "up_proj": "gate_proj", "upproj": "up_proj"},
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound checkpoints in FP8, under the names that save_pretrained would write and others."""
    root, made = tmp_path_factory.mktemp("sources"), {}
    for kind, (make, _) in SOURCES.items():
        for names, save in (("auto", save_fp8), ("whole", save_whole)):
            model = make().bfloat16().requires_grad_(False)
            convert(model, skip_small=False)
            config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
            config["dtype"] = "bfloat16"
            folder = root / f"{kind}, {names}"
            made[folder.name] = save(model, folder, config=config)
    return made


def assert_equal(found: nn.Module, wanted: nn.Module, without: set[str]) -> None:
    """The same values, but for those that no file has."""
    those, these = values(wanted), values(found)
    for name in these.keys() - without:
        assert torch.equal(these[name], those[name]), name


def by_from_pretrained(draw: random.Random, name: str, fp8: Path, plain: Path) -> str:
    kind = getattr(transformers, draw.choice(SOURCES[name.partition(",")[0]][1]))
    options = {"dtype": torch.bfloat16, "key_mapping": draw.choice(MAPPINGS)}
    config = choices(frozen=draw.random() < 0.5)
    try:
        wanted, info = kind.from_pretrained(plain, output_loading_info=True, **options)
    except Exception as error:  # transformers itself cannot load it
        with pytest.raises((type(error), CheckpointError)):
            kind.from_pretrained(fp8, quantization_config=config, **options)
        return "refused by transformers"
    try:
        made = kind.from_pretrained(fp8, quantization_config=config, **options)
    except CheckpointError:
        return "CheckpointError"
    assert_equal(made, wanted, set(info["missing_keys"]))
    return "equal"


def by_load_fp8(draw: random.Random, name: str, fp8: Path, plain: Path) -> str:
    config = transformers.AutoConfig.from_pretrained(plain)
    kind = getattr(transformers, draw.choice(SOURCES[name.partition(",")[0]][1]))
    if not isinstance(config, kind.config_class):
        config = config.get_text_config()
    made, wanted = (kind(config).bfloat16() for _ in range(2))
    strict = draw.random() < 0.3
    try:
        report = load_fp8(made, fp8, strict=strict)
    except CheckpointError:
        return "CheckpointError"
    other = load_fp8(wanted, plain, strict=strict)
    assert {*report.fp8, *report.plain} == {*other.fp8, *other.plain}
    assert_equal(made, wanted, set(report.missing))
    return "equal" if report.fp8 else "nothing"


def test_random_histories(sources: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    outcomes: Counter[str] = Counter()
    with quiet():
        for seed in range(FIRST, FIRST + CASES):
            draw, folder = random.Random(seed), tmp_path / str(seed)
            name = draw.choice(sorted(sources))
            fp8, plain, history = pair(draw, sources[name], folder)
            for load in (by_from_pretrained, by_load_fp8):
                print(f"seed {seed}, {name}, {history}, {load.__name__}")
                outcomes[f"{load.__name__}: {load(draw, name, fp8, plain)}"] += 1
            shutil.rmtree(folder)
    for load in (by_from_pretrained, by_load_fp8):
        assert outcomes[f"{load.__name__}: equal"] > CASES // 8


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard", [fully_shard, replicate], ids=["fully_shard", "replicate"])
def test_a_model_whose_root_is_sharded(shard: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    """The root gets a class whose copies would run the model's constructor."""
    model, root = (llama() for _ in range(2))
    for each in (model, root):
        convert(each, skip_small=False)
    shard(root)
    assert possible_names(root) == possible_names(model)
    for name, each in (("whole", model), ("root", root)):
        save_fp8(each, tmp_path / name)
    whole, written = read(tmp_path / "whole"), read(tmp_path / "root")
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], x) for name, x in whole.items())
    frozen = llama().requires_grad_(False)
    convert(frozen, skip_small=False)
    shard(frozen)
    assert len(load_fp8(frozen, tmp_path / "whole").fp8) > 0
