"""Gated MLPs as people write them, and others that only look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import Recipe, convert
from blocktensor.fusion.fused_class import fused_modules
from blocktensor.fusion.mlp import MLP as MLPPattern
from tests.support.models import FP32_SCALES
from tests.support.steps import step

K, HIDDEN = 192, 320
X = torch.arange(3 * K).view(3, K).sin()


class MLP(nn.Module):
    """SwiGLU under transformers' names; subclasses are written in another way."""

    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, bias: bool = False, act: Any = None) -> None:
        super().__init__()
        for name, (n, k) in zip(self.names, ((HIDDEN, K), (HIDDEN, K), (K, HIDDEN)), strict=True):
            self.add_module(name, nn.Linear(k, n, bias=bias))
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Torchtitan(nn.Module):
    """SwiGLU as torchtitan and Llama's own code write it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(K, HIDDEN, bias=False), nn.Linear(K, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Model(nn.Module):
    """Blocks of a norm and an MLP each."""

    def __init__(self, make: Callable[[], nn.Module] = MLP, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(K), "mlp": make()}) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))
        return x


def converted(
    model: nn.Module, recipe: Recipe = FP32_SCALES, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """The model in FP8, of the same values whenever it is made."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 14
    convert(model.to(dtype), recipe, skip_small=False)
    return model


def _h(m: Any, x: Tensor) -> Tensor:
    return F.silu(m.gate_proj(x)) * m.up_proj(x)


# Forwards that differ from down_proj(silu(gate_proj(x)) * up_proj(x)).
PLANTED: dict[str, Callable[[Any, Tensor], Any]] = {
    "GELU for SiLU": lambda m, x: m.down_proj(F.gelu(m.gate_proj(x)) * m.up_proj(x)),
    "another beta": lambda m, x: m.down_proj(
        m.gate_proj(x) * torch.sigmoid(1.01 * m.gate_proj(x)) * m.up_proj(x)
    ),
    "a clamp of gate": lambda m, x: m.down_proj(
        F.silu(m.gate_proj(x).clamp(max=7.0)) * m.up_proj(x)
    ),
    "a clamp far away": lambda m, x: m.down_proj(
        F.silu(m.gate_proj(x)) * m.up_proj(x).clamp(-1e6, 1e6)
    ),
    "an epsilon": lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * (m.up_proj(x) + 1e-6)),
    "a scaled input": lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(2 * x)),
    "a residual": lambda m, x: x + m.down_proj(_h(m, x)),
    "a bias left out": lambda m, x: F.linear(_h(m, x), m.down_proj.weight),
    "dropout of few": lambda m, x: m.down_proj(F.dropout(_h(m, x), 1e-3, m.training)),
    "operands swapped": lambda m, x: m.down_proj(m.gate_proj(x) * F.silu(m.up_proj(x))),
    "a product in fp32": lambda m, x: m.down_proj(
        (F.silu(m.gate_proj(x).float()) * m.up_proj(x).float()).to(x.dtype)
    ),
    "a detour through fp16": lambda m, x: m.down_proj(_h(m, x).half().to(x.dtype)),
    "a gradient stopped at up": lambda m, x: m.down_proj(
        F.silu(m.gate_proj(x)) * m.up_proj(x).detach()
    ),
    "a gradient stopped at gate": lambda m, x: m.down_proj(
        F.silu(m.gate_proj(x).detach()) * m.up_proj(x)
    ),
    "a gradient stopped at x": lambda m, x: m.down_proj(
        F.silu(m.gate_proj(x.detach())) * m.up_proj(x)
    ),
    "slices": lambda m, x: sum(
        F.linear(part, w)
        for part, w in zip(_h(m, x).split(128, -1), m.down_proj.weight.split(128, 1), strict=True)
    ),
    "two inputs": lambda m, x: m.down_proj(_h(m, x)) * m.missing,
}


def planted(name: str) -> nn.Module:
    """An MLP of this forward."""

    class Planted(MLP):
        def forward(self, x: Tensor) -> Any:
            return PLANTED[name](self, x)

    return Planted(bias=name == "a bias left out")


def results(model: nn.Module, x: Tensor = X, run: Any = None) -> list[Tensor | None]:
    """The output, and the gradients of x and of all parameters, from scratch."""
    return step(model if run is None else run, x.to(next(model.parameters()).dtype), of=[model])


def fused_in(model: nn.Module) -> list[str]:
    """The names of its modules that are fused."""
    return [name for name, _ in fused_modules(model, MLPPattern)]


def with_adapter(model: nn.Module, linear: str) -> Any:
    """The model with a LoRA adapter, of the same values whenever it is made, on each ``linear``."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=[linear], init_lora_weights=False)
    return peft.get_peft_model(model, config)
