"""One training run, in bf16 or in blockwise FP8, and what it leaves behind."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor
from common.gpt import GPT, generate
from common.options import Options
from common.text import Corpus, even_batches, random_batches

PRECISIONS = ("bf16", "fp8")

# The final train loss is a mean, because the loss of one batch is mostly the luck of the draw.
TAIL_STEPS = 50
HELDOUT_BATCHES = 32
PROMPT = b"\n    def "
SAMPLE_LENGTH = 240

# step, loss so far, tokens per second so far
OnProgress = Callable[[int, float, float], None]


@dataclass
class Run:
    """The record of one run. It is filled in while the run goes, so an interrupt loses nothing."""

    seed: int
    precision: str
    losses: list[float] = field(default_factory=list)
    train_loss: float | None = None
    heldout_loss: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    backends: tuple[str, ...] = ()
    samples: list[str] = field(default_factory=list)
    conversion: str = ""
    explanation: str = ""

    @property
    def label(self) -> str:
        return {"bf16": "bf16", "fp8": "FP8"}[self.precision]


def tail(steps: int) -> int:
    """Return the number of last steps whose mean is the final train loss."""
    return max(1, min(TAIL_STEPS, steps // 5))


def autocast(options: Options) -> torch.autocast:
    """Both runs compute in bf16 what is not FP8."""
    return torch.autocast(options.device.type, torch.bfloat16)


def next_byte_loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def build_optimizer(
    model: GPT, options: Options
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with decay on matrices only; linear warmup, then cosine down to a tenth."""
    parameters = list(model.parameters())
    # fused, said out loud: torch picks its fast path by itself only for plain tensors, and both
    # runs must pay for the same optimizer.
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    warmup = max(1, options.steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, options.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, options: Options, inputs: Tensor, targets: Tensor
) -> Tensor:
    """One optimizer step; returns the loss, still on the device."""
    with autocast(options):
        loss = next_byte_loss(model, inputs, targets)
    with torch.autograd.set_multithreading_enabled(False):  # less host time, see docs/faq.md
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(model: GPT, corpus: Corpus, options: Options, run: Run, progress: OnProgress) -> None:
    """All steps of one run. ``run.losses`` holds every finished step, however this ends."""
    optimizer, schedule = build_optimizer(model, options)
    batches = random_batches(
        corpus.train, batch=options.batch, seq=options.model.seq, seed=run.seed
    )
    # Reading a loss waits for the GPU, so losses stay there and are read only now and then.
    every = 20 if options.device.type == "cuda" else 1
    # The first steps compile kernels and warm allocators: they count as time, not as speed.
    untimed = min(10, options.steps // 5)
    losses = torch.zeros(options.steps, device=options.device)
    done = 0
    start = timed = time.perf_counter()
    try:
        for step in range(options.steps):
            if step == untimed:
                synchronize(options.device)
                timed = time.perf_counter()
            inputs, targets = next(batches)
            losses[step] = train_step(model, optimizer, options, inputs, targets)
            schedule.step()
            done = step + 1
            if done % every == 0 or done == options.steps:
                loss = losses[step].item()
                tokens = max(0, done - untimed) * options.tokens_per_step
                run.tokens_per_second = tokens / (time.perf_counter() - timed) or None
                progress(done, loss, run.tokens_per_second or 0.0)
    finally:
        run.losses[:] = losses[:done].tolist()
        run.seconds = time.perf_counter() - start
    run.train_loss = sum(run.losses[-tail(options.steps) :]) / tail(options.steps)


@torch.no_grad()
def heldout_loss(model: GPT, corpus: Corpus, options: Options) -> float:
    """Mean loss over fixed windows of the held-out files."""
    batches = even_batches(
        corpus.heldout, batch=options.batch, seq=options.model.seq, count=HELDOUT_BATCHES
    )
    with autocast(options):
        losses = [next_byte_loss(model, inputs, targets) for inputs, targets in batches]
    return torch.stack(losses).double().mean().item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def readable(text: bytes) -> str:
    """Generated bytes as text any terminal survives: an untrained model writes every byte."""
    return "".join(chr(b) if 32 <= b < 127 or b in b"\t\n" else f"\\x{b:02x}" for b in text)


def perform(run: Run, corpus: Corpus, options: Options, progress: OnProgress) -> None:
    """Build, convert (FP8 only), train, evaluate and sample one model; fill in ``run``."""
    cuda = options.device.type == "cuda"
    if cuda:
        # The model before this one may still be waiting for the garbage collector.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(options.device)
    # Weights are drawn on the CPU: the same ones for the same seed on every device.
    torch.manual_seed(run.seed)
    model = GPT(options.model).to(options.device)

    if run.precision == "fp8":
        recipe = blocktensor.Recipe(scale=options.recipe, wgrad_input=options.wgrad_input)
        # A router has as few outputs as there are experts, and decides: it stays in fp32.
        skip = ["*.router"] if options.model.experts else []
        # The one line by which the two runs differ. (The filter leaves small layers, which gain no
        # speed, in bf16; here they are wanted in FP8 all the same.)
        report = blocktensor.convert(model, recipe, skip=skip, skip_small=False)
        run.conversion = str(report)

    train(model, corpus, options, run, progress)
    if cuda:
        run.peak_memory_bytes = torch.cuda.max_memory_allocated(options.device)
    model.eval()
    run.heldout_loss = heldout_loss(model, corpus, options)
    if run.precision == "fp8":
        explanation = blocktensor.explain(model, tokens=options.tokens_per_step)
        run.backends = tuple(explanation.backends)
        run.explanation = str(explanation)
    # A model that diverged has no probabilities to draw from.
    if options.samples and math.isfinite(run.heldout_loss):
        with autocast(options):
            texts = generate(
                model, PROMPT, length=SAMPLE_LENGTH, samples=options.samples, seed=run.seed
            )
        run.samples = [readable(text) for text in texts]
