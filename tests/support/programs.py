"""Random training programs over FP8 layers, to run in two ways that must give the same bits.

A program draws a trunk of layers with one to three heads, then steps: forwards, backwards of every
kind, writes. Events that draw random numbers draw the same in both runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blocktensor
from blocktensor import Recipe, functional
from blocktensor.ops.producers.activations import ACTIVATIONS
from tests.support.models import randn

WIDTHS = (128, 160, 256, 512, 1024)
TOKENS = (1, 60, 128, 130, 200, 256, 384)
RECIPES = (
    Recipe(),
    Recipe(scale="power_of_two"),
    Recipe.deepseek(),
    Recipe(wgrad_input="high_precision"),
    Recipe(cache_weight=False),
    Recipe(batch_invariant=True),
)
EXPERTS = 4


def shifted(x: Tensor) -> Tensor:
    """The values at addresses that are no multiples of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def in_wider_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    Tensor.clone,
    shifted,
    transposed,
    in_wider_rows,
)


def lay_out(layout: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The values in another layout; FP8 bytes in the dtype that torch's ops take."""
    if x.dtype == torch.float8_e4m3fn:
        return layout(x.view(torch.uint8)).view(x.dtype) if x.numel() else x
    return layout(x) if x.numel() else x


class Layer(nn.Module):
    """``[T, K]`` to ``[T, K]`` by one of the functions that record launches."""

    def __init__(self, kind: str, k: int, hidden: int, bias: bool, activation: Any) -> None:
        super().__init__()
        self.kind, self.activation = kind, activation
        if kind == "linear":
            self.linears = nn.ModuleList([nn.Linear(k, k, bias)])
        elif kind == "shared":
            self.linears = nn.ModuleList(nn.Linear(k, k, bias) for _ in range(3))
        elif kind == "gated":
            shapes = (k, hidden), (k, hidden), (hidden, k)
            self.linears = nn.ModuleList(nn.Linear(*shape, bias) for shape in shapes)
        else:
            wide = kind == "experts"
            shapes = [(hidden, k), (hidden, k), (k, hidden)] if wide else [(k, k)]
            self.stacks = nn.ParameterList(torch.randn(EXPERTS, *s) / s[1] ** 0.5 for s in shapes)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        if self.kind == "linear":
            return self.linears[0](x)
        if self.kind == "shared":
            q, k, v = (linear(x) for linear in self.linears)
            return q * torch.sigmoid(k) + v
        if self.kind == "gated":
            gate, up, down = self.linears
            return functional.gated_mlp(
                x,
                gate.weight,
                up.weight,
                down.weight,
                bias_gate=gate.bias,
                bias_up=up.bias,
                bias_down=down.bias,
                activation=self.activation,
            )
        rows = x.reshape(-1, x.shape[-1])
        offs = torch.tensor(sizes, device=x.device).cumsum(0, dtype=torch.int32)
        if self.kind == "grouped":
            y = functional.grouped_linear(rows, self.stacks[0], offs)
        else:
            y = functional.gated_experts(rows, *self.stacks, offs, activation=self.activation)
        return y.view(x.shape)


KINDS = ("linear", "linear", "gated", "shared", "grouped", "experts")


class Program:
    """The layers and the steps of one seed."""

    def __init__(self, seed: int, device: str, widths: tuple[int, ...] = WIDTHS) -> None:
        draw = random.Random(seed)
        self.seed, self.device = seed, device
        self.k, self.hidden = draw.choice(widths), draw.choice(widths)
        self.recipe = draw.choice(RECIPES)
        self.dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
        self.autocast = self.dtype == torch.float32 and draw.random() < 0.5
        self.kinds = [draw.choice(KINDS) for _ in range(draw.randint(1, 3))]
        self.heads = draw.randint(1, 3)
        self.frozen = [draw.random() < 0.15 for _ in self.kinds]
        self.shares = draw.random() < 0.5
        self.steps = draw.randint(3, 6)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        draw = random.Random(self.seed + 1)
        trunk = nn.ModuleList(
            Layer(kind, self.k, self.hidden, draw.random() < 0.5, draw.choice([*ACTIVATIONS]))
            for kind in self.kinds
        )
        heads = nn.ModuleList(nn.Linear(self.k, self.k, bias=False) for _ in range(self.heads))
        model = nn.ModuleDict({"trunk": trunk, "heads": heads}).to(self.device, self.dtype)
        for layer, frozen in zip(trunk, self.frozen, strict=True):
            layer.requires_grad_(not frozen)
        with torch.no_grad():  # blocks of other sizes show wrong scales
            for p in model.parameters():
                rows = p.shape[-2] if p.ndim > 1 else 1
                if p.ndim > 1:
                    p.mul_(torch.logspace(-1, 1, rows, device=p.device, dtype=p.dtype)[:, None])
        stacks = {
            f"trunk.{i}.stacks": ["0", "1", "2"][: len(layer.stacks)]
            for i, layer in enumerate(trunk)
            if hasattr(layer, "stacks")
        }
        blocktensor.convert(
            model, self.recipe, skip_small=False, convert_head=True, stacks=stacks or None
        )
        if self.shares and "shared" in self.kinds:
            blocktensor.share_inputs(model)
        return model

    def run(self) -> list[Tensor]:
        """All outputs and gradients, in order."""
        draw = random.Random(self.seed + 2)
        model = self.model()
        seen: list[Tensor] = []
        params = [p for p in model.parameters() if p.requires_grad]
        for step in range(self.steps):
            seen += self.step(draw, model, params, step)
        return seen

    def forward(self, draw: random.Random, model: Any, step: int) -> tuple[Tensor, list[Tensor]]:
        tokens = draw.choice(TOKENS)
        sizes = [0, *sorted(draw.choices(range(tokens + 1), k=EXPERTS - 1)), tokens]
        sizes = [b - a for a, b in pairwise(sizes)]
        shape = (2, tokens // 2) if tokens % 2 == 0 and draw.random() < 0.4 else (tokens,)
        x = randn(*shape, self.k, seed=self.seed + step, dtype=self.dtype, device=self.device)
        leaf = lay_out(draw.choice(LAYOUTS), x).detach().requires_grad_(draw.random() < 0.8)
        recomputed = draw.random() < 0.2
        h = leaf * 1 if draw.random() < 0.5 else leaf
        with self.saved_tensor_hooks(draw), self.autocasts():
            for layer in model["trunk"]:
                if recomputed:
                    h = checkpoint(layer, h, sizes, use_reentrant=False)
                else:
                    h = layer(h, sizes)
                layout = draw.choice(LAYOUTS)
                if h.requires_grad and draw.random() < 0.4:
                    h.register_hook(lambda g, layout=layout: lay_out(layout, g))
            losses = [head(h).float().pow(2).mean() for head in model["heads"]]
        return leaf, losses

    def autocasts(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext()

    def saved_tensor_hooks(self, draw: random.Random) -> AbstractContextManager[Any]:
        """Sometimes, hooks that return saved tensors in other layouts."""
        chance = draw.random()
        if chance > 0.25:
            return nullcontext()
        layout = shifted if chance < 0.15 else Tensor.clone

        def unpack(x: Tensor) -> Tensor:
            if x.dtype == torch.int32 or type(x) is not Tensor:
                return x
            return lay_out(Tensor.clone if x.ndim < 2 else layout, x)

        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack)

    def step(
        self, draw: random.Random, model: nn.Module, params: list[nn.Parameter], step: int
    ) -> Iterator[Tensor]:
        for p in params:
            p.requires_grad_(True)
        if draw.random() < 0.25:  # as a GAN trains one half
            for p in draw.sample(params, len(params) // 2):
                p.requires_grad_(False)
        leaf, losses = self.forward(draw, model, step)
        yield from (loss.detach() for loss in losses)
        wanted = [t for t in (leaf, *params) if t.requires_grad]
        losses = [loss for loss in losses if loss.requires_grad]
        how = draw.choice(("sum", "each", "twice", "parts", "parts", "two forwards", "inputs"))
        if losses and wanted:
            yield from self.backward(draw, how, model, losses, wanted, step)
        yield from (t.grad.clone() for t in wanted if t.grad is not None)
        with torch.no_grad():
            if draw.random() < 0.6:
                for p in params:
                    if p.grad is not None:
                        p.sub_(p.grad.clamp(-1, 1), alpha=1e-3)
            for p in params:
                p.grad = None

    def backward(
        self,
        draw: random.Random,
        how: str,
        model: nn.Module,
        losses: list[Tensor],
        wanted: list[Tensor],
        step: int,
    ) -> Iterator[Tensor]:
        total = torch.stack(losses).sum()
        if how == "sum":
            total.backward()
        elif how == "each":
            for loss in draw.sample(losses, len(losses)):
                loss.backward(retain_graph=True)
        elif how == "twice":
            total.backward(retain_graph=True)
            total.backward()
        elif how == "parts":  # gradients of some inputs in any order, then of all
            for _ in range(draw.randint(1, 3)):
                chosen = draw.sample(wanted, draw.randint(1, len(wanted)))
                loss = draw.choice(losses)
                grads = torch.autograd.grad(loss, chosen, retain_graph=True, allow_unused=True)
                yield from (g for g in grads if g is not None)
            total.backward()
        elif how == "inputs":
            total.backward(inputs=draw.sample(wanted, draw.randint(1, len(wanted))))
        else:
            _, others = self.forward(draw, model, step + 100)
            others = [loss for loss in others if loss.requires_grad]
            for loss in (*others, *losses) if draw.random() < 0.5 else (*losses, *others):
                loss.backward(retain_graph=True)
