"""Low-rank adapters on a frozen FP8 base, compared with a bf16 base. See ``--help``.

A small GPT is trained on Python source and written in the layout of DeepSeek-V3's checkpoints. Then
it is loaded twice, with bf16 weights and straight into FP8, and adapters teach each the same text
with upper and lower case exchanged. The FP8 base takes 1 byte a weight and none of them changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.needs import needs

with needs("rich", "blocktensor", install="'.[demo,checkpoint]'"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    import blocktensor
    from common.gpt import GPT, ModelConfig
    from common.text import load_corpus, random_batches

Step = Callable[[int, float], None]
Batches = Iterator[tuple[Tensor, Tensor]]


class LoRA(nn.Module):
    """``base(x) + up(down(x)) * alpha / rank``; only ``down`` and ``up`` train."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.base = base
        place = base.weight.device
        self.down = nn.Linear(base.in_features, rank, bias=False, device=place)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=place)
        self.scale = alpha / rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return y


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze all of a model and put an adapter on every linear but the head."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LoRA(module, rank))


def swap_case(stream: Tensor) -> Tensor:
    """Return the text with upper and lower case exchanged."""
    return torch.frombuffer(bytearray(bytes(stream.tolist()).swapcase()), dtype=torch.uint8)


def train(model: nn.Module, batches: Batches, steps: int, lr: float, done: Step) -> list[float]:
    """AdamW on what requires a gradient; the loss of every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    losses = []
    for step in range(steps):
        inputs, targets = next(batches)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        done(step + 1, losses[-1])
    return losses


def weights_to_bf16(model: nn.Module) -> None:
    """All matrices in bf16; norms and buffers (the tables of RoPE) stay in fp32."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()


def base_bytes(model: nn.Module) -> Iterator[Tensor]:
    """The stored bytes of the frozen parameters."""
    for parameter in model.parameters():
        if isinstance(parameter, blocktensor.BlockwiseFP8Tensor):
            data, scale, _format = parameter.rowwise()
            yield from (part.contiguous().view(torch.uint8) for part in (data, scale))
        elif not parameter.requires_grad:
            yield parameter.detach().contiguous().view(torch.uint8)


def digest(model: nn.Module) -> str:
    """SHA-256 of a model's frozen parameters."""
    found = hashlib.sha256()
    for part in base_bytes(model):
        found.update(part.cpu().numpy().tobytes())
    return found.hexdigest()


@dataclass
class Result:
    """The result of one base."""

    base: str
    first_loss: float
    final_loss: float
    base_bytes: int
    base_unchanged: bool
    peak_memory_bytes: int | None


def adapt(
    model: nn.Module, name: str, batches: Batches, options: argparse.Namespace, done: Step
) -> Result:
    """Train adapters on one base."""
    cuda = options.device.type == "cuda"
    torch.manual_seed(options.seed)
    add_adapters(model, options.rank)
    before, size = digest(model), sum(part.numel() for part in base_bytes(model))
    if cuda:
        torch.cuda.reset_peak_memory_stats(options.device)
    losses = train(model, batches, options.steps, options.lr, done)
    peak = torch.cuda.max_memory_allocated(options.device) if cuda else None
    tail = losses[-max(1, options.steps // 5) :]
    return Result(name, losses[0], sum(tail) / len(tail), size, digest(model) == before, peak)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--steps", type=int, default=60, help="of adapter training")
    parser.add_argument("--base-steps", type=int, default=120, help="of training the base")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3, help="of the adapters")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device(device))
    parser.add_argument("--out", type=Path, default=Path("runs/lora_fp8"))
    options = parser.parse_args(argv)
    for flag in ("steps", "base_steps", "rank", "batch"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train a base, store it in FP8, adapt it twice, compare."""
    options, console = parse(argv), Console()
    config = ModelConfig(dim=options.dim, layers=options.layers, seq=options.seq)
    stream = load_corpus().train
    swapped = swap_case(stream).to(options.device)

    def batches(text: Tensor) -> Batches:
        return random_batches(text, batch=options.batch, seq=options.seq, seed=options.seed)

    bar = Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        console=console,
    )
    with bar:

        def shown(description: str, steps: int) -> Step:
            task = bar.add_task(description, total=steps, loss=float("nan"))
            return lambda done, loss: bar.update(task, completed=done, loss=loss)

        torch.manual_seed(options.seed)
        base = GPT(config).to(options.device)
        text = batches(stream.to(options.device))
        train(base, text, options.base_steps, 1e-3, shown("base", options.base_steps))
        weights_to_bf16(base)
        folder = options.out / "base-fp8"
        stored = GPT(config).to(options.device)
        weights_to_bf16(stored)
        stored.load_state_dict(base.state_dict())
        blocktensor.convert(stored, skip_small=False)
        blocktensor.save_fp8(stored, folder, overwrite=folder.exists())
        del stored

        # one base at a time: the peak of one must not hold the other
        results = [
            adapt(base, "bf16", batches(swapped), options, shown("bf16 + adapters", options.steps))
        ]
        del base
        loaded = GPT(config).to(options.device)
        weights_to_bf16(loaded)
        blocktensor.load_fp8(loaded, folder)
        results.append(
            adapt(loaded, "FP8", batches(swapped), options, shown("FP8 + adapters", options.steps))
        )

    table = Table("base", "loss at first", "in the end", "base, bytes", "unchanged", "peak memory")
    for r in results:
        peak = "-" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**20:.1f} MiB"
        numbers = (f"{r.first_loss:.4f}", f"{r.final_loss:.4f}", f"{r.base_bytes:,}")
        table.add_row(r.base, *numbers, "yes" if r.base_unchanged else "NO", peak)
    console.print(table)
    change = (results[1].final_loss / results[0].final_loss - 1) * 100
    peaks = [r.peak_memory_bytes for r in results]
    memory = f", peak memory {peaks[1] / peaks[0]:.2f}x" if peaks[0] and peaks[1] else ""
    console.print(f"FP8 base against bf16: loss {change:+.2f} %{memory}; checkpoint in {folder}")
    report = {"options": {k: str(v) for k, v in vars(options).items()}, "change_percent": change}
    content = json.dumps({**report, "results": [asdict(r) for r in results]}, indent=1)
    (options.out / "result.json").write_text(content + "\n")
    return 0 if all(r.base_unchanged for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
