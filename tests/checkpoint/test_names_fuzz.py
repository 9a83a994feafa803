"""Random histories of names: every load gives the values of the files, or a CheckpointError.

Beside each FP8 checkpoint lies the same with plain values in place of bytes and scales. It tells
what a load must give: that of the same names by transformers, or by ``load_fp8``.

``CHECKPOINT_NAMES_FUZZ`` is the number of histories; ``CHECKPOINT_FUZZ_SEED`` the first seed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

import transformers
from safetensors.torch import save_file

from blocktensor import BlockwiseFP8Tensor, CheckpointError, convert, load_fp8, save_fp8
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import read
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, llama, quiet, values
from tests.support.vision_models import qwen

CASES = int(os.environ.get("CHECKPOINT_NAMES_FUZZ", "25"))
FIRST = int(os.environ.get("CHECKPOINT_FUZZ_SEED", "0"))

# Checkpoints whose names, files and configs a random history changes

Tensors = dict[str, Tensor]
SUFFIXES = ("_scale_inv", "_scale")
ROOTS = ("model.", "language_model.", "model.language_model.", "transformer.", "module.")

PAIRS = (
    *(("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "o_proj"), ("w1", "w3")),
    *(("up_proj", "down_proj"), ("layers.0.", "layers.1.")),
)


def write(folder: Path, tensors: Tensors) -> None:
    """One file, without an index."""
    for file in folder.glob("model*"):
        file.unlink()
    made = {name: x.contiguous() for name, x in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def plain(tensors: Tensors) -> Tensors:
    """FP8 weights as the values of bytes and scales; NaN where a weight has no scales."""
    made = {}
    for name, x in tensors.items():
        if any(name.endswith(s) and name.removesuffix(s) in tensors for s in SUFFIXES):
            continue
        if x.dtype == torch.float8_e4m3fn:
            scales = [tensors[name + s] for s in SUFFIXES if name + s in tensors]
            x = _values(x, scales[0]) if len(scales) == 1 else torch.full(x.shape, torch.nan)
        made[name] = x
    return made


def _values(data: Tensor, scale: Tensor) -> Tensor:
    shape = BLOCKS_128X128.block_shape
    return BlockwiseFP8Tensor.from_data(
        data, scale.float(), block_shape=shape, dtype=torch.float32
    ).dequantize()


def renamed(tensors: Tensors, name: Callable[[str], str]) -> Tensors:
    return {name(old): x for old, x in tensors.items()}


def rooted(draw: random.Random, tensors: Tensors) -> Tensors:
    root = draw.choice(ROOTS)
    return renamed(tensors, lambda name: root + name)


def unrooted(draw: random.Random, tensors: Tensors) -> Tensors:
    root = draw.choice(ROOTS)
    return renamed(tensors, lambda name: name.removeprefix(root))


def moved(draw: random.Random, tensors: Tensors) -> Tensors:
    old, new = draw.sample(ROOTS, 2)
    return renamed(tensors, lambda name: new + name[len(old) :] if name.startswith(old) else name)


def swapped(draw: random.Random, tensors: Tensors) -> Tensors:
    """Two kinds of weights change their names, of one shape or of two."""
    a, b = draw.choice(PAIRS)
    return renamed(tensors, lambda x: x.replace(a, "@").replace(b, a).replace("@", b))


def other_modules(draw: random.Random, tensors: Tensors) -> Tensors:
    pairs = [("mlp.", "block_sparse_moe."), ("mlp.", "ffn."), ("self_attn.", "attention.")]
    old, new = draw.choice(pairs)
    return renamed(tensors, lambda name: name.replace(old, new))


def other_suffix(draw: random.Random, tensors: Tensors) -> Tensors:
    new = draw.choice(["_scale", "_scale_inv", ".scale", "_scales"])
    return renamed(tensors, lambda name: name.replace("_scale_inv", new))


def lost(draw: random.Random, tensors: Tensors) -> Tensors:
    gone = draw.choice(sorted(tensors))
    return {name: x for name, x in tensors.items() if name != gone}


def no_scales(draw: random.Random, tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if not name.endswith(SUFFIXES)}


def doubled(draw: random.Random, tensors: Tensors) -> Tensors:
    """A part under a second root, with other values."""
    root, part = draw.choice(ROOTS), draw.choice(["layers.0.", "up_proj", "norm", "lm_head"])
    more = {root + name: x.flip(0) for name, x in tensors.items() if part in name}
    return {**more, **tensors}


HISTORY = (rooted, unrooted, moved, swapped, other_modules, other_suffix, lost, no_scales, doubled)


def forget(draw: random.Random, folder: Path) -> None:
    """Take entries out of a config; each changes nothing that the tensors do not say."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("quantization_config", "architectures", "dtype"):
        if draw.random() < 0.6:
            config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))


