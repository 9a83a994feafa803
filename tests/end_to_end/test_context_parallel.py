"""Context parallel: ranks hold parts of the sequence, and ring attention sends keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktensor import convert, fuse
from tests.support.ranks import on_ranks

DIM, HEADS, HIDDEN, VOCABULARY = 256, 4, 768, 64
BATCH, TIME, STEPS = 2, 1024, 100


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TIME, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(x)
        return logits


def made(fp8: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if fp8:
        convert(model, skip_small=False)
        assert len(fuse(model).fused) == 2
    return model.cuda()


def texts(step: int) -> Tensor:
    """``[BATCH, TIME + 1]`` tokens that follow each other by a rule, but for some noise."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    rule = (start + 5 * torch.arange(TIME + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, rule.shape, generator=generator)
    return torch.where(torch.rand(rule.shape, generator=generator) < 0.1, noise, rule)


@contextlib.contextmanager
def cut(mesh: DeviceMesh | None, *buffers: Tensor) -> Iterator[None]:
    """Cut the buffers, by their last dimension, between ranks while the ``with`` lasts."""
    from torch.distributed.tensor.experimental import context_parallel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), contextlib.ExitStack() as stack:
        if mesh is not None:
            dims = [buffer.ndim - 1 for buffer in buffers]
            cutting: Any = context_parallel
            stack.enter_context(cutting(mesh, buffers=[*buffers], buffer_seq_dims=dims))
        yield


def backward(model: nn.Module, mesh: DeviceMesh | None, step: int) -> float:
    """Leave the gradients of all tokens on every rank; return the mean loss."""
    tokens = texts(step).cuda()
    x, y, places = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(TIME)
    places = places.cuda()
    with cut(mesh, x, y, places), torch.autocast("cuda", torch.bfloat16):
        logits = model(x, places)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")
        loss = loss / (BATCH * TIME)
        loss.backward()
    total = loss.detach()
    if mesh is not None:
        for summed in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(summed)
    return float(total)


def gradients(fp8: bool, mesh: DeviceMesh | None) -> tuple[float, Tensor]:
    model: Any = made(fp8)
    loss = backward(model, mesh, 0)
    weights = [p for p in model.layers.parameters() if p.ndim == 2]
    assert len(weights) == 14
    return loss, torch.cat([w.grad.flatten() for w in weights])


def error(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@on_ranks(gpus=(2,))
def test_gradients_are_those_of_one_process_within_rounding(mesh: DeviceMesh) -> None:
    """Blocks of tokens are a rank's own, so that weight gradients round otherwise."""
    (exact, wanted), (other, bf16) = gradients(False, None), gradients(False, mesh)
    (alone, one), (loss, cut_up) = gradients(True, None), gradients(True, mesh)
    errors = [error(x, wanted) for x in (bf16, one, cut_up)]
    assert abs(other - exact) < 1e-3 * exact
    assert abs(loss - alone) < 1e-3 * alone
    assert errors[0] < 0.02 < errors[1]
    assert errors[2] < 1.1 * errors[1]
    assert error(cut_up, one) < 1.1 * errors[1]


def losses(mesh: DeviceMesh | None) -> Tensor:
    model = made(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        found.append(backward(model, mesh, step))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(found)


@on_ranks(gpus=(2,))
def test_the_loss_of_100_steps_is_that_of_one_process(mesh: DeviceMesh) -> None:
    alone, cut_up = losses(None), losses(mesh)
    assert alone[-20:].mean() < 0.7 * alone[:5].mean()
    assert abs(cut_up.mean() - alone.mean()) < 1e-3 * alone.mean()
