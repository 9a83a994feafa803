"""A Llama of transformers, six layers of 8B's: whole training steps and peaks, bf16 beside FP8."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import blocktensor as bt

from .memory import peak
from .timing import MODES, Call, by_mode, round_robin

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
    """Return the reason why nothing was measured, if there is one."""
    return {"absent": absent()}


def absent() -> dict[str, str]:
    """Return why the model cannot be made here; empty if it can."""
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        return {"transformers": f"{type(error).__name__}: {error}"}
    return {}


def in_bf16(make: Callable[[Any], Any], config: Any, device: torch.device | str) -> Any:
    """The model that ``make`` makes of ``config``, of the same values in every call."""
    torch.manual_seed(0)
    with torch.device(device):
        model = make(config)
    return model.to(torch.bfloat16)


def adamw(model: Any) -> torch.optim.Optimizer:
    """The optimizer of the steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Call:
    """A forward, backward and optimizer step of one batch ``[batch, time]``."""

    def once() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once


def times_and_peaks(
    names: Sequence[str],
    make: Callable[[str], Any],
    tokens: torch.Tensor,
    rounds: int,
    modes: Sequence[str] = MODES[:1],
) -> tuple[dict[str, float], dict[str, int]]:
    """Train every variant; return milliseconds a step and peak bytes of each model alone.

    Keys are ``variant/mode``.
    """
    steps: dict[str, Call] = {}
    peaks: dict[str, int] = {}
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = make(name)
        optimizer = adamw(model)
        for mode in modes:
            run = torch.compile(model) if mode == "compiled" else model
            key = f"{name}/{mode}"
            steps[key] = step(run, optimizer, tokens)
            peaks[key] = peak(steps[key]) - before
    return round_robin({key: [call] for key, call in steps.items()}, rounds, 30.0), peaks


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
        bt.convert(model, recipe, convert_head="head" in name)
    if "fused" in name:
        bt.fuse(model, recompute="recompute" in name)
    return model


def measure(shape: Shape | None = None, rounds: int = 10) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds a step, eager and compiled, and the peak of each alone."""
    if absent():
        return
    made = shape or Shape()
    tokens = torch.randint(made.vocab, (made.batch, made.time), device="cuda")
    make = functools.partial(make_model, shape=made)
    ms, peaks = times_and_peaks(VARIANTS, make, tokens, rounds, MODES)
    for name in VARIANTS:
        row = {"variant": name, "layers": made.layers, "tokens": tokens.numel()}
        row |= by_mode(ms, name)
        for mode in MODES:
            of_mode = peaks[f"{name}/{mode}"]
            row[f"{mode}_peak_mib"] = round(of_mode / 2**20, 1)
            row[f"{mode}_peak_of_bf16"] = round(of_mode / peaks[f"bf16/{mode}"], 3)
        yield row