def pair(draw: random.Random, source: Path, folder: Path) -> tuple[Path, Path, list[str]]:
    """A changed copy of a checkpoint, the same in plain values, and what was changed."""
    fp8, wanted = folder / "fp8", folder / "plain"
    shutil.copytree(source, fp8)
    changes: Any = draw.choices(HISTORY, k=draw.choice([0, 1, 1, 1, 2, 3]))
    tensors = read(fp8)
    for change in changes:
        tensors = change(draw, tensors)
    if changes or draw.random() < 0.5:
        write(fp8, tensors)
    forget(draw, fp8)
    shutil.copytree(fp8, wanted)
    write(wanted, plain(tensors))
    config = json.loads((wanted / "config.json").read_text())
    config.pop("quantization_config", None)
    (wanted / "config.json").write_text(json.dumps(config))
    return fp8, wanted, [change.__name__ for change in changes]


# What each of them gives

SOURCES: dict[str, Any] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "body": lambda: llama().model,
    "mixtral": lambda: transformers_moe("mixtral"),
    "qwen3": lambda: transformers_moe("qwen3"),
    "vision": lambda: qwen("Qwen3_5"),
    "vision of experts": lambda: qwen("Qwen3_5Moe"),
}
CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
    "tied": ("LlamaForCausalLM", "LlamaModel"),
    "body": ("LlamaModel", "LlamaForCausalLM"),
    "mixtral": ("MixtralForCausalLM", "MixtralModel"),
    "qwen3": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    "vision": ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "vision of experts": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
}
MAPPINGS: tuple[Any, ...] = (
    *(None, None, None, {"up_proj": "down_proj"}, {r"^model\.": ""}),
    {"gate_proj": "upproj", "up_proj": "gate_proj", "upproj": "up_proj"},
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound checkpoints in FP8, under the names that save_pretrained would write and others."""
    root, made = tmp_path_factory.mktemp("sources"), {}
    for kind, make in SOURCES.items():
        for names in ("auto", "fused"):
            model = make().bfloat16().requires_grad_(False)
            convert(model, skip_small=False)
            config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
            folder = root / f"{kind}, {names}"
            save_fp8(model, folder, config={**config, "dtype": "bfloat16"}, expert_names=names)
            made[folder.name] = folder
    return made


def assert_equal(found: nn.Module, wanted: nn.Module, without: set[str]) -> None:
    """The same values, but for those that no file has."""
    those, these = values(wanted), values(found)
    for name in these.keys() - without:
        assert torch.equal(these[name], those[name]), name


def by_from_pretrained(draw: random.Random, name: str, fp8: Path, plain: Path) -> str:
    kind = getattr(transformers, draw.choice(CLASSES[name.partition(",")[0]]))
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
    kind = getattr(transformers, draw.choice(CLASSES[name.partition(",")[0]]))
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


def test_names(sources: dict[str, Path], tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with quiet():
        for seed in range(FIRST, FIRST + CASES):
            draw, folder = random.Random(seed), tmp_path / str(seed)
            name = draw.choice(sorted(sources))
            fp8, plain, history = pair(draw, sources[name], folder)
            for load in (by_from_pretrained, by_load_fp8):
                try:
                    outcomes[f"{load.__name__}: {load(draw, name, fp8, plain)}"] += 1
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"[:300]
                    failures.append(f"seed {seed}, {name}, {history}, {load.__name__}: {what}")
            shutil.rmtree(folder)
    print(dict(outcomes))
    assert failures == []
    for load in (by_from_pretrained, by_load_fp8):
        assert outcomes[f"{load.__name__}: equal"] > CASES // 8
