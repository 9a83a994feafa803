"""DeepSeek-16B-shaped blocks whose experts lie on several GPUs; tokens are sent in bf16, or FP8.

This is one rank: torchrun runs it, rank 0 writes the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blocktensor as bt
from blocktensor.distributed import all_to_all_fp8

from . import llama
from .experts import GroupedExperts
from .experts import Shape as Experts
from .llama import MLP, Block, recipe_of, step
from .profiled import parts_of_call
from .ranks import in_turn, parser, run_worker
from .results import Row
from .routing import combined, inverse, on_host, permuted, rows_of_tokens
from .timing import Call

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, fused",
    "fp8, fused, wgrad_input=1x128",
    "fp8, fused, sent in fp8",
    "bf16, gathered",
    "fp8, fused, gathered",
)
LAYERS = 4
SEQUENCE = 4096
INPUTS = 32
"""Inputs that calls take in turn: more than a variant is timed with."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a block: attention as in ``dense``, a shared expert, and routed ones."""

    dense: llama.Shape
    hidden: int
    experts: int
    top_k: int


SHAPES = {
    # hidden: of two shared experts in one
    "16b": Shape(llama.Shape(2048, 2816, 16, 16), hidden=1408, experts=64, top_k=6),
    "tiny": Shape(llama.Shape(256, 256, 4, 4), hidden=256, experts=4, top_k=2),
}


class Route(NamedTuple):
    """Where tokens go: ``order`` sorts the rows of all tokens by expert, which end at ``ends``.

    Where experts lie on several ranks, ``arriving[ranks, experts of this rank]`` counts the rows to
    come, and ``counts()`` are those that go to each rank and come from it.
    """

    weights: Tensor
    order: Tensor
    ends: Tensor
    arriving: Tensor | None
    counts: Callable[[], list[list[int]]]


class Routed(nn.Module):
    """Routed experts, of which each rank holds a part, or all where there is no group.

    ``wire``: how tokens are cast to be sent in FP8; None to send them in their dtype.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.wire: bt.Recipe | None = None
        self.shape, self.group = shape, group
        self.ranks = 1 if group is None else group.size()
        self.router = nn.Linear(shape.dense.dim, shape.experts, bias=False)
        count = shape.experts // self.ranks
        self.experts = GroupedExperts(Experts(count, 0, shape.dense.dim, shape.hidden))

    def route(self, x: Tensor) -> Route:
        """Where the tokens ``x[tokens, dim]`` go."""
        scores = self.router(x).float().sigmoid()
        weights, chosen = scores.topk(self.shape.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).type_as(x)
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.shape.experts, device=x.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        if self.group is None:
            return Route(weights, order, ends, None, list)
        sizes = ends.diff(prepend=ends.new_zeros(1))
        arriving = all_to_all_single(sizes, None, None, self.group).view(self.ranks, -1)
        both = sizes.view(self.ranks, -1).sum(1), arriving.sum(1)
        return Route(weights, order, ends, arriving, on_host(torch.stack(both)))

    def forward(self, x: Tensor, route: Route) -> Tensor:
        """``x[tokens, dim]``."""
        back = inverse(route.order)
        rows = rows_of_tokens(x, route.order, back, self.shape.top_k)
        if self.group is None:
            y = self._computed(rows, route.ends)
        else:
            y = self._sent(rows, route, self.group)
        return combined(y, route.weights, route.order, back)

    def _computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        made: Tensor = self.experts(rows, ends)
        return made

    def _sent(self, rows: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
        """To the ranks of the experts and back; the host reads the counts, as torchtitan's does."""
        given, taken = route.counts()
        assert route.arriving is not None
        expert = torch.arange(route.arriving.shape[1], device=rows.device).repeat(self.ranks)
        expert = expert.repeat_interleave(route.arriving.flatten(), output_size=sum(taken))
        order = expert.argsort(stable=True)
        back = inverse(order)
        if self.wire is None:
            arrived = all_to_all_single_autograd(rows, taken, given, group)
        else:
            arrived = all_to_all_fp8(rows, taken, given, group, recipe=self.wire)
        ends = route.arriving.sum(0).cumsum(0, dtype=torch.int32)
        y = permuted(self._computed(permuted(arrived, order, back), ends), back, order)
        sent_back: Tensor = all_to_all_single_autograd(y, given, taken, group)
        return sent_back


