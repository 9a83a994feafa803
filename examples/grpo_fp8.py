"""GRPO with trl: a policy in FP8, and rollouts of a second process that computes the same bits.

At each step the trainer streams the FP8 weights of the policy to an engine, a frozen FP8 model in
another process. The engine samples completions. Their log-probabilities equal the
trainer's bit for bit. The model is a small Llama at random, and the reward is the share of
lowercase letters in a completion. See ``--help``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func: trl may still change it

import torch
from torch import Tensor, nn

from common.needs import needs

with needs("datasets", "transformers", "trl", "blocktensor", install=". trl"):
    from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined,import-not-found,unused-ignore]
    from trl.trainer.utils import add_fused_lm_head  # type: ignore[import-not-found,unused-ignore]

    import blocktensor
    from blocktensor import BlockwiseFP8Tensor

LENGTH, TEMPERATURE = 12, 0.9
TOKENIZER = ByT5Tokenizer(extra_ids=0, padding_side="left")  # bytes: it needs no files
PROMPTS = ["FP8:", "blocks of 128:", "rollout:", "a policy:"] * 4


def llama(trains: bool) -> Any:
    """A small Llama in FP8, with masters in fp32 or frozen at 1 byte a weight."""
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    model = LlamaForCausalLM(config).requires_grad_(trains)
    blocktensor.convert(model, skip_small=False)  # weights that require no gradient are frozen
    return model


def load_weights(model: nn.Module, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Copy what ``iter_fp8`` yields into a frozen model; scales come right after their weight."""
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    data = torch.empty(0)
    for name, x in pairs:
        if x.dtype == torch.float8_e4m3fn:
            data = x
        elif name.endswith("_scale_inv"):
            weight = own[name.removesuffix("_scale_inv")]
            options = {"dtype": weight.dtype, "recipe": weight.recipe}
            weight.copy_(BlockwiseFP8Tensor.from_data(data, x, block_shape=(128, 128), **options))
        else:
            own[name].copy_(x)


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]]) -> dict[str, list[Any]]:
    """Return what trl expects of a ``rollout_func``."""
    batch = TOKENIZER.pad({"input_ids": prompts}, return_tensors="pt")
    start = batch["input_ids"].shape[1]
    ids = model.generate(
        **batch, max_new_tokens=LENGTH, do_sample=True, top_k=0, temperature=TEMPERATURE
    )
    ends = ids[:, start:] == TOKENIZER.eos_token_id
    kept = (ends.cumsum(1) - ends.int()) == 0  # up to the first EOS
    # generate() computed the logits token by token. The trainer's forward takes whole sequences,
    # and so does this one: the same batch with the same padding, through the same head.
    mask = torch.cat([batch["attention_mask"], kept.long()], 1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :start] = -100
    made = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    completions, logprobs = ids[:, start:], made.log_probs[:, start - 1 :]
    return {
        "prompt_ids": prompts,
        "completion_ids": [x[m].tolist() for x, m in zip(completions, kept, strict=True)],
        "logprobs": [x[m].tolist() for x, m in zip(logprobs, kept, strict=True)],
    }


def engine(pipe: Any, threads: int, seed: int) -> None:
    """Serve rollouts: the second process."""
    torch.set_num_threads(threads)  # by which the order of a sum may differ
    torch.manual_seed(seed)
    model = llama(trains=False).eval()
    add_fused_lm_head(model, temperature=TEMPERATURE)  # as GRPOTrainer does with the policy
    while True:
        load_weights(model, iter(pipe.recv, None))
        pipe.send(sample(model, pipe.recv()))


class Trainer(GRPOTrainer):  # type: ignore[misc,unused-ignore]
    """Compares the log-probabilities that it trains on with the engine's."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        theirs, kept = inputs["sampling_per_token_logps"], inputs["completion_mask"].bool()
        ours = outputs[-1].log_probs[:, -theirs.shape[1] :].detach()
        self.difference = (ours - theirs)[kept].abs().max().item()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logs["difference"] = self.difference
        super().log(logs, *args, **kwargs)
        if "reward" in logs:
            print(f"{self.state.global_step:4} {logs['reward']:7.3f}  {self.difference}")


def letters(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """Reward: the share of lowercase letters in a completion."""
    first, last = TOKENIZER("az", add_special_tokens=False)["input_ids"]
    return [sum(first <= i <= last for i in ids) / LENGTH for ids in completion_ids]


def train(steps: int = 20, lr: float = 1e-3, seed: int = 0) -> list[tuple[float, float]]:
    """Train a policy; return each step's reward and largest difference of log-probabilities."""
    torch.manual_seed(seed)
    context = torch.multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    arguments = (theirs, torch.get_num_threads(), seed + 1)
    process = context.Process(target=engine, args=arguments, daemon=True)
    process.start()
    theirs.close()  # recv() raises if the engine has ended

    def rollout(prompts: list[str], trainer: Any) -> Any:
        for pair in blocktensor.iter_fp8(trainer.model):
            pipe.send(pair)  # through shared memory; torch sends tensors of a GPU by CUDA IPC
        pipe.send(None)
        pipe.send(TOKENIZER(prompts, add_special_tokens=False)["input_ids"])
        return pipe.recv()

    config = GRPOConfig(
        "runs/grpo_fp8", max_steps=steps, learning_rate=lr, lr_scheduler_type="constant", seed=seed,
        per_device_train_batch_size=32, num_generations=8, max_completion_length=LENGTH,
        temperature=TEMPERATURE, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        llama(trains=True),
        args=config,
        reward_funcs=letters,
        rollout_func=rollout,
        processing_class=TOKENIZER,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.remove_callback(PrinterCallback)
    print("step  reward  largest difference of log-probabilities")
    try:
        trainer.train()
    finally:
        process.terminate()
        process.join()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [(entry["reward"], entry["difference"]) for entry in history]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return 1 if a log-probability differed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    steps = train(**vars(options))
    return int(any(difference != 0 for _, difference in steps))


if __name__ == "__main__":
    sys.exit(main())
