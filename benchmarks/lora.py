"""LoRA on a frozen base: layers of transformers' Llama-8B with peft's adapters, bf16 beside FP8.

Adapters of rank 16 lie on all linear layers of the decoder, in fp32 (peft's default) or in the
dtype of the base. A step is a forward, a backward and AdamW. With FP8 the base is frozen in FP8 and
fused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import blocktensor as bt

from . import peers
from .hf_llama import absent as without_transformers
from .hf_llama import step
from .popular import MODELS, Model, use_causal_attention
from .popular import make_model as make_base
from .timing import Call, by_mode, peaks_by_mode
from .turns import measured_in_turns

NAME = "Llama-3.1-8B"
ADAPTERS = {"adapters in fp32": True, "adapters in bf16": False}
"""How adapters are stored, and peft's ``autocast_adapter_dtype`` for it."""

VARIANTS = tuple(f"{base}, {adapters}" for base in ("bf16", "fp8") for adapters in ADAPTERS)
RANK = 16
TOKENS = (1, 1024), (1, 4096), (4, 4096)
"""Sequences of a step, and their lengths."""

_WORDS = 1024

QUICK: dict[str, Any] = {
    "of": replace(MODELS[NAME], hidden=1024, inner=2048, heads=8, kv_heads=2, layers=1),
    "tokens": TOKENS[:1],
    "rounds": 2,
}
"""The arguments of a smoke run."""


def facts() -> dict[str, Any]:
    """Return the reason why nothing was measured, if there is one."""
    return {"absent": absent()}


def absent() -> dict[str, str]:
    """Return why the model or its adapters cannot be made here; empty if they can."""
    return without_transformers() | peers.why_absent("peft", "peft")


def make_model(name: str, of: Model, device: torch.device | str = "cuda") -> Any:
    """Return the model of a variant with its adapters; the base has the same values in all."""
    from peft import LoraConfig, get_peft_model

    base = make_base("bf16", of, device)
    use_causal_attention(base)
    base.requires_grad_(False)
    if name.startswith("fp8"):
        bt.convert(base, skip_small=False)
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    autocast = next(value for adapters, value in ADAPTERS.items() if adapters in name)
    model = get_peft_model(base, lora, autocast_adapter_dtype=autocast)
    if name.startswith("fp8"):
        bt.fuse(model)
    return model


def calls(name: str, of: Model, tokens: tuple[int, int]) -> dict[str, Call]:
    """Return a training step of a variant, eager and compiled, of ``tokens[sequences, length]``."""
    model = make_model(name, of)
    given = torch.randint(_WORDS, tokens, device="cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def with_threads(run: Any) -> Call:
        once = step(run, optimizer, given)

        def call() -> None:
            with torch.autograd.set_multithreading_enabled(True):  # torch's default
                once()

        return call

    return {"eager": with_threads(model), "compiled": with_threads(torch.compile(model))}


def measure(
    of: Model | None = None, tokens: tuple[tuple[int, int], ...] = TOKENS, rounds: int = 10
) -> Iterator[dict[str, Any]]:
    """Yield one row a variant and number of tokens: milliseconds a step, and the peak of each."""
    if absent():
        return
    model = of or MODELS[NAME]
    for count in tokens:
        prepare = functools.partial(calls, of=model, tokens=count)
        ms, peaks = measured_in_turns(VARIANTS, prepare, rounds)
        for name in VARIANTS:
            base, _, adapters = name.partition(", ")
            row: dict[str, Any] = {"variant": base, "adapters": adapters, "layers": model.layers}
            row |= {"sequences": count[0], "length": count[1]}
            same = [_with(adapters, found) for found in (ms, peaks)]
            yield row | by_mode(same[0], base) | peaks_by_mode(same[1], base)


def _with(adapters: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found with these adapters, by ``base/mode``."""
    return {
        key.replace(f", {adapters}", ""): each for key, each in found.items() if adapters in key
    }
