"""One long training run on the tokens of ``kernel_text.py``, in bf16 or FP8, in as many parts as
needed: started again with the same --out, it goes on from its checkpoint.

    python examples/long_run.py runs/kernel_text --variant bf16 --seed 0 --out runs/bf16-0
    python examples/long_run.py runs/kernel_text --variant fp8 --seed 0 --out runs/fp8-0
    python examples/long_run.py runs/kernel_text --experts 16 --layers 2 --out runs/moe-bf16-0
    python examples/long_run.py runs/kernel_text --move 1e-6 --out runs/bf16-moved-0

Every window of tokens is read once at most, in an order that the seed decides. --stop-after ends a
part after that many seconds. OUT/result.json has the loss and the gradient's norm of every step.
How far two runs come apart by rounding alone: compare one with the same run and --move.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor
from common.gpt import GPT, ModelConfig
from kernel_text import Tokens, load

VARIANTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {},
    "fp8, scale=power_of_two": {"scale": "power_of_two"},
    "fp8, scale=power_of_two, wgrad_input=1x128": {
        "scale": "power_of_two",
        "wgrad_input": "1x128",
    },
    "fp8, wgrad_input=1x128": {"wgrad_input": "1x128"},
    "fp8, wgrad_input=128x128": {"wgrad_input": "128x128"},
    "fp8, wgrad_input=high_precision": {"wgrad_input": "high_precision"},
    "fp8, activations in powers of two": {
        "scale": blocktensor.Scales(activations="power_of_two"),
    },
}
"""Arguments of the recipe; None: not converted."""

HELDOUT_BATCHES = 32
TIMED = 20
"""Steps that are timed at once."""


@torch.no_grad()
def move(model: nn.Module, by: float) -> None:
    """Change every weight by a random share of itself, ``by`` on average."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random).to(parameter.device)
        parameter.mul_(1 + by * noise)


