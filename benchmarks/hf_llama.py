"""A Llama of transformers, six layers of 8B's: whole training steps and peaks, bf16 beside FP8."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import blocktensor as bt

from . import peers
from .llama import recipe_of
from .memory import peak
from .timing import Call, by_mode, peaks_by_mode, round_robin
from .turns import in_groups, measured_in_turns

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, fused",
    "fp8, fused, recompute",
    "fp8, fused, head too",
    "fp8, fused, wgrad_input=1x128",
)

_AT_ONCE = 3
"""Variants beside bf16 that fit into 80 GB, with the states of their optimizers."""


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
    return {"absent": absent() or peers.without_torchao()}


def absent() -> dict[str, str]:
    """Return why the model cannot be made here; empty if it can."""
    return peers.why_absent("transformers", "transformers")


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
        key = f"{name}/eager"
        steps[key] = step(model, adamw(model), tokens)
        peaks[key] = peak(steps[key]) - before
    return round_robin({key: [call] for key, call in steps.items()}, rounds, 30.0), peaks


def config_of(shape: Shape) -> Any:
    """Return transformers' configuration of a Llama."""
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
    return transformers.LlamaConfig(**sizes, **options)


def make_model(name: str, shape: Shape, device: torch.device | str = "cuda") -> Any:
    """The model as the variant has it, of the same values for every variant."""
    import transformers

    model = in_bf16(transformers.LlamaForCausalLM, config_of(shape), device)
    if name in peers.TORCHAO_TRAINS:
        model = peers.torchao_training(name, model)
    elif name != "bf16":
        bt.convert(model, recipe_of(name), convert_head="head" in name)
    if "fused" in name:
        bt.fuse(model, recompute="recompute" in name)
    return model


def calls(name: str, shape: Shape) -> dict[str, Call]:
    """Return the steps of a variant, eager and compiled."""
    tokens = torch.randint(shape.vocab, (shape.batch, shape.time), device="cuda")
    model = make_model(name, shape)
    optimizer = adamw(model)
    runs = {"eager": model, "compiled": torch.compile(model)}
    return {mode: step(run, optimizer, tokens) for mode, run in runs.items()}


def measure(shape: Shape | None = None, rounds: int = 10) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds a step, eager and compiled, and the peak of each alone."""
    if absent():
        return
    made = shape or Shape()
    names = [*VARIANTS, *(() if peers.without_torchao() else peers.TORCHAO_TRAINS)]
    for some, new in in_groups(names, _AT_ONCE):
        ms, peaks = measured_in_turns(some, functools.partial(calls, shape=made), rounds)
        for name in new:
            row = {"variant": name, "layers": made.layers, "tokens": made.batch * made.time}
            yield row | by_mode(ms, name) | peaks_by_mode(peaks, name)
