"""FSDP2 training of a Llama-shaped decoder, bf16 or FP8. See ``--help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from common.needs import needs

with needs("rich", "blocktensor", install="'.[demo]'"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    import blocktensor
    from common import fsdp2_checkpoint as checkpoints
    from common.fsdp2_options import parse
    from common.llama import Llama, Shape, initialise, seed_of
    from common.runs import Clock, Trace, replacing, versions, without_nan
    from common.text import load_corpus, random_batches


@contextmanager
def ranks(kind: str, fake: int | None = None) -> Iterator[torch.device]:
    """This rank's device, in the group that is there, torchrun's, or one of this process alone.

    ``fake``: of how many ranks that group pretends to be.
    """
    device, place = torch.device(kind), None
    if kind == "cuda":
        index = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
        device = place = torch.device("cuda", int(index))
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    if mine:
        backend = "nccl" if kind == "cuda" else "gloo"
        if fake:  # collectives that move nothing
            dist.init_process_group("fake", rank=0, world_size=fake)
        elif "RANK" in os.environ:
            dist.init_process_group(backend, device_id=place)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=place)
    try:
        yield device
    finally:
        if mine:
            dist.destroy_process_group()


class CastLinear(nn.Linear):
    """A linear that casts a plain weight at every use: what a bf16 gather leaves to do."""

    recipe: blocktensor.Recipe

    def forward(self, x: Tensor) -> Tensor:
        return blocktensor.functional.linear(x, self.weight, self.bias, recipe=self.recipe)


def to_fp8(model: nn.Module, options: argparse.Namespace) -> int:
    """Have linears run in FP8; returns how many. On the meta device, before ``fully_shard``."""
    converted = model
    if options.gather == "bf16":  # the same linears as with FP8 gathers, but plain weights
        with torch.device("meta"):
            converted = Llama(model.shape)  # type: ignore[arg-type]
    if options.head == "fp8":
        model.head.fused_loss = partial(  # type: ignore[union-attr]
            blocktensor.functional.linear_cross_entropy, chunk_size=options.loss_chunk or None
        )
    recipe = blocktensor.Recipe(wgrad_input=options.wgrad_input)
    # tiny's are all too small for FP8 to pay, and are here to be tried
    report = blocktensor.convert(
        converted,
        recipe,
        skip_small=options.model != "tiny",
        convert_head=options.head == "fp8",
    )
    if options.gather == "bf16":
        for entry in report.converted:
            made = model.get_submodule(entry.name)
            made.__class__, made.recipe = CastLinear, recipe  # type: ignore[assignment]
    if options.fuse:
        blocktensor.fuse(converted)
    return len(report.converted)


def build(
    options: argparse.Namespace, shape: Shape, device: torch.device
) -> tuple[Llama, dict[str, int]]:
    """A sharded model with its weights, and what there is of them."""
    with torch.device("meta"):
        model = Llama(shape, recompute=options.ac, loss_chunk=options.loss_chunk)
    if options.master_dtype == "bf16":
        model.bfloat16()
    counts = {"parameters": sum(p.numel() for p in model.parameters())}
    counts["fp8_linears"] = to_fp8(model, options) if options.precision == "fp8" else 0
    if options.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # positions stay in fp32
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    again = options.reshard_after_forward
    embedding = shard(model.embedding, reshard_after_forward=again)
    embedding.set_unshard_in_backward(False)  # which looks nothing up
    for block in model.blocks:
        shard(block, reshard_after_forward=again)
    shard(model.head, reshard_after_forward=False)  # backward begins with it
    shard(model)
    model.to_empty(device=device)
    initialise(model, options.seed)
    return model, counts


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


class Data:
    """Batches that are a function of seed, rank and step, so that a resumed run sees the same."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.text = load_corpus().to(device).train if options.vocab == 256 else None
        if self.text is not None and options.seq >= self.text.numel():
            sys.exit(f"--seq {options.seq} is longer than the text of {self.text.numel()} bytes")

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and those that follow, ``[batch, seq]`` each."""
        o = self.options
        seed = seed_of(o.seed, "data", dist.get_rank(), step)
        if self.text is None:
            # small tokens are more frequent: there is something to learn
            random = torch.rand(o.batch, o.seq + 1, generator=torch.Generator().manual_seed(seed))
            tokens = random.pow(3).mul(o.vocab).long()
            if self.device.type == "cuda":
                # a plain copy would wait for all steps before, and the GPU then for the host
                tokens = tokens.pin_memory().to(self.device, non_blocking=True)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
        else:
            inputs, targets = next(random_batches(self.text, batch=o.batch, seq=o.seq, seed=seed))
        return inputs.contiguous(), targets.contiguous()


@dataclass
class Result:
    """Return the content of result.json."""

    losses: list[float] = field(default_factory=list)
    resumed_at: int = 0
    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    max_memory_allocated: int | None = None


def over_ranks(values: Sequence[float], device: torch.device) -> Tensor:
    """``[ranks, values]``: gathered, so that a mean adds in one order however many there are."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).cpu()


