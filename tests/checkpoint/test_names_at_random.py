"""Random histories of names: every load gives the values of the files, or a CheckpointError.

Beside each FP8 checkpoint lies the same with plain values in place of bytes and scales. It tells
what a load must give: that of the same names by transformers, or by load_fp8.

``CHECKPOINT_NAMES_FUZZ`` is the number of histories; ``CHECKPOINT_FUZZ_SEED`` the first seed.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

import transformers
from safetensors.torch import save_file

from blocktensor import BlockwiseFP8Tensor, CheckpointError, convert, load_fp8, save_fp8
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import Tensors, read, save_whole
from tests.support.checkpoint_models import edit_json
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, llama, quiet, qwen, values

CASES = int(os.environ.get("CHECKPOINT_NAMES_FUZZ", "25"))
FIRST = int(os.environ.get("CHECKPOINT_FUZZ_SEED", "25"))

SUFFIX, OTHER = "_scale_inv", "_scale"
"""Suffixes of the names of scales, ours and those of compressed-tensors."""
ROOTS = ("model.", "language_model.", "model.language_model.", "transformer.", "module.")
PAIRS = (
    ("gate_proj", "up_proj"),
    ("k_proj", "v_proj"),
    ("q_proj", "o_proj"),
    ("w1", "w3"),
    ("up_proj", "down_proj"),
    ("layers.0.", "layers.1."),
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
    scales = {name + suffix: name for name in tensors for suffix in (OTHER, SUFFIX)}
    for name, x in tensors.items():
        if name in scales:
            continue
        if x.dtype == torch.float8_e4m3fn:
            found = next((name + s for s in (SUFFIX, OTHER) if name + s in tensors), None)
            if found is not None:
                scale = tensors[found].float()
                fp8 = BlockwiseFP8Tensor.from_data(x, scale, block_shape=block, dtype=torch.float32)
                x = fp8.dequantize()
            else:
                x = torch.full(x.shape, torch.nan)
        made[name] = x
    return made


HISTORY = (
    "rooted",
    "unrooted",
    "moved",
    "swapped",
    "other modules",
    "other suffix",
    "lost",
    "no scales",
    "doubled",
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
    None,
    None,
    None,
    {"up_proj": "down_proj"},
    {r"^model\.": ""},
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"no weight of this \w+ is in FP8")  # of other names
        try:
            report = load_fp8(made, fp8, strict=strict)
        except CheckpointError:
            return "CheckpointError"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"no weight of this \w+ is in FP8")  # nor in the file
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