class Training:
    """A model, its optimizer and what was recorded, which are saved and resumed together."""

    def __init__(self, options: argparse.Namespace, tokens: Tokens) -> None:
        self.options, self.tokens = options, tokens
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        config = ModelConfig(
            dim=options.dim,
            layers=options.layers,
            heads=options.heads,
            seq=options.seq,
            vocab=math.ceil(int(tokens.facts["vocab"]) / 128) * 128,
            experts=options.experts,
            qk_norm=options.qk_norm,
            embedding_std=options.embedding_std,
            smear=options.smear,
        )
        self.model = GPT(config).to(self.device)
        if options.move:
            move(self.model, options.move)
        recipe = VARIANTS[options.variant]
        if recipe is not None:
            skip = ["*.router"] if options.experts else []
            blocktensor.convert(
                self.model,
                blocktensor.Recipe(**recipe),
                skip=skip,
                skip_small=not options.convert_small,
            )
            if options.fuse:
                print(blocktensor.fuse(self.model))
        self.saving = blocktensor.saved_tensors_in_fp8(options.saved_in_fp8)
        if options.compile:
            for block in self.model.blocks:
                block.compile()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=options.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        windows = (tokens.train.numel() - 1) // options.seq
        needed = options.steps * options.batch
        if needed > windows:
            raise ValueError(
                f"{options.steps} steps of {options.batch} windows of {options.seq} tokens: "
                f"{needed} windows, but the text has {windows}. Use --steps of at most "
                f"{windows // options.batch}, or build more tokens"
            )
        self.order = torch.randperm(windows, generator=torch.Generator().manual_seed(options.seed))
        self.record: dict[str, list[Any]] = {
            "loss": [],
            "norm": [],
            "tokens_per_second": [],
            "heldout": [],
        }

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.record["loss"])

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        options, step = self.options, self.step
        warmup = max(1, options.steps // 50 if options.warmup is None else options.warmup)
        if step < warmup:
            return float(options.lr * (step + 1) / warmup)
        done = (step - warmup) / max(1, options.steps - warmup)
        return float(options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, of windows ``[batch, seq + 1]``."""
        windows = windows.to(self.device, torch.long)
        with torch.autocast(self.device.type, torch.bfloat16), self.saving:
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One step of the optimizer: its loss and the gradient's norm, on the device."""
        batch, seq = self.options.batch, self.options.seq
        chosen = self.order[self.step * batch : (self.step + 1) * batch]
        offsets = torch.arange(seq + 1)
        loss = self.loss(self.tokens.train[chosen[:, None] * seq + offsets])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm.detach()

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Return the mean loss of windows spread evenly over the held-out files."""
        batch, seq = self.options.batch, self.options.seq
        last = self.tokens.heldout.numel() - seq - 1
        starts = torch.linspace(0, last, batch * HELDOUT_BATCHES, dtype=torch.float64).long()
        offsets = torch.arange(seq + 1)
        self.model.eval()  # routers of experts stay as they are
        losses = [
            self.loss(self.tokens.heldout[some[:, None] + offsets]) for some in starts.split(batch)
        ]
        self.model.train()
        return torch.stack(losses).double().mean().item()

    def run(self, until: float) -> Iterator[None]:
        """Steps until all are done or the clock shows ``until``; yields after some of them."""
        steps, every = self.options.steps, self.options.evaluate_every
        while self.step < steps and time.perf_counter() < until:
            count = min(TIMED, steps - self.step, every - self.step % every)
            began, done = time.perf_counter(), []
            for _ in range(count):
                done.append(self.train_step())
                self.record["loss"].append(None)  # read below: reading waits for the GPU
            numbers = torch.tensor([[float(a), float(b)] for a, b in done], dtype=torch.float64)
            seconds = time.perf_counter() - began
            self.record["loss"][-count:] = numbers[:, 0].tolist()
            self.record["norm"] += numbers[:, 1].tolist()
            tokens = count * self.options.batch * self.options.seq
            self.record["tokens_per_second"].append(tokens / seconds)
            if self.step % every == 0 or self.step == steps:
                self.record["heldout"].append((self.step, self.heldout_loss()))
            yield

    def save(self, path: Path) -> None:
        """Everything, so that no moment has only half a file."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "record": self.record,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def resume(self, path: Path) -> None:
        """Go on from what ``save`` has written."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.record = state["record"]

    def result(self, command: str) -> dict[str, Any]:
        """Return the content of result.json."""
        options, cuda = self.options, self.device.type == "cuda"
        speeds = self.record["tokens_per_second"][1:] or self.record["tokens_per_second"]
        variant = options.variant
        if options.fuse:
            variant += ", fused"
        if options.saved_in_fp8:
            variant += ", activations saved in FP8"
        if options.move:
            variant += f", weights moved by {options.move:g}"
        return {
            "variant": variant,
            "seed": options.seed,
            "command": command,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "experts": options.experts,
            "steps": self.step,
            "tokens_a_step": options.batch * options.seq,
            "text": self.tokens.facts,
            "heldout": [(step, round(loss, 5)) for step, loss in self.record["heldout"]],
            "tokens_per_second": round(statistics.median(speeds), 1) if speeds else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "loss": [round(x, 4) for x in self.record["loss"]],
            "norm": [round(x, 4) for x in self.record["norm"]],
        }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="long_run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", type=Path, help="folder that kernel_text.py has written")
    add("--variant", choices=tuple(VARIANTS), default="bf16", help="default: %(default)s")
    add("--seed", type=int, default=0, help="decides weights and the order of the text")
    add("--steps", type=int, default=3000, help="default: %(default)s")
    add("--batch", type=int, default=16, help="windows a step (default: %(default)s)")
    add("--seq", type=int, default=2048, help="tokens of a window (default: %(default)s)")
    add("--dim", type=int, default=2048, help="default: %(default)s")
    add("--layers", type=int, default=5, help="default: %(default)s")
    add("--heads", type=int, default=16, help="default: %(default)s")
    add("--experts", type=int, default=0, help="in place of every MLP (default: none)")
    add("--lr", type=float, default=6e-4, help="peak learning rate (default: %(default)s)")
    add("--warmup", type=int, help="steps (default: a fiftieth of all)")
    add("--qk-norm", action="store_true", help="normalize the queries and keys of each head")
    add("--smear", action="store_true", help="add a share of the previous token's embedding")
    add("--embedding-std", type=float, default=0.02, help="at the start (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="blocks")
    add("--move", type=float, default=0.0, metavar="X", help="change initial weights by X of them")
    add("--fuse", action="store_true", help="cast inside of SwiGLU (blocktensor.fuse)")
    add("--saved-in-fp8", action="store_true", help="activations that wait for the backward")
    add("--convert-small", action="store_true", help="also weights that gain no speed")
    add("--evaluate-every", type=int, default=500, help="steps (default: %(default)s)")
    add("--save-every", type=float, default=120, help="seconds (default: %(default)s)")
    add("--stop-after", type=float, default=math.inf, help="seconds of this part")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda")
    add("--out", type=Path, required=True, help="folder of the checkpoint and of result.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """One part of a run."""
    began = time.perf_counter()
    options = parse(argv)
    if options.fuse and options.variant == "bf16":
        sys.exit(
            "long_run.py: error: --fuse needs an FP8 --variant: it casts where values are computed"
        )
    command = shlex.join(
        ["python", "examples/long_run.py", *(sys.argv[1:] if argv is None else argv)]
    )
    training = Training(options, load(options.data))
    checkpoint = options.out / "checkpoint.pt"
    options.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        training.resume(checkpoint)
    saved = time.perf_counter()
    for _ in training.run(began + options.stop_after):
        last = training.record
        print(
            f"step {training.step}: loss {last['loss'][-1]:.4f}, norm {last['norm'][-1]:.3f}, "
            f"{last['tokens_per_second'][-1]:,.0f} tokens/s",
            flush=True,
        )
        if time.perf_counter() - saved > options.save_every:
            training.save(checkpoint)
            saved = time.perf_counter()
    training.save(checkpoint)
    (options.out / "result.json").write_text(json.dumps(training.result(command)) + "\n")


if __name__ == "__main__":
    main()