class Mixed(nn.Module):
    """A shared expert beside the routed ones."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.shared = MLP(shape.dense)
        self.routed = Routed(shape, group)

    def forward(self, x: Tensor) -> Tensor:
        """``x[batch, time, dim]``."""
        tokens = x.flatten(0, 1)
        route = self.routed.route(tokens)
        shared = self.shared(x)  # the GPU computes it while the host waits for the counts
        mixed: Tensor = shared + self.routed(tokens, route).view_as(x)
        return mixed


def variant(name: str, shape: Shape, layers: int, mesh: DeviceMesh) -> nn.Module:
    """Blocks as the variant has them, of the same values on every rank."""
    is_gathered = "gathered" in name
    group = None if is_gathered else mesh.get_group()
    torch.manual_seed(0)
    blocks: list[Block] = []
    with torch.device(mesh.device_type):
        for _ in range(layers):
            block = Block(shape.dense)
            block.mlp = Mixed(shape, group)  # type: ignore[assignment]
            blocks.append(block)
    model = nn.Sequential(*blocks)
    if not is_gathered:  # those are fp32, of which FSDP gathers bf16 or e4m3
        model.bfloat16()
    if name.startswith("fp8"):
        bt.convert(model, recipe_of(name), skip=["*.router"], skip_small=False)
    if "sent in fp8" in name:
        for module in model.modules():
            if isinstance(module, Routed):
                module.wire = recipe_of(name)
    if "fused" in name:
        bt.fuse(model)
    if is_gathered:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def calls(shape: Shape, tokens: int, layers: int, mesh: DeviceMesh) -> dict[str, Call]:
    """A forward and backward of each variant, of the same values on this rank's tokens.

    Each call has other tokens, as in training: the numbers of rows that a rank gets change.
    """
    sequence = min(SEQUENCE, tokens)
    size = tokens // sequence, sequence, shape.dense.dim
    how: Any = {"device": mesh.device_type, "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(size, **how) for _ in range(INPUTS)]
    found: dict[str, Call] = {}
    for name in VARIANTS:
        model = variant(name, shape, layers, mesh)
        found[name] = in_order([step(model, model, x, inputs[0].detach()) for x in inputs])
    return found


def in_order(steps: Sequence[Call]) -> Call:
    """Return a call that runs the next of ``steps``, after the last the first again."""
    order = itertools.cycle(steps)
    return lambda: next(order)()


def rows_of(found: dict[str, Call], rounds: int, facts: Row) -> list[Row]:
    """Times, and where they go."""
    ms = in_turn(found, rounds, repeats=2)
    rows: list[Row] = []
    for name, call in found.items():
        dist.barrier()
        beside = "bf16, gathered" if "gathered" in name else "bf16"
        row: Row = {"variant": name, **facts, "ms": round(ms[name], 3)}
        row["speed_of_bf16"] = round(ms[beside] / ms[name], 3)
        row |= {f"{part}_ms": round(spent, 2) for part, spent in parts_of_call(call).items()}
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write down."""
    commands = parser(__doc__, tuple(SHAPES), tokens=16384)
    commands.add_argument("--layers", type=int, default=LAYERS)
    options = commands.parse_args(argv)
    if options.tokens < 1 or options.tokens % min(options.tokens, SEQUENCE):
        commands.error(f"--tokens must be up to {SEQUENCE} or a multiple, got {options.tokens}")

    shape = SHAPES[options.model]

    def rows(mesh: DeviceMesh) -> list[Row]:
        if shape.experts % mesh.size():
            raise ValueError(f"{shape.experts} experts on {mesh.size()} ranks: expected a divisor")
        facts = {"ranks": mesh.size(), "layers": options.layers, "tokens": options.tokens}
        found = calls(shape, options.tokens, options.layers, mesh)
        return rows_of(found, options.rounds, facts)

    run_worker(options.out, rows)


if __name__ == "__main__":
    main()
