"""Activations that wait for backward: in high precision, in FP8, or computed again.

Layers of a Llama of transformers, forward and backward. A step holds what autograd saves; its peak
holds weights, gradients and FP8 forms of weights too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import blocktensor as bt

from .hf_llama import Shape, absent, config_of, in_bf16
from .llama import recipe_of
from .memory import peak
from .popular import use_causal_attention
from .timing import Call
from .turns import measured_in_turns

IN_FP8 = ", saved in FP8"
LEAST = "fp8, fused, recompute, cache_weight=False"

VARIANTS = (
    "bf16",
    f"bf16{IN_FP8}",
    "bf16, checkpoints",
    "fp8",
    f"fp8{IN_FP8}",
    "fp8, fused, recompute",
    f"fp8, fused, recompute{IN_FP8}",
    f"{LEAST}{IN_FP8}",
    f"{LEAST}{IN_FP8}, half of the checkpoints",
    f"{LEAST}{IN_FP8}, checkpoints",
)
"""Every FP8 variant has bf16's weights. With checkpoints the forward of each layer runs again."""

_MIB = 2**20

LAYERS = Shape(layers=4, vocab=8)  # layers get embeddings, so that few words will do

QUICK: dict[str, Any] = {"shape": replace(LAYERS, layers=2), "tokens": (1024,), "rounds": 2}
"""The arguments of a smoke run."""


def facts() -> dict[str, Any]:
    """Return the reason why nothing was measured, if there is one."""
    return {"absent": absent()}


def make_model(name: str, shape: Shape, device: torch.device | str = "cuda") -> Any:
    """Return the layers as the variant has them, with the same values for every variant."""
    import transformers

    model = in_bf16(transformers.LlamaModel, config_of(shape), device)
    use_causal_attention(model)
    if name.startswith("fp8"):
        bt.convert(model, recipe_of(name))
    if "fused" in name:
        bt.fuse(model, recompute="recompute" in name)
    if "checkpoints" in name:
        for index in range(0, shape.layers, 2 if "half" in name else 1):
            model.layers[index] = checkpoint_wrapper(model.layers[index])
    return model


class Step:
    """A forward and backward of embeddings ``x[1, tokens, hidden]``, which can be halved.

    Args:
        model: the layers.
        run: the model, perhaps compiled.
        x: requires a gradient.
        grad: the gradient of the output.
        in_fp8: save activations in FP8.
    """

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], x: Tensor, grad: Tensor, in_fp8: bool
    ) -> None:
        self.model, self.run, self.x, self.grad = model, run, x, grad
        self.context = bt.saved_tensors_in_fp8() if in_fp8 else contextlib.nullcontext()

    def forward(self) -> Tensor:
        """Return the output ``[1, tokens, hidden]``."""
        with self.context:
            output: Tensor = self.run(inputs_embeds=self.x).last_hidden_state
        return output

    def drop_gradients(self) -> None:
        """Drop the gradients of the last step."""
        self.x.grad = None
        self.model.zero_grad()

    def __call__(self) -> None:
        self.drop_gradients()
        self.forward().backward(self.grad)


def held(step: Step) -> int:
    """Return the bytes that a forward adds for its backward, without FP8 forms of weights."""
    step.drop_gradients()
    before = torch.cuda.memory_allocated()
    output = step.forward()
    added = torch.cuda.memory_allocated() - before - output.nbytes
    weights = [p for p in step.model.parameters() if isinstance(p, bt.BlockwiseFP8Weight)]
    added -= sum(weight.cache.nbytes() for weight in weights)
    output.backward(step.grad)
    return added


def memory(call: Call) -> dict[str, int]:
    """Return the bytes that a step holds between forward and backward, and its peak."""
    assert isinstance(call, Step)
    top = peak(call)  # warms up
    return {"held": held(call), "peak": top}


def calls(name: str, shape: Shape) -> dict[str, Call]:
    """Return the steps of a variant by mode."""
    model = make_model(name, shape)
    x = torch.randn(1, shape.time, shape.hidden, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    runs: dict[str, Callable[..., Any]] = {"eager": model}
    if "checkpoints" not in name:
        runs["compiled"] = torch.compile(model)
    x.requires_grad_()
    return {mode: Step(model, run, x, grad, IN_FP8 in name) for mode, run in runs.items()}


def measure(
    shape: Shape | None = None, tokens: tuple[int, ...] = (4096, 8192), rounds: int = 8
) -> Iterator[dict[str, Any]]:
    """Yield one row a variant, mode and number of tokens.

    ``speedup`` is over bf16 in the same mode, ``of_own`` over the variant that saves in high
    precision.
    """
    if absent():
        return
    made = shape or LAYERS
    for count in tokens:
        prepare = functools.partial(calls, shape=replace(made, time=count))
        ms, found = measured_in_turns(VARIANTS, prepare, rounds, peak_of=memory)
        for key, time in ms.items():
            name, _, mode = key.rpartition("/")
            yield {
                "variant": name,
                "mode": mode,
                "tokens": count,
                "layers": made.layers,
                **_beside(found[key], found[f"bf16/{mode}"]),
                "ms": round(time, 3),
                "speedup": round(ms[f"bf16/{mode}"] / time, 3),
                "of_own": _of_own(ms, key),
            }


def _beside(found: dict[str, int], bf16: dict[str, int]) -> dict[str, float]:
    row = {}
    for what, count in found.items():
        row[f"{what}_mib"] = round(count / _MIB, 1)
        row[f"{what}_of_bf16"] = round(count / bf16[what], 3)
    return row


def _of_own(ms: dict[str, float], key: str) -> float | None:
    own = key.replace(IN_FP8, "")
    return round(ms[own] / ms[key], 3) if own != key and own in ms else None
