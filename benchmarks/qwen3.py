"""A Qwen3-MoE of transformers: whole training steps, bf16 beside FP8. ``experts`` measures it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import blocktensor as bt

from .hf_models import adamw, in_bf16, step
from .memory import peak
from .timing import Call, round_robin

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, inputs shared",
    "fp8, inputs shared, head too",
    "fp8, fused",
    "fp8, fused, head too",
)
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
    model = in_bf16(transformers.Qwen3MoeForCausalLM, config, device)
    model.set_experts_implementation("grouped_mm")
    if name != "bf16":
        bt.convert(model, auto_filter_small_kn=shape.filter_small)
    if "shared" in name:
        bt.share_inputs(model)
    if "fused" in name:
        bt.fuse(model)
    if "head" in name:
        bt.to_blockwise_fp8_weights(model.lm_head)
    return model


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
