"""trl with a policy in FP8: a first step that compares it with itself is exact."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
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
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight
from tests.support.pretrained import VOCABULARY, choices, llama, loaded, quiet, saved
from tests.support.scripts import examples

WORDS = {f"w{i}": i for i in range(VOCABULARY - 2)}
ROWS = [{"prompt": "w1 w2", "chosen": f"w{i} w5", "rejected": f"w{i + 7} w8"} for i in range(4)]
COMMON = {
    "report_to": [],
    "max_steps": 1,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 4,
    "disable_tqdm": True,
}


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
    kwargs = {"quantization_config": choices(frozen=frozen)}
    options: Any = {**GROUPS, "model_init_kwargs": kwargs, "beta": 0.1, "learning_rate": 0.0}
    arguments = GRPOConfig(str(folder / "out"), **options)
    assert logged(GRPOTrainer, arguments, "kl", policy(folder), reward_funcs=lengths) == [0]


# A head in FP8, by which trl multiplies chunks of its rows

TEXTS = [{"text": f"w{i} w5 w6 w{i + 3}"} for i in range(4)]


def with_head(folder: Path, head: bool, dtype: torch.dtype) -> Any:
    """A policy, and a weight of it that trains."""
    model = loaded(folder, choices(convert_head=head), dtype=dtype)
    assert (type(model.get_output_embeddings().weight) is BlockwiseFP8Weight) == head
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


# examples/grpo_fp8.py: rollouts of a second process have the log-probabilities of the trainer

STEPS = 4
LINEARS = {f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with examples() as load:
        yield load("grpo_fp8")


def in_bytes(pairs: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone().view(torch.uint8) for name, x in pairs}


def test_weights_arrive_in_a_frozen_model(example: ModuleType) -> None:
    torch.manual_seed(0)
    policy, frozen = example.llama(trains=True), example.llama(trains=False)
    sent, before = (in_bytes(blocktensor.iter_fp8(model)) for model in (policy, frozen))
    assert sum(name.endswith("_scale_inv") for name in sent) == 2 * len(LINEARS)
    example.load_weights(frozen, blocktensor.iter_fp8(policy))
    after = in_bytes(blocktensor.iter_fp8(frozen))
    assert list(after) == list(sent)
    for name, x in sent.items():
        assert torch.equal(after[name], x)
        assert "norm" in name or not torch.equal(before[name], x)
    kinds = [type(x) for x in frozen.parameters() if x.ndim == 2]
    assert kinds.count(BlockwiseFP8Tensor) == 2 * len(LINEARS) == len(kinds) - 2  # embedding, head


@pytest.mark.slow
def test_every_step_has_equal_bits(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last step the engine gets no weights: it is one step late, and is noticed."""
    sent: list[dict[str, torch.Tensor]] = []
    reports: list[Any] = []
    iter_fp8, compute_loss = blocktensor.iter_fp8, example.Trainer.compute_loss

    def watched(model: Any) -> Any:
        sent.append(in_bytes(iter_fp8(model)))
        return iter_fp8(model) if len(sent) <= STEPS else iter(())

    def audited(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        def step() -> None:
            compute_loss(trainer, model, *args, **kwargs).backward()

        if not reports:
            reports.append(blocktensor.audit_step(model, step))
        return compute_loss(trainer, model, *args, **kwargs)

    monkeypatch.setattr(blocktensor, "iter_fp8", watched)
    monkeypatch.setattr(example.Trainer, "compute_loss", audited)
    monkeypatch.chdir(tmp_path)
    rewards, differences = zip(*example.train(STEPS + 1, lr=3e-3), strict=True)

    assert differences[:STEPS] == (0.0,) * STEPS
    assert differences[STEPS] > 1e-3
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1
    assert len(sent) == STEPS + 1
    for i in range(STEPS):
        assert all("norm" in x or not torch.equal(sent[i][x], sent[i + 1][x]) for x in sent[i])
    (report,) = reports
    assert report.marked == ()
    ran = {(x.module, x.kind) for x in report.entries if x.precision == "FP8"}
    names = {f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS}
    assert ran == {(name, kind) for name in names for kind in ("fprop", "dgrad", "wgrad")}
