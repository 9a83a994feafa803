"""Where the memory of a Llama-8B-shaped stack goes, by policy: weights, saved activations, peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import blocktensor as bt

from .llama import BATCH, LAYERS, TIME, Shape, inputs, stack, step
from .timing import Call

QUICK: dict[str, Any] = {"layers": 1}
"""The arguments of a smoke run."""

_MIB = 2**20


def _shared(recipe: bt.Recipe) -> Callable[[nn.Module], object]:
    def prepare(model: nn.Module) -> None:
        bt.convert(model, recipe)
        bt.share_inputs(model)

    return prepare


def _fused(recipe: bt.Recipe, recompute: bool = False) -> Callable[[nn.Module], object]:
    def prepare(model: nn.Module) -> None:
        bt.convert(model, recipe)
        bt.fuse(model, recompute=recompute)

    return prepare


def _frozen(recipe: bt.Recipe | None) -> Callable[[nn.Module], object]:
    def prepare(model: nn.Module) -> None:
        model.requires_grad_(False)
        if recipe is not None:
            bt.convert(model, recipe)

    return prepare


NO_CACHE = bt.Recipe(cache_weight=False)
POLICIES: dict[str, Callable[[nn.Module], object]] = {
    "bf16": lambda model: None,
    "fp8": lambda model: bt.convert(model),
    "fp8, inputs shared": _shared(bt.Recipe()),
    "fp8, inputs shared, cache_weight=False": _shared(NO_CACHE),
    "fp8, fused": _fused(bt.Recipe()),
    "fp8, fused, recompute": _fused(bt.Recipe(), recompute=True),
    "fp8, fused, cache_weight=False": _fused(NO_CACHE),
    "fp8, fused, recompute, cache_weight=False": _fused(NO_CACHE, recompute=True),
    "bf16, frozen": _frozen(None),
    "fp8, frozen": _frozen(bt.Recipe()),
}


def saved_bytes(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes that one forward saves for its backward, each piece of memory once, without weights."""
    sizes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if not isinstance(saved, bt.BlockwiseFP8Weight):
            storage = saved.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = run(x)
    for weight in _memory_of(model):
        sizes.pop(weight.untyped_storage().data_ptr(), None)
    del y
    return sum(sizes.values())


def _memory_of(model: nn.Module) -> Iterator[Tensor]:
    """The plain tensors that parameters are made of."""
    for parameter in model.parameters():
        if isinstance(parameter, bt.BlockwiseFP8Weight):
            yield parameter.master
        elif isinstance(parameter, bt.BlockwiseFP8Tensor):
            for form in filter(None, parameter.operand):
                yield from (form.data, form.scale)
        else:
            yield parameter


def peak(step: Call) -> int:
    """Bytes allocated at most in a step, after the first steps."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def bytes_at_rest(model: nn.Module) -> int:
    """Bytes of masters, FP8 forms, plain parameters and buffers."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    for p in model.parameters():
        if isinstance(p, bt.BlockwiseFP8Weight):
            total += p.master.nbytes + p.cache.nbytes()
        else:
            total += p.operand.nbytes() if isinstance(p, bt.BlockwiseFP8Tensor) else p.nbytes
    return total


def _row(policy: str, mode: str, layers: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = stack(Shape(), layers, "cuda")
    POLICIES[policy](model)
    run = torch.compile(model, fullgraph=True) if mode == "compiled" else model
    x, grad = inputs()
    one, two = (peak(step(model, run, x, grad, number)) - before for number in (1, 2))
    x.grad = None
    model.zero_grad()
    return {
        "policy": policy,
        "mode": mode,
        "layers": layers,
        "tokens": BATCH * TIME,
        "elements": sum(p.numel() for p in model.parameters()),
        "weights_mib": round(bytes_at_rest(model) / _MIB, 1),
        "saved_mib": round(saved_bytes(model, run, x) / _MIB, 1),
        "peak_mib": round(one / _MIB, 1),
        "two_microbatches_mib": round(two / _MIB, 1),
    }


def measure(layers: int = LAYERS) -> Iterator[dict[str, Any]]:
    """One row a policy and mode: MiB of parameters, saved activations, and peaks of a step.

    The peak holds parameters, gradients, input, output gradient and all activations; it is that
    of the same mode's bf16 (frozen, for what is frozen) that ``peak_of_bf16`` divides by.
    """
    base: dict[tuple[str, bool], float] = {}
    for policy in POLICIES:
        for mode in ("eager", "compiled"):
            torch._dynamo.reset()
            row = _row(policy, mode, layers)
            kind = mode, "frozen" in policy
            base.setdefault(kind, row["peak_mib"])
            yield {**row, "peak_of_bf16": round(row["peak_mib"] / base[kind], 3)}
