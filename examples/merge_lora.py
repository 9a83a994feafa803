"""How much of what LoRA learned stays after a merge, in FP8 and in bf16. See ``--help``.

A Llama of transformers is trained on Python source. Adapters then teach it the same text with upper
and lower case exchanged, on a base that is frozen in FP8 and on one in bf16. Each is merged in
every way: frozen in FP8 again, rounded to nearest or stochastically, and in bf16.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn

from common.needs import needs

with needs("rich", "blocktensor", "transformers", "peft", install="'.[demo,frameworks]'"):
    from peft import LoraConfig, get_peft_model
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from transformers import LlamaConfig, LlamaForCausalLM

    import blocktensor
    from blocktensor import BlockwiseFP8Tensor
    from common.text import even_batches, load_corpus, random_batches

BYTES = 256
"""The vocabulary: text is read byte by byte."""

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    hidden: int
    inner: int
    layers: int
    heads: int
    batch: int
    seq: int
    held_out: int


LARGE = Size(hidden=768, inner=2304, layers=13, heads=12, batch=8, seq=512, held_out=8)
SMALL = Size(hidden=128, inner=256, layers=2, heads=2, batch=4, seq=64, held_out=4)


@dataclass
class Result:
    """One adapter, merged in one way; losses are of held-out text.

    Attributes:
        gain_kept: the share of the adapter's improvement that the merged model has.
        update_kept: the part of the merged change of weights along the adapter's, over that.
        logit_error: the norm of the difference from the logits with the adapter, over theirs.
    """

    base: str
    lr: float
    merged: str
    loss_before: float
    loss_adapter: float
    loss_merged: float
    gain_kept: float
    update_kept: float
    logit_error: float


def swap_case(stream: Tensor) -> Tensor:
    """Return the text with upper and lower case exchanged."""
    return torch.frombuffer(bytearray(bytes(stream.tolist()).swapcase()), dtype=torch.uint8)


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(input_ids=inputs).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(model: nn.Module, batches: Batches, steps: int, lr: float) -> None:
    """AdamW on what requires a gradient."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        loss_of(model, *next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Sequence[tuple[Tensor, Tensor]]) -> float:
    return sum(loss_of(model, *batch).item() for batch in held_out) / len(held_out)


@torch.no_grad()
def logits_of(model: Any, inputs: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=inputs).logits.float()
    return logits


def values(weight: Tensor) -> Tensor:
    """Return the values that a matmul reads, in fp32."""
    if isinstance(weight, BlockwiseFP8Tensor):
        return weight.dequantize(torch.float32)
    return weight.detach().float()


