"""A Qwen3-MoE of transformers: whole training steps, bf16 beside FP8. ``experts`` measures it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import blocktensor as bt

from .memory import peak
from .timing import Call, round_robin

VARIANTS = ("bf16", "fp8", "fp8, inputs shared", "fp8, inputs shared, head too")
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """A model, and the tokens of a step."""

    hidden: int
    experts: int
    expert_hidden: int
    layers: int = 2
    top_k: int = 8
    vocab: int = 32768
    batch: int = 4
    time: int = 4096
    filter_small: bool = True


SHAPES = (Shape(4096, 32, 1536), Shape(2048, 64, 768))
"""Experts of Qwen3-235B, and those of Qwen3-30B, whose steps go elsewhere for the most part."""


def absent() -> dict[str, str]:
    """Why the model cannot be made here; empty if it can."""
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        return {"transformers": f"{type(error).__name__}: {error}"}
    return {}


def make_model(name: str, shape: Shape, device: torch.device | str = "cuda") -> Any:
    """The model in bf16, or converted, of the same values for every variant."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": max(1, shape.hidden // HEAD_DIM),
        "num_key_value_heads": max(1, shape.hidden // HEAD_DIM // 8),
        "head_dim": HEAD_DIM,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.time,
    }
    config = transformers.Qwen3MoeConfig(**sizes, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).set_experts_implementation("grouped_mm")
    if name != "bf16":
        bt.convert(model, auto_filter_small_kn=shape.filter_small)
    if "shared" in name:
        bt.share_inputs(model)
    if "head" in name:
        bt.to_blockwise_fp8_weights(model.lm_head)
    return model


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


def measure(shape: Shape, rounds: int) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds a step in eager mode, and peak memory of each model alone."""
    tokens = torch.randint(shape.vocab, (shape.batch, shape.time), device="cuda")
    steps: dict[str, Call] = {}
    peaks: dict[str, int] = {}
    for name in VARIANTS:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = make_model(name, shape)
        steps[name] = step(model, adamw(model), tokens)
        peaks[name] = peak(steps[name]) - before
    ms = round_robin({name: [call] for name, call in steps.items()}, rounds, 30.0)
    for name in VARIANTS:
        yield row(name, shape, ms, peaks)


def row(name: str, shape: Shape, ms: dict[str, float], peaks: dict[str, int]) -> dict[str, Any]:
    """One row of the results."""
    return {
        "what": f"Qwen3-MoE, {shape.layers} layers",
        "experts": shape.experts,
        "tokens": shape.batch * shape.time,
        "dim": shape.hidden,
        "hidden": shape.expert_hidden,
        "variant": name,
        "ms": round(ms[name], 3),
        "speedup": round(ms["bf16"] / ms[name], 3),
        "peak_mib": round(peaks[name] / 2**20, 1),
        "peak_of_bf16": round(peaks[name] / peaks["bf16"], 3),
    }
