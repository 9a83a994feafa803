"""A Llama of transformers, six layers of 8B's: whole training steps and peaks, bf16 beside FP8."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import blocktensor as bt

from .hf_models import absent, adamw, in_bf16, step
from .memory import peak
from .timing import Call, round_robin

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, fused",
    "fp8, fused, recompute",
    "fp8, fused, head too",
    "fp8, fused, 128x128",
    "fp8, fused, 128x128, head too",
)


@dataclass(frozen=True)
class Shape:
    """A model, and the tokens of a step."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 6
    vocab: int = 32000
    batch: int = 4
    time: int = 2048


QUICK: dict[str, Any] = {"shape": Shape(layers=1, batch=1), "rounds": 2}
"""The arguments of a smoke run."""


def facts() -> dict[str, Any]:
    """Why nothing was measured, if so."""
    return {"absent": absent()}


def total(shape: Shape | None = None, rounds: int = 0) -> int:
    """How many rows ``measure`` will yield."""
    return len(VARIANTS)


def make_model(name: str, shape: Shape, device: torch.device | str = "cuda") -> Any:
    """The model as the variant has it, of the same values for every variant."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.time,
    }
    options: dict[str, Any] = {"use_cache": False, "attn_implementation": "sdpa"}
    config = transformers.LlamaConfig(**sizes, **options)
    model = in_bf16(transformers.LlamaForCausalLM, config, device)
    if name != "bf16":
        recipe = bt.Recipe(wgrad_input="128x128" if "128x128" in name else "1x128")
        bt.convert(model, recipe, head="fp8" if "head" in name else None)
    if "fused" in name:
        bt.fuse(model, recompute="recompute" in name)
    return model


def measure(shape: Shape | None = None, rounds: int = 10) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds a step, eager and compiled, and the peak of each alone."""
    if absent():
        return
    shape = shape or Shape()
    tokens = torch.randint(shape.vocab, (shape.batch, shape.time), device="cuda")
    steps: dict[str, Call] = {}
    peaks: dict[str, int] = {}
    for name in VARIANTS:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = make_model(name, shape)
        optimizer = adamw(model)
        for mode, run in (("eager", model), ("compiled", torch.compile(model))):
            key = f"{name}/{mode}"
            steps[key] = step(run, optimizer, tokens)
            peaks[key] = peak(steps[key]) - before
    ms = round_robin({key: [call] for key, call in steps.items()}, rounds, 30.0)
    for name in VARIANTS:
        row: dict[str, Any] = {"variant": name, "layers": shape.layers}
        row["tokens"] = shape.batch * shape.time
        for mode in ("eager", "compiled"):
            key, bf16 = f"{name}/{mode}", f"bf16/{mode}"
            row[f"{mode}_ms"] = round(ms[key], 3)
            row[f"{mode}_speedup"] = round(ms[bf16] / ms[key], 3)
            row[f"{mode}_peak_mib"] = round(peaks[key] / 2**20, 1)
            row[f"{mode}_peak_of_bf16"] = round(peaks[key] / peaks[bf16], 3)
        yield row
