"""trl's DPO and GRPO with a policy in FP8: a first step that compares it with itself is exact."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from tests.support.pretrained import VOCABULARY, choices, llama, loaded, quiet, saved

pytestmark = pytest.mark.filterwarnings("ignore", "error:.*reference model.*:UserWarning")

WORDS = {f"w{i}": i for i in range(VOCABULARY - 2)}
ROWS = [{"prompt": "w1 w2", "chosen": f"w{i} w5", "rejected": f"w{i + 7} w8"} for i in range(4)]
COMMON = {"report_to": [], "max_steps": 1, "logging_steps": 1, "use_cpu": True, "bf16": False,
          "per_device_train_batch_size": 4, "disable_tqdm": True}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """A model with a tokenizer."""
    words = {**WORDS, "<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(tmp_path)
    with quiet():
        yield saved(tmp_path, llama().bfloat16())


def first(trainer: type, arguments: Any, name: str, model: Any, **options: Any) -> float:
    """What the first step logs."""
    made = trainer(model, args=arguments, train_dataset=Dataset.from_list(ROWS), **options)
    made.train()
    (value,) = (float(entry[name]) for entry in made.state.log_history if name in entry)
    return value


def dpo(folder: Path, model: Any, more: Any = None, **options: Any) -> float:
    arguments = DPOConfig(str(folder / "out"), **COMMON, **(more or {}))
    return first(DPOTrainer, arguments, "loss", model, **options)


def policy(folder: Path) -> Any:
    return loaded(folder, dtype=torch.bfloat16)


def with_copy(folder: Path) -> float:
    model = policy(folder)
    return dpo(folder, model, ref_model=copy.deepcopy(model))


KWARGS = {"model_init_kwargs": {"quantization_config": choices()}}

WAYS: dict[str, Callable[[Path], float]] = {
    "a copy": with_copy,
    "precomputed": lambda x: dpo(x, policy(x), {"precompute_ref_log_probs": True}),
    "arguments": lambda x: dpo(x, policy(x), KWARGS),
    "a path": lambda x: dpo(x, str(x), quantization_config=choices()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_loss_of_dpo(way: str, folder: Path) -> None:
    assert WAYS[way](folder) == pytest.approx(math.log(2), abs=2e-6)


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_the_first_divergence_of_grpo(folder: Path) -> None:
    numbers = {"num_generations": 4, "max_completion_length": 4, "beta": 0.1, "learning_rate": 0.0}
    arguments = GRPOConfig(str(folder / "out"), **COMMON, **numbers, **KWARGS)
    assert first(GRPOTrainer, arguments, "kl", policy(folder), reward_funcs=lengths) == 0


def test_a_plain_reference_warns(folder: Path) -> None:
    with pytest.warns(UserWarning, match="DPOTrainer has made a reference model in high"):
        assert abs(dpo(folder, policy(folder)) - math.log(2)) > 1e-4
