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

K, HIDDEN = 192, 160
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


def h_of(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


H: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "GELU for SiLU": lambda gate, up: F.gelu(gate) * up,
    "another beta": lambda gate, up: gate * torch.sigmoid(1.01 * gate) * up,
    "a clamp of gate": lambda gate, up: h_of(gate.clamp(max=7.0), up),
    "a clamp far away": lambda gate, up: h_of(gate, up.clamp(-1e6, 1e6)),
    "an epsilon": lambda gate, up: h_of(gate, up + 1e-6),
    "dropout of few": lambda gate, up: F.dropout(h_of(gate, up), 1e-3),
    "operands swapped": lambda gate, up: h_of(up, gate),
    "a product in fp32": lambda gate, up: h_of(gate.float(), up.float()).to(up.dtype),
    "a detour through fp16": lambda gate, up: h_of(gate, up).half().to(up.dtype),
    "a gradient stopped at up": lambda gate, up: h_of(gate, up.detach()),
    "a gradient stopped at gate": lambda gate, up: h_of(gate.detach(), up),
}
"""Functions that compute something other than h from gate and up."""


def _h(m: Any, x: Tensor) -> Tensor:
    return h_of(m.gate_proj(x), m.up_proj(x))


FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a scaled input": lambda m, x: m.down_proj(h_of(m.gate_proj(x), m.up_proj(2 * x))),
    "a residual": lambda m, x: x + m.down_proj(_h(m, x)),
    "a bias left out": lambda m, x: F.linear(_h(m, x), m.down_proj.weight),
    "a gradient stopped at x": lambda m, x: m.down_proj(
        h_of(m.gate_proj(x.detach()), m.up_proj(x))
    ),
    "slices": lambda m, x: sum(
        map(F.linear, _h(m, x).split(128, -1), m.down_proj.weight.split(128, 1))
    ),
    "two inputs": lambda m, x: m.down_proj(_h(m, x)) * m.missing,
}
"""Forwards that differ from an MLP's."""
PLANTED = [*H, *FORWARDS]


def planted(name: str) -> nn.Module:
    """An MLP of this difference."""
    whole, inner = FORWARDS.get(name), H.get(name, h_of)

    class Planted(MLP):
        def forward(self, x: Tensor) -> Any:
            if whole is not None:
                return whole(self, x)
            return self.down_proj(inner(self.gate_proj(x), self.up_proj(x)))

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