def deltas(model: Any) -> dict[str, Tensor]:
    """Return what adapters add to each weight, by the name of the module in the base."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().float()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


# Ways to merge: each takes a model with adapters, of its own, and returns one without


def merged_in_fp8(model: Any, rounding: Any) -> nn.Module:
    """Merge into an FP8 base, and freeze it again."""
    blocktensor.unfreeze(model)
    merged: nn.Module = model.merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # freeze says how much it keeps; the table does, too
        blocktensor.freeze(merged, rounding=rounding)
    return merged


def merged_from_fp8_in_bf16(model: Any) -> nn.Module:
    """Merge into the masters of an FP8 base, and load them into a model in bf16."""
    blocktensor.unfreeze(model)
    merged = model.merge_and_unload()
    plain = LlamaForCausalLM(merged.config).to(merged.device, torch.bfloat16)
    plain.load_state_dict(merged.state_dict())
    return plain


def merged_in_bf16(model: Any) -> nn.Module:
    """Merge into a bf16 base."""
    merged: nn.Module = model.merge_and_unload()
    return merged


def merged_in_bf16_then_fp8(model: Any) -> nn.Module:
    """Merge into a bf16 base, and freeze the result in FP8."""
    merged = model.merge_and_unload().requires_grad_(False)
    blocktensor.convert(merged, skip_small=False)
    return merged


WAYS: dict[str, dict[str, Callable[[Any], nn.Module]]] = {
    "FP8": {
        "FP8, nearest": lambda model: merged_in_fp8(model, "nearest"),
        "FP8, stochastic": lambda model: merged_in_fp8(model, "stochastic"),
        "bf16": merged_from_fp8_in_bf16,
    },
    "bf16": {"bf16": merged_in_bf16, "FP8, nearest": merged_in_bf16_then_fp8},
}


def adapt(
    base: nn.Module,
    kind: str,
    lr: float,
    batches: Batches,
    held_out: Sequence[tuple[Tensor, Tensor]],
    options: argparse.Namespace,
) -> Iterator[Result]:
    """Train adapters on a copy of a base; merge them in each way."""
    model: Any = copy.deepcopy(base)
    before = held_out_loss(model, held_out)
    torch.manual_seed(options.seed)
    config = LoraConfig(r=options.rank, target_modules="all-linear")
    model = get_peft_model(model, config)
    train(model, batches, options.steps, lr)
    model.eval()
    adapted, logits = held_out_loss(model, held_out), logits_of(model, held_out[0][0])
    added = deltas(model)
    olds = {name: values(base.get_submodule(name).weight) for name in added}  # type: ignore[arg-type]
    square = sum(float(x.square().sum()) for x in added.values())
    for way, merge in WAYS[kind].items():
        merged = merge(copy.deepcopy(model)).eval()
        loss = held_out_loss(merged, held_out)
        kept = 0.0
        for name, delta in added.items():
            weight: Any = merged.get_submodule(name).weight
            kept += float(((values(weight) - olds[name]) * delta).sum())
        error = (logits_of(merged, held_out[0][0]) - logits).norm() / logits.norm()
        yield Result(
            kind,
            lr,
            way,
            before,
            adapted,
            loss,
            (before - loss) / (before - adapted),
            kept / square,
            float(error),
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--small", action="store_true", help="a model for a CPU; its default there")
    parser.add_argument("--steps", type=int, help="of adapter training (200; small: 40)")
    parser.add_argument("--base-steps", type=int, help="of training the base (300; small: 100)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device(device))
    parser.add_argument("--out", type=Path, default=Path("runs/merge_lora"))
    options = parser.parse_args(argv)
    options.small = options.small or options.device.type == "cpu"
    options.steps = (40 if options.small else 200) if options.steps is None else options.steps
    if options.base_steps is None:
        options.base_steps = 100 if options.small else 300
    for flag in ("steps", "base_steps", "rank"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1")
    return options


def base_of(size: Size, text: Batches, options: argparse.Namespace) -> LlamaForCausalLM:
    """Train a model in bf16 with fp32 weights."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=BYTES,
        max_position_embeddings=size.seq,
    )
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = LlamaForCausalLM(config)
    train(model, text, options.base_steps, 1e-3)
    return model


def shown(results: Sequence[Result]) -> Table:
    """Return the table of all results."""
    table = Table("base", "lr", "before", "adapter", "merged", "loss", "gain kept", "update kept",
                  "logit error", box=SIMPLE)  # fmt: skip
    for r in results:
        losses = f"{r.loss_before:.4f}", f"{r.loss_adapter:.4f}", r.merged, f"{r.loss_merged:.4f}"
        shares = f"{r.gain_kept:.1%}", f"{r.update_kept:.1%}", f"{r.logit_error:.4f}"
        table.add_row(r.base, f"{r.lr:g}", *losses, *shares)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Train a base, adapt it with each learning rate on both bases, merge, compare."""
    options, console, begun = parse(argv), Console(width=110), time.perf_counter()
    size = SMALL if options.small else LARGE
    corpus = load_corpus()

    def batches(stream: Tensor) -> Batches:
        return random_batches(
            stream.to(options.device), batch=size.batch, seq=size.seq, seed=options.seed
        )

    trained = base_of(size, batches(corpus.train), options)
    count = sum(p.numel() for p in trained.parameters())
    console.print(
        f"{count / 1e6:.0f}M parameters; {time.perf_counter() - begun:.0f} s for the base"
    )
    swapped, other = swap_case(corpus.train), swap_case(corpus.heldout).to(options.device)
    held_out = list(even_batches(other, batch=size.batch, seq=size.seq, count=size.held_out))
    fp8 = copy.deepcopy(trained).bfloat16().requires_grad_(False)
    blocktensor.convert(fp8, skip_small=False)
    bases = {"FP8": fp8, "bf16": trained.bfloat16().requires_grad_(False)}
    results: list[Result] = []
    for lr in options.lr:
        for kind, base in bases.items():
            results += adapt(base, kind, lr, batches(swapped), held_out, options)
            console.print(f"{kind} base, lr {lr:g}: {time.perf_counter() - begun:.0f} s")
    console.print(shown(results))
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"options": {k: str(v) for k, v in vars(options).items()}, "size": asdict(size)}
    content = {**report, "parameters": count, "results": [asdict(r) for r in results]}
    (options.out / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
