"""Layers of popular models at the numbers of tokens that people train with, bf16 beside FP8.

Each model is its class of transformers with a few of its layers, without an optimizer; the head has
few words. A step is a forward and a backward, eager with torch's default threads of autograd, and
captured into a CUDA graph. Linear layers of every size are converted; by default ``convert`` leaves
those of Qwen3-0.6B in bf16, and some small ones of others.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import blocktensor as bt

from .hf_llama import absent, in_bf16
from .results import AUTOGRAD
from .timing import Call, by_mode, graphed, round_robin

VARIANTS = "bf16", "fp8", "fp8, fused"
TOKENS = 1024, 4096, 16384
_SEQUENCE = 4096
_WORDS = 1024


@dataclass(frozen=True)
class Model:
    """A model of transformers: the prefix of its classes, its sizes, and how many layers to run."""

    family: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int = 128
    others: dict[str, Any] = field(default_factory=dict)


_A3B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {
    "Qwen3-0.6B": Model("Qwen3", 1024, 3072, 16, 8, layers=6),
    "Llama-3.2-1B": Model("Llama", 2048, 8192, 32, 8, layers=6, head_dim=64),
    "Qwen3-1.7B": Model("Qwen3", 2048, 6144, 16, 8, layers=6),
    "Qwen3-4B": Model("Qwen3", 2560, 9728, 32, 8, layers=6),
    "Llama-3.1-8B": Model("Llama", 4096, 14336, 32, 8, layers=4),
    "Qwen3-14B": Model("Qwen3", 5120, 17408, 40, 8, layers=4),
    "Qwen3-32B": Model("Qwen3", 5120, 25600, 64, 8, layers=3),
    "Llama-3.1-70B": Model("Llama", 8192, 28672, 64, 8, layers=2),
    "Qwen3-30B-A3B": Model("Qwen3Moe", 2048, 6144, 32, 4, layers=3, others=_A3B),
}
QUICK: dict[str, Any] = {"models": ["Qwen3-0.6B"], "tokens": TOKENS[:1], "rounds": 2}
"""The arguments of a smoke run."""


def facts() -> dict[str, Any]:
    """Return the reason why nothing was measured, if there is one, and where backwards ran."""
    return {"absent": absent(), "environment": {"backward": AUTOGRAD}}


def make_model(name: str, of: Model, device: torch.device | str = "cuda") -> Any:
    """Return the model as the variant has it, of the same values for every variant."""
    import transformers

    config = getattr(transformers, f"{of.family}Config")(
        hidden_size=of.hidden,
        intermediate_size=of.inner,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=of.head_dim,
        num_hidden_layers=of.layers,
        vocab_size=_WORDS,
        use_cache=False,
        attn_implementation="sdpa",
        **of.others,
    )
    model = in_bf16(getattr(transformers, f"{of.family}ForCausalLM"), config, device)
    if name != "bf16":
        bt.convert(model, skip_small=False)
    if "fused" in name:
        bt.fuse(model)
    return model


def step(model: Any, tokens: torch.Tensor) -> Call:
    """Return a call of a forward and backward of ``tokens[batch, time]``."""
    leaves = list(model.parameters())

    def once() -> None:
        for leaf in leaves:
            leaf.grad = None
        model(input_ids=tokens, labels=tokens).loss.backward()

    return once


def use_causal_attention(model: Any) -> None:
    """Give attention no mask, and ``is_causal`` instead.

    While a stream is captured or a model is compiled, transformers cannot read whether sequences
    are packed, and builds a mask with which torch takes a slow kernel. An eager step finds out, and
    needs no mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    model.config._attn_implementation = "causal"


@contextmanager
def causal_attention(model: Any) -> Iterator[None]:
    """Use causal attention within the block."""
    before = model.config._attn_implementation
    use_causal_attention(model)
    try:
        yield
    finally:
        model.config._attn_implementation = before


def measure(
    models: Sequence[str] = tuple(MODELS), tokens: Sequence[int] = TOKENS, rounds: int = 5
) -> Iterator[dict[str, Any]]:
    """One row for each model, number of tokens and variant, with the speed-ups over bf16."""
    for model in () if absent() else models:
        of = MODELS[model]
        made = {name: make_model(name, of) for name in VARIANTS}
        for count in tokens:
            yield from _rows(model, of, made, count, rounds)
        del made
        gc.collect()
        torch.cuda.empty_cache()


def _rows(
    model: str, of: Model, made: dict[str, Any], count: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model and a number of tokens."""
    batch = max(1, count // _SEQUENCE)
    given = torch.randint(_WORDS, (batch, count // batch), device="cuda")
    calls: dict[str, list[Call]] = {}
    with torch.autograd.set_multithreading_enabled(True):  # torch's default
        for name, each in made.items():
            calls[f"{name}/eager"] = [step(each, given)]
            if of.family != "Qwen3Moe":  # whose routing waits for the GPU
                with causal_attention(each):
                    calls[f"{name}/graphs"] = [graphed(step(each, given))]
        ms = round_robin(calls, rounds, 30.0)
    for name in made:
        row = {"model": model, "layers": of.layers, "tokens": count, "variant": name}
        yield row | by_mode(ms, name)
