"""Trainer on models in FP8: bit for bit what loops written by hand compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight
from tests.support.pretrained import VOCABULARY, choices, loaded, logits

BATCH, LENGTH, STEPS = 4, 16, 8
_DRAWN = torch.randint(VOCABULARY, (2 * BATCH * STEPS, LENGTH), generator=torch.Generator())
DATA: Any = [{"input_ids": x, "labels": x} for x in _DRAWN]


class InOrder(Trainer):
    items: Any = None  # over how many tokens the loss is a mean: versions and models differ

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(DATA)

    def compute_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        InOrder.items = num_items_in_batch
        return super().compute_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)


def train(model: Any, folder: Path, steps: int = STEPS, **options: Any) -> list[float]:
    """The losses of Trainer's steps; ``resume``: those before its checkpoint, too."""
    resume = options.pop("resume", None)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        dataloader_pin_memory=False,
        **{"learning_rate": 1e-3, "save_strategy": "no", **options},
    )
    trainer = InOrder(model, arguments, train_dataset=DATA)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]


def batches(per_step: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    size = BATCH * per_step
    for start in range(0, len(DATA), size):
        items = DATA[start : start + size]
        yield [default_data_collator(items[i : i + BATCH]) for i in range(0, size, BATCH)]


def train_by_hand(
    model: Any, steps: int = STEPS, *, bf16: bool = False, microbatches: int = 1
) -> list[float]:
    """The losses of a plain loop, after those of Trainer: AdamW, gradients clipped at 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True)
    model.train()
    losses = []
    for _, step in zip(range(steps), batches(microbatches), strict=False):
        total = torch.zeros(())
        for batch in step:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch, num_items_in_batch=InOrder.items).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": True}, {"bf16": True}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {"microbatches": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_a_loop_by_hand(way: str, llama_folder: Path, tmp_path: Path) -> None:
    theirs, ours = WAYS[way]
    model, wanted = loaded(llama_folder), loaded(llama_folder)
    losses = train(model, tmp_path, **theirs)
    assert losses == train_by_hand(wanted, **ours)
    assert len(set(losses)) == STEPS
    for name, x in model.state_dict().items():
        assert torch.equal(x, wanted.state_dict()[name]), name
    assert isinstance(model.model.layers[1].mlp.down_proj.weight, BlockwiseFP8Weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_changes_nothing(llama_folder: Path, tmp_path: Path, reentrant: bool) -> None:
    model = loaded(llama_folder)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    assert train(model, tmp_path, steps=5) == train_by_hand(loaded(llama_folder), steps=5)


# torch's own: Dynamo reads .grad of the parameters of modules
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_trains_alike(llama_folder: Path, tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    model, wanted = (loaded(llama_folder, num_hidden_layers=1) for _ in range(2))
    assert train(model, tmp_path, steps=3, **options) == train_by_hand(wanted, steps=3)


def test_a_run_resumes_as_if_it_had_not_stopped(llama_folder: Path, tmp_path: Path) -> None:
    model = loaded(llama_folder)
    losses = train(model, tmp_path, steps=4, save_strategy="steps", save_steps=4)
    wanted = train_by_hand(loaded(llama_folder), steps=8)
    assert losses == wanted[:4]
    checkpoint = tmp_path / "checkpoint-4"
    again = loaded(checkpoint)  # an ordinary checkpoint
    assert torch.equal(logits(again), logits(model.eval()))
    assert train(loaded(llama_folder), tmp_path, steps=8, resume=str(checkpoint)) == wanted


@pytest.mark.parametrize("recomputing", ["no", "reentrant", "not reentrant"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_adapters_train(llama_folder: Path, tmp_path: Path, frozen: bool, recomputing: str) -> None:
    peft = pytest.importorskip("peft")
    model = loaded(llama_folder, choices(frozen=frozen))
    if recomputing != "no":
        model.gradient_checkpointing_enable({"use_reentrant": recomputing == "reentrant"})
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    before = {n: x.detach().clone() for n, x in adapted.named_parameters() if "lora_B" in n}
    train(adapted, tmp_path, steps=3, learning_rate=1e-2)
    after = dict(adapted.named_parameters())
    assert len(before) == 14
    assert not any(torch.equal(x, after[name]) for name, x in before.items())
    kind = BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight
    bases = [x for n, x in after.items() if "base_layer" in n]
    assert len(bases) == 14 and {type(x) for x in bases} == {kind}
    assert not any(x.requires_grad for x in bases)
