"""Small diffusion transformers of the structure of DiT, FLUX.1 and Wan 2.1, in plain torch.

Sizes are no multiples of 128, and weights that begin at zero do so here too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, HEAD_DIM, CHANNELS, TEXT = 9, 16, 4, 80
DIM = HEADS * HEAD_DIM
HIDDEN = 280
BATCH = 3
IMAGE = (CHANNELS, 10, 14)  # 35 patches of 2 x 2
WORDS = 7


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def mlp(dim: int = DIM, hidden: int = HIDDEN) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU("tanh"), nn.Linear(hidden, dim))


def zeros(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class Times(nn.Module):
    """Sines of times through two linear layers: one row an image."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.logspace(0, -3, 16)
        made: Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], -1))
        return made


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.mlp = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), zeros(nn.Linear(DIM, 6 * DIM)))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c)[
            :, None
        ].chunk(6, -1)
        x = x + gate_a * self.proj(attend(*self.qkv(modulated(x, shift_a, scale_a)).chunk(3, -1)))
        return x + gate_m * self.mlp(modulated(x, shift_m, scale_m))


class DiT(nn.Module):
    """adaLN-Zero, a convolution that makes patches, a table of labels."""

    MODULATION = ("*.adaLN_modulation", "times")

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, DIM, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, 35, DIM) / 50)
        self.times, self.labels = Times(), nn.Embedding(10, DIM)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.final = zeros(nn.Linear(DIM, 4 * CHANNELS))

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.times(t) + self.labels(text[:, 0, 0].abs().mul(9).long() % 10)
        rows = self.patches(x).flatten(2).mT + self.positions
        for block in self.blocks:
            rows = block(rows, c)
        return F.fold(self.final(F.layer_norm(rows, (DIM,))).mT, x.shape[-2:], 2, stride=2)


class DoubleBlock(nn.Module):
    """Image and text have weights of their own, and attend together."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.Linear(DIM, 6 * DIM) for _ in range(2))
        self.to_q, self.to_k, self.to_v, self.out = (
            nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)) for _ in range(4)
        )
        self.mlps = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, streams: list[Tensor], c: Tensor) -> list[Tensor]:
        parts = [norm(F.silu(c))[:, None].chunk(6, -1) for norm in self.norms]
        inputs = [modulated(x, p[0], p[1]) for x, p in zip(streams, parts, strict=True)]
        q, k, v = (
            torch.cat([linear(x) for linear, x in zip(linears, inputs, strict=True)], 1)
            for linears in (self.to_q, self.to_k, self.to_v)
        )
        attended = attend(q, k, v).split([x.shape[1] for x in streams], 1)
        made = []
        for i, (x, p) in enumerate(zip(streams, parts, strict=True)):
            x = x + p[2] * self.out[i](attended[i])
            made.append(x + p[5] * self.mlps[i](modulated(x, p[3], p[4])))
        return made


class SingleBlock(nn.Module):
    """Attention and MLP side by side: one linear layer before them, one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(DIM, 3 * DIM)
        self.linear1 = nn.Linear(DIM, 3 * DIM + HIDDEN)
        self.linear2 = nn.Linear(DIM + HIDDEN, DIM)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.norm(F.silu(c))[:, None].chunk(3, -1)
        qkv, hidden = self.linear1(modulated(x, shift, scale)).split([3 * DIM, HIDDEN], -1)
        attended = attend(*qkv.chunk(3, -1))
        return x + gate * self.linear2(
            torch.cat([attended, F.gelu(hidden, approximate="tanh")], -1)
        )


class Flux(nn.Module):
    """Two streams, then one: patches by a reshape and a linear layer of few inputs."""

    MODULATION = ("*.norms", "*.norm", "times")

    def __init__(self) -> None:
        super().__init__()
        self.x_in, self.text_in = nn.Linear(4 * CHANNELS, DIM), nn.Linear(TEXT, DIM)
        self.times = Times()
        self.joint, self.single = DoubleBlock(), SingleBlock()
        self.final = nn.Linear(DIM, 4 * CHANNELS)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.times(t)
        image, words = self.joint([self.x_in(F.unfold(x, 2, stride=2).mT), self.text_in(text)], c)
        rows = self.single(torch.cat([words, image], 1), c)[:, words.shape[1] :]
        return F.fold(self.final(F.layer_norm(rows, (DIM,))).mT, x.shape[-2:], 2, stride=2)


class WanBlock(nn.Module):
    """Self-attention and cross-attention; the modulation is a table added to one of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, DIM) / DIM**0.5)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.cross_q, self.cross_k, self.cross_v, self.cross_o = (
            nn.Linear(DIM, DIM) for _ in range(4)
        )
        self.norm, self.ffn = nn.LayerNorm(DIM), mlp()

    def forward(self, x: Tensor, text: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift_m, scale_m, gate_m = (self.scale_shift_table + c).chunk(6, 1)
        y = modulated(x, shift, scale)
        x = x + gate * self.o(attend(self.q(y), self.k(y), self.v(y)))
        y = self.norm(x)
        x = x + self.cross_o(attend(self.cross_q(y), self.cross_k(text), self.cross_v(text)))
        return x + gate_m * self.ffn(modulated(x, shift_m, scale_m))


class Wan(nn.Module):
    """Video: a convolution in three dimensions makes patches."""

    MODULATION = ("times", "time_proj")

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(CHANNELS, DIM, (1, 2, 2), (1, 2, 2))
        self.times, self.time_proj = Times(), nn.Linear(DIM, 6 * DIM)
        self.text_embedding = mlp(TEXT, DIM)
        self.text_out = nn.Linear(TEXT, DIM)
        self.blocks = nn.ModuleList(WanBlock() for _ in range(2))
        self.final = nn.Linear(DIM, 4 * CHANNELS)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.time_proj(F.silu(self.times(t))).unflatten(-1, (6, DIM))
        words = self.text_out(self.text_embedding(text))
        rows = self.patch_embedding(x[:, :, None]).flatten(2).mT
        for block in self.blocks:
            rows = block(rows, words, c)
        return F.fold(self.final(F.layer_norm(rows, (DIM,))).mT, x.shape[-2:], 2, stride=2)


MODELS: tuple[type[nn.Module], ...] = (DiT, Flux, Wan)


def batch(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noisy images, times, text, and the velocity from image to noise, which a model predicts."""
    made = torch.Generator().manual_seed(seed)
    t = torch.rand(count, generator=made)
    frequencies = torch.rand(count, CHANNELS, 1, 1, generator=made)
    rows, columns = torch.arange(IMAGE[1])[:, None] / 3, torch.arange(IMAGE[2]) / 3
    image = (rows * frequencies + columns).sin()
    noise = torch.randn(count, *IMAGE, generator=made)
    text = torch.randn(count, WORDS, TEXT, generator=made)
    part = t[:, None, None, None]
    return (1 - part) * image + part * noise, t, text, noise - image


def loss_of(model: nn.Module, seed: int, count: int = BATCH) -> Tensor:
    x, t, text, velocity = batch(seed, count)
    return F.mse_loss(model(x, t, text), velocity)
