"""trl with a policy in FP8: a first step that compares it with itself is exact."""

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
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import blocktensor
from blocktensor import BlockwiseFP8Weight
from tests.support.pretrained import VOCABULARY, choices, llama, loaded, quiet, saved

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


def logged(
    trainer: type, arguments: Any, name: str, model: Any, rows: Any = ROWS, **options: Any
) -> list[float]:
    """Return the log of every step."""
    made = trainer(model, args=arguments, train_dataset=Dataset.from_list(rows), **options)
    made.train()
    return [float(entry[name]) for entry in made.state.log_history if name in entry]


def dpo(folder: Path, model: Any, more: Any = None, **options: Any) -> float:
    """Return the first loss."""
    arguments = DPOConfig(str(folder / "out"), **COMMON, **(more or {}))
    (value,) = logged(DPOTrainer, arguments, "loss", model, **options)
    return value


def policy(folder: Path) -> Any:
    return loaded(folder, dtype=torch.bfloat16)


KWARGS = {"model_init_kwargs": {"quantization_config": choices()}}


def frozen(model: Any) -> Any:
    """A copy of 1 byte a weight."""
    made = copy.deepcopy(model)
    assert blocktensor.freeze(made)
    return made.requires_grad_(False)


def beside_frozen(folder: Path) -> float:
    model = policy(folder)
    return dpo(folder, model, ref_model=frozen(model))


WAYS: dict[str, Callable[[Path], float]] = {
    "a frozen copy": beside_frozen,
    "precomputed": lambda x: dpo(x, policy(x), {"precompute_ref_log_probs": True}),
    "arguments": lambda x: dpo(x, policy(x), KWARGS),
    "a path": lambda x: dpo(x, str(x), quantization_config=choices()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_loss_of_dpo(way: str, folder: Path) -> None:
    assert WAYS[way](folder) == pytest.approx(math.log(2), abs=2e-6)


def test_the_first_loss_with_a_reference_in_high_precision(folder: Path) -> None:
    assert abs(dpo(folder, policy(folder)) - math.log(2)) > 1e-4


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


GROUPS = {**COMMON, "num_generations": 4, "max_completion_length": 4}


@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_divergence_of_grpo(frozen: bool, folder: Path) -> None:
    """Of a reference model that could be trained, or has 1 byte a weight."""
    kwargs = {"quantization_config": choices(frozen=frozen)}
    options: Any = {**GROUPS, "model_init_kwargs": kwargs, "beta": 0.1, "learning_rate": 0.0}
    arguments = GRPOConfig(str(folder / "out"), **options)
    assert logged(GRPOTrainer, arguments, "kl", policy(folder), reward_funcs=lengths) == [0]


# A head in FP8, by which trl multiplies chunks of its rows

TEXTS = [{"text": f"w{i} w5 w6 w{i + 3}"} for i in range(4)]


def with_head(folder: Path, head: bool, dtype: torch.dtype) -> Any:
    """A policy, and a weight of it that trains."""
    model = loaded(folder, choices(convert_head=head), dtype=dtype)
    kind = type(model.get_output_embeddings().weight)
    assert (kind is BlockwiseFP8Weight) == head
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supervised(dtype: torch.dtype, folder: Path) -> None:
    arguments = SFTConfig(str(folder / "out"), **{**COMMON, "max_steps": 3}, learning_rate=1e-3)
    losses = []
    for head in (True, False):
        model = with_head(folder, head, dtype)
        before = model.lm_head.weight.detach().clone()
        losses.append(logged(SFTTrainer, arguments, "loss", model, TEXTS))
        assert not torch.equal(model.lm_head.weight.detach(), before)
    got, want = losses
    assert got == pytest.approx(want, rel=0.02)
    assert got[2] < got[0]
    assert got != want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [False, True])
def test_preferences_beside_a_copy(head: bool, dtype: torch.dtype, folder: Path) -> None:
    model = with_head(folder, head, dtype)
    steps = {**COMMON, "max_steps": 2}
    arguments = DPOConfig(str(folder / "out"), **steps, learning_rate=1e-2)
    found = logged(DPOTrainer, arguments, "loss", model, ref_model=copy.deepcopy(model))
    assert found[0] == pytest.approx(math.log(2), abs=2e-6)
    assert found[1] != found[0]


def test_rewards_with_a_head_in_fp8(folder: Path) -> None:
    arguments = GRPOConfig(str(folder / "out"), **{**GROUPS, "max_steps": 2}, learning_rate=1e-2)
    model = with_head(folder, True, torch.float32)
    before = model.lm_head.weight.detach().clone()
    rewards: Any = lambda completions, **_: [float(i) for i in range(len(completions))]  # noqa: E731
    assert len(logged(GRPOTrainer, arguments, "loss", model, reward_funcs=rewards)) == 2
    assert not torch.equal(model.lm_head.weight.detach(), before)
