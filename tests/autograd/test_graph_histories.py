"""Random histories of autograd over FP8 functions, beside the same model in plain torch ops.

The plain model multiplies dequantized casts, product by product. Both are driven by one list of
events: hooks that change gradients, parts of backwards, checkpointing, compiled parts. Every output
and every gradient is compared. ``BLOCKTENSOR_HISTORIES=500`` runs more of them.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from blocktensor import functional, to_blockwise_fp8_weights
from blocktensor.ops import reference as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from tests.support.groups import ends, ranges
from tests.support.models import randn
from tests.support.numeric import relative_error

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
        dws = dw[None] if w.ndim == 2 else dw
        for rows, each, of_each in zip(ctx.rows, w[None] if w.ndim == 2 else w, dws, strict=True):
            if len(x[rows]):
                dx[rows] = rounded(g[rows], BLOCKS_1X128) @ rounded(each, BLOCKS_128X128)
                of_each += rounded(g[rows], BLOCKS_1X128, True).t() @ rounded(
                    x[rows], BLOCKS_1X128, True
                )
        return dx, dw, None


def plain(x: Tensor, w: Tensor, offs: Tensor | None = None) -> Tensor:
    made: Tensor = PlainLinear.apply(x, w, offs)
    return made


class Part(nn.Module):
    """One of the functions ``[T, K]`` to ``[T, K]``, in FP8 or from plain products."""

    def __init__(self, kind: str, fp8: bool, seed: int) -> None:
        super().__init__()
        self.kind, self.fp8 = kind, fp8
        shapes = {
            "linear": [(K, K)],
            "grouped": [(len(SIZES), K, K)],
            "gated": [(K, K)] * 3,
            "experts": [(len(SIZES), K, K)] * 3,
            "norm": [(K,)],
            "quantized": [(K, K)] * 2,
        }[kind]
        made = [
            randn(*s, seed=seed + i, dtype=torch.float32) / K**0.5 for i, s in enumerate(shapes)
        ]
        self.weights = nn.ParameterList(made)
        if fp8 and kind == "linear":
            self.linear = nn.Linear(K, K, bias=False)
            self.linear.weight = self.weights[0]
            to_blockwise_fp8_weights(self.linear)
            self.weights[0] = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        offs, w = ends(*SIZES), list(self.weights)
        if self.kind == "norm":
            if self.fp8:
                return functional.rms_norm(x, w[0]).dequantize()
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[0]
            return y + (rounded(y.detach(), BLOCKS_1X128) - y.detach())
        if self.fp8:
            if self.kind == "linear":
                made: Tensor = self.linear(x)
                return made
            if self.kind == "quantized":
                q = functional.quantize(x)
                return functional.linear(q, w[0]) + functional.linear(q, w[1]) + q.dequantize()
            if self.kind == "grouped":
                return functional.grouped_linear(x, w[0], offs)
            if self.kind == "gated":
                return functional.gated_mlp(x, *w)
            return functional.gated_experts(x, *w, offs)
        if self.kind == "quantized":
            return plain(x, w[0]) + plain(x, w[1]) + x + (rounded(x, BLOCKS_1X128) - x).detach()
        ends_ = offs if self.kind in ("grouped", "experts") else None
        if len(w) == 1:
            return plain(x, w[0], ends_)
        h = F.silu(plain(x, w[0], ends_)) * plain(x, w[1], ends_)
        return plain(h, w[2], ends_)


WAYS = ("plain", "plain", "checkpoint", "reentrant", "compiled")
KINDS = ("linear", "grouped", "gated", "experts", "norm", "quantized")


def keep(seen: dict[str, Tensor], name: str, x: Tensor | None) -> None:
    """Add a copy to what is compared."""
    if x is not None:
        seen.setdefault(name, x.clone())


class History:
    """The events of one seed, each drawn before either model runs."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.kinds = [draw.choice(KINDS) for _ in range(draw.randint(1, 3))]
        self.runs = [draw.choice(WAYS) for _ in self.kinds]
        if seed % 8:  # compilation takes a second
            self.runs = ["plain" if run == "compiled" else run for run in self.runs]
        self.hooks = [draw.choice(("", "", "tensor", "prehook", "posthook", "retain", "in place",
                                   "twice")) for _ in self.kinds]  # fmt: skip
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
        names = [("x", leaf)]
        for i, part in enumerate(parts):
            names += [(f"{i}.{n}", p) for n, p in part.named_parameters() if p.requires_grad]
        names += [("head", head)] if self.head else []
        seen: dict[str, Tensor] = {}
        x = leaf * 1.0
        start = x
        for i, (part, how, hook) in enumerate(zip(parts, self.runs, self.hooks, strict=True)):
            x = self.hooked(self.called(part, how, x), hook, i, seen, x)
        if self.head:
            target = torch.arange(TOKENS) % WORDS
            if fp8:
                x = functional.linear_cross_entropy(x, head, target)
            else:
                x = F.cross_entropy(plain(x, head), target)
        seen["y"] = x.detach().clone()
        grad = randn(*x.shape, seed=99, dtype=torch.float32)
        self.differentiate(x, grad, names, start, seen)
        for name, tensor in names:
            if tensor.grad is not None:
                seen[f"grad {name}"] = tensor.grad
        return seen

    def called(self, part: nn.Module, how: str, x: Tensor) -> Tensor:
        if how in ("checkpoint", "reentrant"):
            made: Tensor = checkpoint(part, x, use_reentrant=how == "reentrant")
            return made
        if how == "compiled":
            part.compile(backend="aot_eager")
        result: Tensor = part(x)
        return result

    def hooked(self, y: Tensor, hook: str, i: int, seen: dict[str, Tensor], x: Tensor) -> Tensor:
        node = y.grad_fn
        if node is None:
            return y
        # torch runs hooks of the node that both halves of a split backward begin at twice: those of
        # a gated MLP reach three weights where they reach one of separate linears
        if self.backward == "split" and self.kinds[i] in ("gated", "experts"):
            hook = "retain" if hook in ("tensor", "prehook") else hook
        if hook == "tensor":
            y.register_hook(lambda g: g * 2)
        elif hook == "prehook":
            node.register_prehook(lambda grads: (grads[0] * 3, *grads[1:]))
        elif hook == "posthook":
            node.register_hook(lambda given, got: keep(seen, f"got {i}", got[0]))
        elif hook == "in place" and "split" not in self.backward:
            y = y.mul_(1.5)
        elif hook == "twice":
            y = y + x
        elif hook == "retain":
            y.register_hook(lambda g: keep(seen, f"seen {i}", g))
        return y

    def differentiate(
        self,
        y: Tensor,
        grad: Tensor,
        names: list[tuple[str, Tensor]],
        start: Tensor,
        seen: dict[str, Tensor],
    ) -> None:
        # checkpoints and donated buffers allow one whole backward alone
        once = "reentrant" in self.runs or "compiled" in self.runs
        chosen = [t for i, (_, t) in enumerate(names) if self.chosen >> i & 1] or [names[0][1]]
        if self.backward == "whole" or once:
            y.backward(grad)
        elif self.backward == "inputs":
            y.backward(grad, inputs=chosen, retain_graph=True)
            y.backward(2 * grad, inputs=chosen)
        elif self.backward == "grad":
            got = torch.autograd.grad(y, chosen, grad, retain_graph=True, allow_unused=True)
            for i, g in enumerate(got):
                if g is not None:
                    seen[f"chosen {i}"] = g
            y.backward(grad)
        elif self.backward == "twice":
            y.backward(grad, retain_graph=True)
            y.backward(grad)
        elif self.backward == "split" and self.hooks[-1] != "twice" and not self.head:
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
        if not error < 2e-2:
            found.append(f"{name}: {error:.3g}")
    return found and [f"{vars(history)}", *sorted(found)]


# Dynamo itself reads the gradients of inputs, and instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("part", range(4))
def test_histories(part: int) -> None:
    wrong = [found for seed in range(part, HISTORIES, 4) if (found := differences(seed))]
    assert wrong == []
