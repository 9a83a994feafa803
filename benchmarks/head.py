"""A language model's head and its loss, forward + backward: bf16, and FP8 in chunks of tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor as bt

from .timing import Call, round_robin

TOKENS = 8192
SHAPES = ((4096, 128256), (2048, 151936), (4096, 32000))
"""Features and words: Llama 3 8B, Qwen3 of 2048 features, Llama 2 7B."""

QUICK: dict[str, Any] = {"shapes": ((1024, 4096),), "rounds": 2}
"""The arguments of a smoke run."""

Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def all_logits(x: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    """Compute the loss as most models do."""
    return F.cross_entropy(head(x).float(), target)


def in_chunks(x: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    """The logits of some tokens at a time."""
    return bt.functional.linear_cross_entropy(x, head.weight, target)


def variants() -> dict[str, tuple[bool, Loss]]:
    """Return by name if the head is FP8, and its loss."""
    return {
        "bf16": (False, all_logits),
        "bf16, compiled": (False, torch.compile(all_logits, fullgraph=True)),
        "fp8": (True, all_logits),
        "fp8, in chunks": (True, in_chunks),
    }


def _call(head: nn.Linear, loss: Loss, x: Tensor, target: Tensor) -> Call:
    def once() -> None:
        x.grad = head.weight.grad = None
        loss(x, head, target).backward()

    return once


def _peak(call: Call) -> int:
    """Bytes that a call takes at once beside what is allocated before it."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(
    shapes: tuple[tuple[int, int], ...] = SHAPES, rounds: int = 8
) -> Iterator[dict[str, Any]]:
    """One row a shape and variant: milliseconds, peak memory, and both over bf16."""
    for dim, words in shapes:
        torch.manual_seed(0)
        x = torch.randn(TOKENS, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        target = torch.randint(0, words, (TOKENS,), device="cuda")
        calls: dict[str, Call] = {}
        for name, (is_fp8, loss) in variants().items():
            head = nn.Linear(dim, words, bias=False, device="cuda", dtype=torch.bfloat16)
            if is_fp8:
                bt.to_blockwise_fp8_weights(head)
            calls[name] = _call(head, loss, x, target)
        peaks = {}
        for name, call in calls.items():
            peaks[name] = _peak(call)
            x.grad = None
        ms = round_robin({name: [call] for name, call in calls.items()}, rounds, 60.0)
        for name in calls:
            yield {
                "variant": name,
                "dim": dim,
                "words": words,
                "tokens": TOKENS,
                "ms": round(ms[name], 3),
                "speedup": round(ms["bf16"] / ms[name], 3),
                "peak_mib": round(peaks[name] / 2**20),
                "peak_of_bf16": round(peaks[name] / peaks["bf16"], 3),
            }
