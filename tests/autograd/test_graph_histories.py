"""Random histories of autograd over FP8 functions, beside the same model in plain torch ops.

The plain model multiplies dequantized casts, product by product. Both are driven by one list of
events: hooks that change gradients, parts of backwards, checkpointing, compiled parts. Every output
and every gradient is compared. ``BLOCKTENSOR_HISTORIES=500`` runs more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, functional
from blocktensor.autograd.norm import normed
from blocktensor.ops import reference as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from tests.support.compiling import instantiates
from tests.support.groups import ends, ranges
from tests.support.models import randn
from tests.support.numeric import relative_error

Names = list[tuple[str, Tensor]]
HISTORIES = int(os.environ.get("BLOCKTENSOR_HISTORIES", "24"))
K, TOKENS, WORDS = 160, 70, 96
SIZES = (30, 0, 40)


def rounded(x: Tensor, format: BlockFormat, columnwise: bool = False) -> Tensor:
    """The values of one cast of a matrix."""
    if columnwise:
        return casts.dequantize(casts.quantize_columnwise(x, format), x.dtype).t()
    return casts.dequantize(casts.quantize_rowwise(x, format), x.dtype)


class PlainLinear(torch.autograd.Function):
    """A linear of dequantized casts; of the rows of each group if there are several weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rows = [slice(None)] if offs is None else ranges(offs)
        y = x.new_zeros(*x.shape[:-1], w.shape[-2])
        for rows, each in zip(ctx.rows, w[None] if w.ndim == 2 else w, strict=True):
            if len(x[rows]):
                y[rows] = rounded(x[rows], BLOCKS_1X128) @ rounded(each, BLOCKS_128X128).t()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), (x, w) = grads, ctx.saved_tensors
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        ws, dws = (t[None] if t.ndim == 2 else t for t in (w, dw))
        for rows, each, of_each in zip(ctx.rows, ws, dws, strict=True):
            if len(x[rows]):
                dx[rows] = rounded(g[rows], BLOCKS_1X128) @ rounded(each, BLOCKS_128X128)
                g_col = rounded(g[rows], BLOCKS_1X128, True)
                x_col = rounded(x[rows], BLOCKS_128X128, True)
                of_each += g_col.t() @ x_col
        return dx, dw, None


def plain(x: Tensor, w: Tensor, offs: Tensor | None = None) -> Tensor:
    made: Tensor = PlainLinear.apply(x, w, offs)
    return made


def plain_gated(x: Tensor, *w: Tensor, offs: Tensor | None = None) -> Tensor:
    y = plain(F.silu(plain(x, w[0], offs)) * plain(x, w[1], offs), w[2], offs)
    return torch.ops.aten._unsafe_view(y, y.shape)  # hooks of a gated MLP run once in a split


def straight_through(x: Tensor) -> Tensor:
    """The values of a cast, whose gradient passes."""
    return x + (rounded(x, BLOCKS_1X128) - x).detach()


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    return straight_through(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)


def normed_and_cast(x: Tensor, w: Tensor) -> Tensor:
    return functional.quantize(normed(x, w, 1e-6, "llama")).dequantize()


def quantized(x: Tensor, *w: Tensor) -> Tensor:
    q = functional.quantize(x)
    return functional.linear(q, w[0]) + functional.linear(q, w[1]) + q.dequantize()


E = len(SIZES)
# name: the shapes of weights, and the function in FP8 and from plain products
KINDS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear": ([(K, K)], F.linear, plain),
    "grouped": (
        [(E, K, K)],
        lambda x, w: functional.grouped_linear(x, w, ends(*SIZES)),
        lambda x, w: plain(x, w, ends(*SIZES)),
    ),
    "gated": ([(K, K)] * 3, functional.gated_mlp, plain_gated),
    "experts": (
        [(E, K, K)] * 3,
        lambda x, *w: functional.gated_experts(x, *w, ends(*SIZES)),
        lambda x, *w: plain_gated(x, *w, offs=ends(*SIZES)),
    ),
    "norm": ([(K,)], normed_and_cast, plain_norm),
    "quantized": (
        [(K, K)] * 2,
        quantized,
        lambda x, *w: plain(x, w[0]) + plain(x, w[1]) + straight_through(x),
    ),
}


