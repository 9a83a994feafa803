"""Random histories of names: every load gives the values of the files, or a CheckpointError.

``CHECKPOINT_NAMES_FUZZ`` is the number of histories; ``CHECKPOINT_FUZZ_SEED`` the first seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

import transformers

from blocktensor import CheckpointError, convert, load_fp8, save_fp8
from tests.support.moe_models import transformers_moe
from tests.support.pretrained import choices, llama, quiet, values
from tests.support.renamed_checkpoints import pair
from tests.support.vision_models import qwen

CASES = int(os.environ.get("CHECKPOINT_NAMES_FUZZ", "25"))
FIRST = int(os.environ.get("CHECKPOINT_FUZZ_SEED", "0"))

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
