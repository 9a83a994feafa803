"""Blocks of norms and the linears that read them, and norms that only look alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blocktensor import fuse
from blocktensor.fusion import norm
from blocktensor.fusion.fused_class import fused_modules
from tests.support.mlps import MLP, K, converted


class Norm(nn.Module):
    """An RMS norm as transformers' Llama writes it; subclasses differ from it."""

    def __init__(self, size: Any = K, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def scaled(self, x: Tensor) -> Tensor:
        """X over its root mean square, fp32."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.scaled(x).to(x.dtype)


class OfTorch(nn.RMSNorm):
    """Torch's norm, its epsilon that of the dtype."""

    def __init__(self) -> None:
        super().__init__(K)


class Attention(nn.Module):
    """Three linears of one input; nothing that mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(K, K, bias=False))

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], K // 64, 64)
        q, k, v = (
            getattr(self, name)(hidden_states).view(shape)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        return self.o_proj((q * k.sigmoid() + v).flatten(-2))


class Block(nn.Module):
    """A decoder layer of transformers' names."""

    def __init__(self, norm: Callable[[], nn.Module] = Norm) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Blocks(nn.Module):
    """Two of them."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(norm: Callable[[], nn.Module] = Norm, **options: Any) -> nn.Module:
    """A converted model of two blocks."""
    return converted(Blocks(norm), **options)


def fused_norms(model: nn.Module) -> list[str]:
    """The names of the norms that :func:`blocktensor.fuse` has fused."""
    return [name for name, _ in fused_modules(model, norm.Norm)]


OF_BLOCK = "input_layernorm", "post_attention_layernorm"
NAMES = [f"layers.{i}.{name}" for i in range(2) for name in OF_BLOCK]


def fused_blocks(*norm: Any, fused: list[str] = NAMES, **options: Any) -> tuple[Any, Any]:
    """A model whose norms of the names ``fused`` are fused, and its twin that is not."""
    model = blocks(*norm, **options)
    twin = copy.deepcopy(model)
    assert [x.name for x in fuse(model).left_alone] == [name for name in NAMES if name not in fused]
    assert fused_norms(model) == fused
    return model, twin
