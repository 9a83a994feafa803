"""Pipeline parallel training of a Llama-shaped decoder, bf16 or FP8. See ``--help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from common.needs import needs

with needs("rich", "blocktensor", install="'.[demo]'"):
    import blocktensor
    from common.llama import SHAPES, Block, Shape, rope_tables, seed_of
    from common.parallel_runs import parsed, parser_of, report, written
    from fsdp2_llama import ranks
    from tp_llama import batch

# a block for each of two stages on each of two ranks
SIZES = {**SHAPES, "tiny": Shape(dim=256, layers=4, heads=4, kv_heads=4, hidden=512, vocab=256)}
SCHEDULES = {"1f1b": ("1F1B", 1), "zb": ("InterleavedZeroBubble", 2)}
"""torch's name of a schedule, and how many stages a rank has in it."""

DESCRIPTION = """\
Train a Llama-shaped decoder whose blocks are split in pipeline stages, in bf16 or in blockwise FP8,
on random tokens. Ranks that --pp leaves over shard each stage with FSDP2. The FP8 run differs by
one line, blocktensor.convert(stage). Both schedules give the same losses, bit for bit.
"""

EPILOG = """\
examples:
  torchrun --nproc-per-node 2 examples/pp_llama.py --precision fp8                   1F1B
  torchrun --nproc-per-node 2 examples/pp_llama.py --precision fp8 --schedule zb     zero bubble
  torchrun --nproc-per-node 4 examples/pp_llama.py --pp 2 --precision fp8            and FSDP2
"""


class Stage(nn.Module):
    """Some blocks; the first stage embeds tokens, the last one returns logits."""

    def __init__(self, shape: Shape, index: int, count: int, seed: int) -> None:
        super().__init__()
        self.shape, mine = shape, shape.layers // count
        self.embedding = self.norm = self.lm_head = None
        self.blocks = nn.ModuleList()
        # one model, whatever the number of stages
        for layer in range(mine * index, mine * (index + 1)):
            torch.manual_seed(seed_of(seed, "block", layer))
            self.blocks.append(Block(shape))
        torch.manual_seed(seed_of(seed, "ends"))
        if index == 0:
            self.embedding = nn.Embedding(shape.vocab, shape.dim)
        if index == count - 1:
            self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
            self.lm_head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[batch, time]`` or activations ``[batch, time, dim]`` in."""
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rope_tables(self.shape, x.shape[1], x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(
    options: argparse.Namespace, shape: Shape, mesh: DeviceMesh
) -> tuple[list[PipelineStage], int]:
    """The stages of this rank, and how many of their linears are FP8."""
    rank, per_rank = mesh["pipe"].get_local_rank(), SCHEDULES[options.schedule][1]
    count, converted = per_rank * mesh["pipe"].size(), 0
    device, group = torch.device(options.device), mesh.get_group("pipe")
    stages = []
    for index in range(rank, count, mesh["pipe"].size()):
        stage = Stage(shape, index, count, options.seed).to(torch.bfloat16).to(device)
        if options.precision == "fp8":
            # tiny's linears are all too small for FP8 to pay, and are here to be tried
            report = blocktensor.convert(stage, skip_small=options.model != "tiny")
            converted += len(report.converted)
        if mesh["data"].size() > 1:
            # stages stay gathered in a step, which zero-bubble schedules rely on
            for block in stage.blocks:
                fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
            fully_shard(stage, mesh=mesh["data"], reshard_after_forward=False)
        stages.append(PipelineStage(stage, index, count, device, group=group))
    return stages, converted


def train(options: argparse.Namespace, shape: Shape, mesh: DeviceMesh) -> dict[str, Any]:
    """All steps; what is written down."""
    stages, converted = build(options, shape, mesh)
    name, per_rank = SCHEDULES[options.schedule]
    given: Any = stages[0] if per_rank == 1 else stages
    schedule: Any = get_schedule_class(name)
    pipeline = schedule(given, n_microbatches=options.microbatches, loss_fn=loss_of)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, foreach=True)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(options.steps):
        inputs, targets = batch(options, shape, mesh["data"].get_local_rank(), step)
        begin = time.perf_counter()
        parts: list[Tensor] = []
        pipeline.step(
            *((inputs,) if is_first else ()),
            target=targets if is_last else None,
            losses=parts if is_last else None,
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # of the last stages of all pipelines
        total = torch.zeros((), device=options.device)
        if parts:
            total += torch.stack(parts).mean().detach()
        dist.all_reduce(total)
        losses.append(total.item() / mesh["data"].size())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    counted = torch.tensor(converted, device=options.device)
    dist.all_reduce(counted, group=mesh.get_group("pipe"))
    tokens = options.batch * options.seq * mesh["data"].size()
    return {
        "options": written(options),
        "world_size": dist.get_world_size(),
        "fp8_linears": int(counted),
        "losses": losses,
        "tokens_per_second": tokens / median(seconds[options.warmup_steps :]),
    }


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Shape]:
    """The command line."""
    parser = parser_of("pp_llama.py", DESCRIPTION, EPILOG, SIZES, batch=4)
    add = parser.add_argument
    add("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="default: 1f1b")
    add("--pp", type=int, help="ranks of a pipeline (default: all)")
    add("--microbatches", type=int, default=4, help="of a step (default: 4)")
    options = parsed(parser, argv)
    if options.batch % options.microbatches:
        parser.error(f"--batch {options.batch} must be a multiple of --microbatches")
    return options, SIZES[options.model]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report, write down."""
    options, shape = parse(argv)
    with ranks(options.device):
        world = dist.get_world_size()
        options.pp = options.pp or world
        stages = options.pp * SCHEDULES[options.schedule][1]
        if world % options.pp or shape.layers % stages:
            sys.exit(
                f"--pp {options.pp} must divide the {world} ranks, and its {stages} stages the "
                f"{shape.layers} blocks"
            )
        names = ("data", "pipe")
        mesh = init_device_mesh(
            options.device, (world // options.pp, options.pp), mesh_dim_names=names
        )
        result = train(options, shape, mesh)
        if dist.get_rank() == 0:
            name, per_rank = SCHEDULES[options.schedule]
            rows = [
                ("schedule", f"{name}, {options.microbatches} microbatches"),
                ("ranks", f"{result['world_size']}, {options.pp} a pipeline"),
                ("stages a rank", str(per_rank)),
            ]
            report(result, rows, options.out)
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
