"""One rank of the benchmark ``tensor_parallel``: torchrun runs it, rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import blocktensor as bt
import blocktensor.distributed as our_styles
from llama import Shape, rope_tables
from tp_llama import Block

from .llama import step
from .profiled import overlap
from .results import Row
from .timing import Call

VARIANTS = ("bf16", "bf16, our styles", "fp8", "fp8, wgrad_input=128x128")
SHAPES = {
    "70b": Shape(dim=8192, layers=1, heads=64, kv_heads=8, hidden=28672, vocab=256),
    "tiny": Shape(dim=256, layers=1, heads=4, kv_heads=4, hidden=512, vocab=256),
}


def variant(name: str, shape: Shape, mesh: DeviceMesh) -> nn.Module:
    """A block whose linears and tokens are cut between the ranks of ``mesh``."""
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        block = Block(shape).to(torch.bfloat16)
    if name.startswith("fp8"):
        recipe = bt.Recipe(wgrad_input="128x128" if "128x128" in name else "1x128")
        bt.convert(block, recipe, auto_filter_small_kn=False)
    styles: Any = torch_styles if name == "bf16" else our_styles
    tokens, whole = Shard(1), Replicate()
    norm = torch_styles.SequenceParallel(use_local_output=True)
    attention = styles.PrepareModuleInput(
        input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
    )
    mlp = styles.PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    columns, rows = styles.ColwiseParallel, styles.RowwiseParallel
    return parallelize_module(
        block,
        mesh,
        {
            "attention": attention,
            **{f"attention.{name}": columns() for name in "qkv"},
            "attention.o": rows(output_layouts=tokens),
            "mlp": mlp,
            **{f"mlp.{name}": columns() for name in ("gate", "up")},
            "mlp.down": rows(output_layouts=tokens),
            "attention_norm": norm,
            "mlp_norm": norm,
        },
    )


def calls(shape: Shape, tokens: int, mesh: DeviceMesh) -> dict[str, Call]:
    """A forward and backward of each variant, of the same values on this rank's tokens."""
    device = torch.device(mesh.device_type)
    tables = rope_tables(shape, tokens, device)
    x = torch.randn(1, tokens // mesh.size(), shape.dim, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    grad = torch.randn_like(x)
    found: dict[str, Call] = {}
    for name in VARIANTS:
        block = variant(name, shape, mesh)

        def run(x: Tensor, block: nn.Module = block) -> Tensor:
            made: Tensor = block(x, *tables)
            return made

        found[name] = step(block, run, x, grad)
    return found


def in_turn(found: dict[str, Call], rounds: int, repeats: int = 4) -> dict[str, float]:
    """Milliseconds a call; every rank makes the same calls in the same order."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, call in found.items():
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: median(values) for name, values in times.items()}


def rows_of(found: dict[str, Call], rounds: int, ranks: int) -> list[Row]:
    """Times, and how much of the collectives runs beside other kernels."""
    for call in found.values():
        for _ in range(3):
            call()
    ms = in_turn(found, rounds)
    rows: list[Row] = []
    for name, call in found.items():
        dist.barrier()
        row: Row = {"variant": name, "ranks": ranks, "ms": round(ms[name], 3)}
        row["speed_of_bf16"] = round(ms["bf16"] / ms[name], 3)
        for kind, words in {"gathers": "AllGather", "scatters": "ReduceScatter"}.items():
            whole, beside = overlap(call, words)
            row |= {f"{kind}_us": round(whole, 1), f"{kind}_beside_us": round(beside, 1)}
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SHAPES), default="70b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    found = calls(SHAPES[options.model], options.tokens, mesh)
    rows = rows_of(found, options.rounds, dist.get_world_size())
    if rank == 0:
        options.out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
