"""A model of Qwen3-30B-A3B's shape, trained from random weights: its experts lie on all GPUs.

Each rank holds a part of the experts of every layer, in bf16, and tokens are sent to them in bf16;
FSDP2 shards the rest, whose masters are fp32. This is one rank: torchrun runs it once for each
variant, since models of two do not fit, and rank 0 writes the row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import blocktensor as bt
from common.llama import Head, Llama, rotate
from common.llama import Shape as Dense
from common.runs import Clock

from . import expert_parallel, llama
from .ranks import ONE_BY_ONE, parser, run_worker
from .results import Row

VARIANTS = ONE_BY_ONE
_WARMUP = 3
_LOSS_CHUNK = 2048


@dataclass(frozen=True)
class Shape(Dense):
    """Sizes of a model; ``hidden``: of an expert."""

    rope_base: float = 1e6
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8

    @property
    def routed(self) -> expert_parallel.Shape:
        """Return the sizes of a layer of experts."""
        dense = llama.Shape(self.dim, self.hidden, self.heads, self.kv_heads)
        return expert_parallel.Shape(dense, self.hidden, self.experts, self.top_k)


SHAPES = {
    "30b-a3b": Shape(2048, layers=48, heads=32, kv_heads=4, hidden=768, vocab=151_936),
    "tiny": Shape(
        256, layers=2, heads=4, kv_heads=2, hidden=128, vocab=512, head_dim=64, experts=8, top_k=2
    ),
}


class Attention(nn.Module):
    """Grouped queries, with norms of queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.dim, queries, bias=False)
        self.k_proj = nn.Linear(shape.dim, kv, bias=False)
        self.v_proj = nn.Linear(shape.dim, kv, bias=False)
        self.o_proj = nn.Linear(queries, shape.dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(shape.head_dim), nn.RMSNorm(shape.head_dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x[batch, time, dim]``."""
        q, k, v = (self._heads(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        made: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return made


class Block(nn.Module):
    """Attention, then routed experts."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.routed = expert_parallel.Routed(shape.routed, group)
        self.routed.experts.bfloat16()

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of x and its attention, and the norm of that sum."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x, self.mlp_norm(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x[batch, time, dim]``."""
        x, h = self.attend(x, cos, sin)
        tokens = h.flatten(0, 1)
        mixed: Tensor = x + self.routed(tokens, self.routed.route(tokens)).view_as(x)
        return mixed


class Qwen3(Llama):
    """A decoder of these blocks; its embedding, head and loss are those of a Llama."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None) -> None:
        nn.Module.__init__(self)  # Llama's own makes its blocks
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, group) for _ in range(shape.layers))
        self.head = Head(shape, _LOSS_CHUNK)

    def experts(self) -> list[nn.Parameter]:
        """Return the experts of this rank."""
        blocks: Any = self.blocks
        return [p for block in blocks for p in block.routed.experts.parameters()]


@torch.no_grad()
def _initialise(model: Qwen3, rank: int) -> None:
    """Draw each matrix from a seed of its own, so that no number of ranks changes it."""
    experts = {*model.experts()}
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            continue  # a norm's, of ones
        stack = parameter if parameter in experts else parameter[None]
        first = rank * len(stack) if parameter in experts else 0
        for place, matrix in enumerate(stack, first):
            torch.manual_seed(hash((number, place)))
            matrix.normal_(
                std=0.02 if parameter is model.embedding.weight else matrix.shape[1] ** -0.5
            )


def build(name: str, shape: Shape, mesh: DeviceMesh, compiles: bool = False) -> Qwen3:
    """Return the model of a variant, of the same values for all variants and numbers of ranks."""
    with torch.device(mesh.device_type):
        model = Qwen3(shape, mesh.get_group())
    _initialise(model, mesh.get_local_rank())
    if name.startswith("fp8"):
        if is_head := "head" in name:
            model.head.fused_loss = bt.functional.linear_cross_entropy
        is_tiny = shape.dim < SHAPES["30b-a3b"].dim
        bt.convert(model, skip=["*.router"], skip_small=not is_tiny, convert_head=is_head)
    if "fused" in name:
        bt.fuse(model)
        bt.share_inputs(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=policy, ignored_params={*model.experts()}
    )
    for block in model.blocks:
        if compiles:
            block.attend = torch.compile(block.attend)  # type: ignore[assignment, arg-type]
        shard(block)
    shard(model)
    return model


def batch(shape: Shape, tokens: int, seq: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return random tokens, of which small ones are more frequent, and those that follow."""
    torch.manual_seed(hash((rank, step)))
    drawn = torch.rand(tokens // seq, seq + 1).pow(3).mul(shape.vocab).long()
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Trainer:
    """AdamW over the shards and this rank's experts, with one norm that clips all gradients."""

    def __init__(self, model: Qwen3, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        self._experts = model.experts()
        self._shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        groups: list[dict[str, Any]] = [{"params": self._shards}, {"params": self._experts}]
        self._optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Step; return the loss of this rank's tokens before, and the norm of all gradients."""
        loss: Tensor = self._model(tokens, targets)
        loss.backward()
        # the gradient of the mean over ranks, as FSDP2 makes it of shards
        mine = [p.grad for p in self._experts if p.grad is not None]
        torch._foreach_div_(mine, self._mesh.size())
        squares = get_total_norm(mine).float().square()
        dist.all_reduce(squares, group=self._mesh.get_group())
        shards: Any = get_total_norm([p.grad for p in self._shards if p.grad is not None])
        total = (squares + shards.full_tensor().square()).sqrt()
        for parameters in (self._shards, self._experts):
            clip_grads_with_norm_(parameters, 1.0, total)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), total


def row(
    name: str, shape: Shape, mesh: DeviceMesh, tokens: int, seq: int, steps: int, compiles: bool
) -> Row:
    """Train a variant; return its speed, its peak and its losses, means over the ranks."""
    trainer = Trainer(build(name, shape, mesh, compiles), mesh)
    device, losses = torch.device(mesh.device_type), []
    clock = Clock(device)
    for step in range(steps):
        given = batch(shape, tokens, seq, mesh.get_local_rank(), step)
        with clock.step():
            losses.append(trainer.step(*(x.to(device) for x in given))[0])
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=mesh.get_group())
    mean /= mesh.size()
    made: Row = {"variant": name, "ranks": mesh.size(), "layers": shape.layers, "tokens": tokens}
    made |= {"first_loss": round(float(mean[0]), 4), "last_loss": round(float(mean[-1]), 4)}
    ms = torch.tensor(1e3 * median(clock.seconds()[_WARMUP:]), device=device)
    dist.all_reduce(ms, dist.ReduceOp.MAX, group=mesh.get_group())
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return made | {
        "step_ms": round(float(ms), 1),
        "tokens_per_second_per_gpu": round(tokens / float(ms) * 1e3, 1),
        "peak_mib": round(peak / 2**20, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write down."""
    commands = parser(__doc__, tuple(SHAPES), tokens=8192)
    commands.add_argument("--variant", choices=VARIANTS, default="bf16")
    commands.add_argument("--layers", type=int, help="default: all")
    commands.add_argument("--seq", type=int, default=4096)
    commands.add_argument("--steps", type=int, default=20)
    commands.add_argument("--compile", action="store_true", help="attention and norms")
    options = commands.parse_args(argv)
    shape = SHAPES[options.model]
    shape = replace(shape, layers=options.layers or shape.layers)
    seq = min(options.seq, options.tokens)
    if options.steps <= _WARMUP:
        commands.error(f"--steps must be more than {_WARMUP}, which are not timed")
    if options.tokens % seq:
        commands.error(f"--tokens {options.tokens} must be a multiple of --seq {seq}")
    how = options.tokens, seq, options.steps, options.compile
    run_worker(options.out, lambda mesh: [row(options.variant, shape, mesh, *how)])


if __name__ == "__main__":
    main()