class Part(nn.Module):
    """One of the functions ``[T, K]`` to ``[T, K]``, in FP8 or from plain products."""

    def __init__(self, kind: str, fp8: bool, seed: int) -> None:
        super().__init__()
        shapes, *runs = KINDS[kind]
        self.run = runs[0 if fp8 else 1]
        self.weights = nn.ParameterList(
            randn(*s, seed=seed + i, dtype=torch.float32) / K**0.5 for i, s in enumerate(shapes)
        )
        if fp8 and kind == "linear":
            self.weights[0] = nn.Parameter(BlockwiseFP8Weight(self.weights[0].detach()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *(self.weights[i] for i in range(len(self.weights))))


WAYS = ("plain", "plain", "checkpoint", "reentrant", "compiled")


class History:
    """The events of one seed, each drawn before either model runs."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.kinds = [draw.choice([*KINDS]) for _ in range(draw.randint(1, 3))]
        self.runs = [draw.choice(WAYS) for _ in self.kinds]
        if seed % 8:  # compilation takes a second
            self.runs = ["plain" if run == "compiled" else run for run in self.runs]
        self.hooks = [
            draw.choice(("", "", "tensor", "prehook", "posthook", "retain", "in place", "twice"))
            for _ in self.kinds
        ]
        self.head = draw.random() < 0.3
        self.backward = draw.choice(("whole", "inputs", "grad", "twice", "split"))
        if self.backward == "split" and torch.__version__ < (2, 13):  # see `needs_halves`
            self.backward = "whole"
        self.frozen = draw.random() < 0.2
        self.chosen = draw.randint(0, 2**20)
        self.seed = seed

    def run(self, fp8: bool) -> dict[str, Tensor]:
        """The output and all gradients, by name."""
        parts = [Part(kind, fp8, 10 * i + self.seed) for i, kind in enumerate(self.kinds)]
        if self.frozen:
            parts[0].requires_grad_(False)
        leaf = randn(TOKENS, K, seed=self.seed, dtype=torch.float32, grad=True)
        head = (randn(WORDS, K, seed=3, dtype=torch.float32) / K**0.5).requires_grad_()
        names: Names = [("x", leaf)]
        for i, part in enumerate(parts):
            names += [(f"{i}.{n}", p) for n, p in part.named_parameters() if p.requires_grad]
        names += [("head", head)] if self.head else []
        seen: dict[str, Tensor] = {}
        x = start = leaf * 1.0
        for i, (part, how, hook) in enumerate(zip(parts, self.runs, self.hooks, strict=True)):
            x = self.hooked(self.called(part, how, x), hook, i, seen, x)
        if self.head:
            target = torch.arange(TOKENS) % WORDS
            loss = functional.linear_cross_entropy(x, head, target) if fp8 else None
            x = F.cross_entropy(plain(x, head), target) if loss is None else loss
        seen["y"] = x.detach().clone()
        self.differentiate(x, randn(*x.shape, seed=99, dtype=torch.float32), names, start, seen)
        for name, tensor in names:
            if tensor.grad is not None:
                seen[f"grad {name}"] = tensor.grad
        return seen

    def called(self, part: nn.Module, how: str, x: Tensor) -> Tensor:
        if how == "compiled":
            part.compile(backend="aot_eager")
        again = partial(checkpoint, part, use_reentrant=how == "reentrant")
        made: Tensor = (again if how in ("checkpoint", "reentrant") else part)(x)
        return made

    def hooked(self, y: Tensor, hook: str, i: int, seen: dict[str, Tensor], x: Tensor) -> Tensor:
        def keep(name: str, g: Tensor | None) -> None:
            if g is not None:
                seen.setdefault(name, g.clone())

        node = y.grad_fn
        if node is None:
            return y
        if hook == "tensor":
            y.register_hook(lambda g: g * 2)
        elif hook == "prehook":
            node.register_prehook(lambda grads: (grads[0] * 3, *grads[1:]))
        elif hook == "posthook":
            node.register_hook(lambda given, got: keep(f"got {i}", got[0]))
        elif hook == "in place" and "split" not in self.backward:
            y = y.mul_(1.5)
        elif hook == "twice":
            y = y + x
        elif hook == "retain":
            y.register_hook(lambda g: keep(f"seen {i}", g))
        return y

    def differentiate(
        self, y: Tensor, grad: Tensor, names: Names, start: Tensor, seen: dict[str, Tensor]
    ) -> None:
        # checkpoints and donated buffers allow one whole backward alone
        once = "reentrant" in self.runs or "compiled" in self.runs
        chosen = [t for i, (_, t) in enumerate(names) if self.chosen >> i & 1] or [names[0][1]]
        splits = self.backward == "split" and self.hooks[-1] != "twice" and not self.head
        if once:
            y.backward(grad)
        elif self.backward == "inputs":
            y.backward(grad, inputs=chosen, retain_graph=True)
            y.backward(2 * grad, inputs=chosen)
        elif self.backward == "grad":
            got = torch.autograd.grad(y, chosen, grad, retain_graph=True, allow_unused=True)
            seen.update({f"chosen {i}": g for i, g in enumerate(got) if g is not None})
            y.backward(grad)
        elif self.backward == "twice":
            y.backward(grad, retain_graph=True)
            y.backward(grad)
        elif splits:
            weights = [t for name, t in names if name != "x"]
            (dx,), groups = stage_backward_input([y], [grad], [start], iter(weights))
            assert dx is not None
            seen["dx"] = dx
            stage_backward_weight(iter(weights), groups)
            start.grad = None
        else:
            y.backward(grad)


def differences(seed: int) -> list[str]:
    """What differs in one history, by name."""
    history = History(seed)
    got, want = history.run(True), history.run(False)
    found = [f"{name} alone" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        error = relative_error(got[name].float(), want[name].float())
        found += [] if error < 2e-2 else [f"{name}: {error:.3g}"]
    return found and [f"{vars(history)}", *sorted(found)]


# Dynamo itself reads the gradients of inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@instantiates
@pytest.mark.parametrize("part", range(4))
def test_histories(part: int) -> None:
    wrong = [found for seed in range(part, HISTORIES, 4) if (found := differences(seed))]
    assert wrong == []
