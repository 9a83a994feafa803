"""Fine-tune a transformers model whose linears run in FP8: all of it, and adapters. See ``--help``.

The model is one in a local folder, or a small Llama at random. Trainer trains all of its weights in
FP8. Then peft's LoRA trains adapters on the same weights, frozen in FP8 at 1 byte each. Both write
checkpoints that know nothing of FP8.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor

from common.needs import needs

with needs(
    "rich", "blocktensor", "transformers", "peft", "accelerate", install="'.[demo,frameworks]'"
):
    import transformers
    from peft import LoraConfig, get_peft_model
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback

    from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight
    from blocktensor.integrations.transformers import BlockwiseFP8Config
    from common.text import load_corpus

BYTES = 256
"""The vocabulary of the model at random, which reads text byte by byte."""

WAYS = ("full", "lora")


@dataclass
class Result:
    """The result of one fine-tuning."""

    way: str
    trained_parameters: int
    model_bytes: int
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_bytes: int | None = None

    @property
    def final_loss(self) -> float:
        """The mean over the last fifth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 5) :]
        return sum(tail) / len(tail)


class Shown(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Records the losses that Trainer logs, and shows them."""

    def __init__(self, losses: list[float], show: Callable[[int, float], None]) -> None:
        self.losses, self.show = losses, show

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            self.show(state.global_step, logs["loss"])


def random_llama(folder: Path, dim: int, layers: int, seq: int) -> None:
    """Write a Llama of random weights that reads bytes."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=layers,
        num_attention_heads=max(1, dim // 64),
        num_key_value_heads=max(1, dim // 64),
        max_position_embeddings=seq,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def tokens_of(options: argparse.Namespace) -> Tensor:
    """The text as tokens: of the model's tokenizer, or its bytes."""
    if options.text is None:
        text = bytes(load_corpus().train.tolist())
    else:
        text = options.text.read_bytes()
    if options.model is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    some = text[: 16 * options.steps * options.batch * options.seq].decode(errors="ignore")
    found: Tensor = tokenizer(some, return_tensors="pt").input_ids[0]
    return found


def windows(tokens: Tensor, options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Return the sequences of all steps, from places that the seed draws."""
    generator = torch.Generator().manual_seed(options.seed)
    count = options.steps * options.batch
    starts = torch.randint(len(tokens) - options.seq, (count,), generator=generator)
    sequences = [tokens[start : start + options.seq] for start in starts.tolist()]
    return [{"input_ids": x, "labels": x} for x in sequences]


def load(folder: Path, frozen: bool, options: argparse.Namespace) -> Any:
    """The model in FP8: masters in fp32 to be trained, or frozen with 1 byte a weight."""
    config = BlockwiseFP8Config(frozen=frozen, skip_small=not options.small)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if frozen else torch.float32, quantization_config=config
    ).to(options.device)


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes of the parameters; of frozen FP8 weights with their scales."""
    total = 0
    for x in model.parameters():
        if isinstance(x, BlockwiseFP8Tensor):
            total += x.format.nbytes(x.shape)
        else:
            total += x.numel() * x.element_size()
    return total


def fine_tune(
    way: str,
    folder: Path,
    data: Sequence[dict[str, Tensor]],
    options: argparse.Namespace,
    show: Callable[[int, float], None],
) -> Result:
    """Train in one way and save the model, or its adapters, in ``options.out / way``."""
    torch.manual_seed(options.seed)
    cuda = options.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(options.device)
    model = load(folder, way == "lora", options)
    if not any(isinstance(x, (BlockwiseFP8Tensor, BlockwiseFP8Weight)) for x in model.parameters()):
        sys.exit(f"{folder}: nothing in FP8; --small converts small weights, too")
    if way == "lora":
        model = get_peft_model(model, LoraConfig(r=options.rank, target_modules="all-linear"))
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    result = Result(way, trained, bytes_of(model))
    arguments = TrainingArguments(
        output_dir=str(options.out / way),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lora_lr if way == "lora" else options.lr,
        warmup_steps=options.steps // 10,
        lr_scheduler_type="cosine",
        bf16=True,
        use_cpu=not cuda,
        torch_compile=options.compile,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=cuda,
        seed=options.seed,
    )
    shown = Shown(result.losses, show)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[shown])
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    result.seconds = time.perf_counter() - start
    if cuda:
        result.peak_memory_bytes = torch.cuda.max_memory_allocated(options.device)
    trainer.save_model()
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", type=Path, help="a local folder; default: a Llama at random")
    parser.add_argument("--text", type=Path, help="a file; default: Python's standard library")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3, help="of all weights")
    parser.add_argument("--lora-lr", type=float, default=5e-3, help="of adapters")
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--dim", type=int, default=256, help="of the Llama at random")
    parser.add_argument("--layers", type=int, default=4, help="of the Llama at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="weights too small to gain speed, too")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--device", type=torch.device, default=torch.device(device))
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_hf"))
    options = parser.parse_args(argv)
    for flag in ("steps", "batch", "seq", "rank", "dim", "layers"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1")
    if options.model is not None and not (options.model / "config.json").exists():
        parser.error(f"--model {options.model}: no config.json there")
    options.small = options.small or options.model is None
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune in every way that was asked for, compare, and write ``result.json``."""
    options, console = parse(argv), Console()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = options.model
    if folder is None:
        folder = options.out / "random-llama"
        torch.manual_seed(options.seed)
        random_llama(folder, options.dim, options.layers, options.seq)
    data = windows(tokens_of(options), options)
    results = []
    bar = Progress(
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        console=console,
    )
    with bar:
        for way in options.ways:
            task = bar.add_task(way, total=options.steps, loss=float("nan"))

            def show(step: int, loss: float, task: Any = task) -> None:
                bar.update(task, completed=step, loss=loss)

            results.append(fine_tune(way, folder, data, options, show))
            if options.model is None and way == "full":
                folder = options.out / "full"  # adapters on what has learnt something

    heads = ("", "trained", "model, MiB", "loss at first", "in the end", "steps/s", "peak memory")
    table = Table(*heads)
    for r in results:
        peak = "-" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**20:.0f} MiB"
        table.add_row(
            r.way,
            f"{r.trained_parameters:,}",
            f"{r.model_bytes / 2**20:.1f}",
            f"{r.losses[0]:.4f}",
            f"{r.final_loss:.4f}",
            f"{len(r.losses) / r.seconds:.2f}",
            peak,
        )
    console.print(table)
    console.print(f"checkpoints in {options.out}")
    report = {
        "options": {k: str(v) for k, v in vars(options).items()},
        "results": [asdict(r) | {"final_loss": r.final_loss} for r in results],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