def setting(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Return the settings that the losses depend on; a resumed run must have the same."""
    flags = ("precision", "master_dtype", "seq", "batch", "accumulate", "lr", "ramp_steps", "seed")
    own = {f"--{flag.replace('_', '-')}": getattr(options, flag) for flag in flags}
    return {**asdict(shape), **own, "ranks": dist.get_world_size()}


def gradients(model: Llama, data: Data, options: argparse.Namespace, step: int) -> Tensor:
    """Forwards and backwards of a step's microbatches, the last reduces; their mean loss."""
    count = options.accumulate
    total = torch.zeros((), device=data.device)
    for index in range(count):
        last = index == count - 1
        if count > 1:
            sharded = cast(FSDPModule, model)
            sharded.set_requires_gradient_sync(last)
            sharded.set_is_last_backward(last)
            sharded.set_reshard_after_backward(last or options.reshard_after_forward)
        loss = model(*data.batch(step * count + index)) / count
        with torch.autograd.set_multithreading_enabled(False):  # less host time: docs/faq.md
            loss.backward()
        total += loss.detach()
    return total


def train(
    model: Llama, options: argparse.Namespace, shape: Shape, device: torch.device, bar: Progress
) -> Result:
    """All steps that are left."""
    optimizer = build_optimizer(model, options.lr)
    data, clock, result = Data(options, device), Clock(device), Result()
    trace = Trace(options.trace, device)
    belongs = setting(options, shape)
    if options.checkpoint:
        record = checkpoints.resume(options.checkpoint, model, optimizer, belongs)
        if record is not None:
            result.losses, result.resumed_at = record["losses"], len(record["losses"])
    begin, tokens = result.resumed_at, options.batch * options.seq * options.accumulate
    task = bar.add_task("", total=options.steps, completed=begin, loss=float("nan"), speed=0.0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Reading a loss waits for the GPU: they stay there, and are read now and then.
    every = 10 if device.type == "cuda" else 1
    unread: list[Tensor] = []
    for step in range(begin, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / options.ramp_steps)
        trace.before(step, options.steps)
        with clock.step():
            loss = gradients(model, data, options, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        unread.append(loss)
        done = step + 1
        last = done == options.steps
        saves = options.checkpoint and (last or done % (options.checkpoint_every or done + 1) == 0)
        if saves or last or done % every == 0:
            read = torch.stack(unread).tolist()
            result.losses += over_ranks(read, device).mean(0).tolist()
            unread.clear()
            speed = tokens / clock.seconds()[-1]
            bar.update(task, completed=done, loss=result.losses[-1], speed=speed)
        if saves:
            record = {"setting": belongs, "losses": result.losses}
            checkpoints.save(options.checkpoint, done, model, optimizer, record)
    trace.write()
    timed = clock.seconds()[options.warmup_steps : -Trace.STEPS if options.trace else None]
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    # nothing timed: a run resumed near its end
    mine = [median(timed) if timed else float("nan"), float(memory)]
    seconds, peak = over_ranks(mine, device).amax(0).tolist()
    if timed:
        result.step_seconds, result.tokens_per_second_per_gpu = seconds, tokens / seconds
        flops = shape.flops_per_token(options.seq) * tokens / seconds
        result.mfu = flops / (options.peak_tflops * 1e12)
    result.max_memory_allocated = int(peak) or None
    return result


def plot(losses: Sequence[float], path: Path, title: str) -> bool:
    """Draw the losses, if matplotlib is installed; returns whether it is."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss, mean of all ranks (nats per token)", title=title)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150)
    return True


def write(
    options: argparse.Namespace,
    shape: Shape,
    counts: dict[str, int],
    device: torch.device,
    result: Result,
) -> list[Path]:
    """The JSON, and a picture where it can be drawn."""
    options.out.mkdir(parents=True, exist_ok=True)
    cuda = device.type == "cuda"
    flags = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    report = {
        "options": flags,
        "model": {**asdict(shape), **counts},
        "versions": {**versions(), "torch": torch.__version__},  # which names its CUDA
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "world_size": dist.get_world_size(),
        **asdict(result),
    }
    written = [options.out / "result.json"]
    with replacing(written[0]) as temporary:
        temporary.write_text(json.dumps(without_nan(report), indent=1) + "\n")
    title = f"{counts['parameters'] / 1e6:.3g}M parameters, {options.precision}"
    if result.losses and plot(result.losses, options.out / "losses.png", title):
        written.append(options.out / "losses.png")
    return written


def table(options: argparse.Namespace, counts: dict[str, int], result: Result) -> Table:
    """The result for people."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    drawn = Table("what", "value")
    gathered = f", gathered in {options.gather}" if options.gather else ""
    drawn.add_row("precision", f"{options.precision}{gathered}, master {options.master_dtype}")
    drawn.add_row("parameters", f"{counts['parameters']:,}; {counts['fp8_linears']} FP8 linears")
    if options.fake_ranks:
        drawn.add_row(
            "ranks", f"{options.fake_ranks}, all but one pretended: no communication, no loss"
        )
    else:
        first, last = result.losses[0], result.losses[-1]
        drawn.add_row("ranks", str(dist.get_world_size()))
        drawn.add_row("loss", f"{first:.4f} at first, {last:.4f} in the end")
    drawn.add_row("tokens/s per GPU", shown(result.tokens_per_second_per_gpu, ",.0f"))
    drawn.add_row(f"MFU, of {options.peak_tflops:g} TFLOP/s", shown(result.mfu, ".1%"))
    memory = result.max_memory_allocated
    drawn.add_row("peak memory, GiB", shown(memory and memory / 2**30, ".2f"))
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report, write down."""
    options, shape = parse(argv)
    with ranks(options.device, options.fake_ranks) as device:
        console = Console(quiet=dist.get_rank() > 0)
        model, counts = build(options, shape, device)
        bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s per GPU"),
            console=console,
        )
        with bar:
            result = train(model, options, shape, device, bar)
        if options.fake_ranks:
            result.losses.clear()  # of rows that nobody sent
        if dist.get_rank() == 0:
            console.print(table(options, counts, result))
            if result.resumed_at:
                done = result.resumed_at >= options.steps
                why = ", nothing was left to do: give more --steps" if done else ""
                console.print(f"resumed after step {result.resumed_at}{why}")
            for path in write(options, shape, counts, device, result):
                console.print(f"wrote {path}", soft_wrap=True)
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
