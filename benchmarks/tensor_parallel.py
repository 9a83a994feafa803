"""A tensor and sequence parallel block of Llama 70B: torch's styles in bf16, ours, and FP8.

This is one rank: torchrun runs it, rank 0 writes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import blocktensor as bt
import blocktensor.distributed as our_styles
from common.llama import Shape, rope_tables
from tp_llama import Block

from .llama import recipe_of, step
from .profiled import overlap
from .ranks import in_turn, parser, run_worker
from .results import Row
from .timing import Call

VARIANTS = ("bf16", "bf16, our styles", "fp8", "fp8, wgrad_input=1x128")
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
        bt.convert(block, recipe_of(name), skip_small=False)
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


def rows_of(found: dict[str, Call], rounds: int, ranks: int) -> list[Row]:
    """Times, and how much of the collectives runs beside other kernels."""
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
    options = parser(__doc__, tuple(SHAPES)).parse_args(argv)

    def rows(mesh: DeviceMesh) -> list[Row]:
        found = calls(SHAPES[options.model], options.tokens, mesh)
        return rows_of(found, options.rounds, mesh.size())

    run_worker(options.out, rows)


if __name__ == "__main__":
    main()
