"""Blocks of Llama 8B's size whose sequences are cut between GPUs: ring attention, bf16 beside FP8.

This is one rank: torchrun runs it, rank 0 writes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from .block import variant
from .expert_parallel import rows_of
from .llama import Shape, stack, step
from .ranks import parser, run_worker
from .results import Row
from .timing import Call

VARIANTS = ("bf16", "fp8", "fp8, fused")
# a key for every query: torch's ring attention has no groups of queries
SHAPES = {"8b": Shape(kv_heads=32), "tiny": Shape(256, 256, 4, 4)}


def calls(shape: Shape, tokens: int, layers: int, mesh: DeviceMesh) -> dict[str, Call]:
    """A forward and backward of each variant, of a sequence of which this rank has a part."""
    x = torch.randn(1, tokens // mesh.size(), shape.dim, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    found: dict[str, Call] = {}
    for name in VARIANTS:
        torch.manual_seed(0)
        model = variant(name, stack(shape, layers, "cuda"))
        once = step(model, model, x, torch.randn_like(x))

        def cut(once: Call = once) -> None:
            # torch cuts buffers in place, and wants one: x is this rank's part already
            buffers = [torch.empty(tokens, device="cuda")]
            within: Any = context_parallel
            ring = within(mesh, buffers=buffers, buffer_seq_dims=[0])
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION), ring:
                once()

        found[name] = cut
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write down."""
    commands = parser(__doc__, tuple(SHAPES), tokens=32768)
    commands.add_argument("--layers", type=int, default=2)
    options = commands.parse_args(argv)

    def rows(mesh: DeviceMesh) -> list[Row]:
        facts = {"ranks": mesh.size(), "layers": options.layers, "tokens": options.tokens}
        found = calls(SHAPES[options.model], options.tokens, options.layers, mesh)
        return rows_of(found, options.rounds, facts)

    run_worker(options.out, rows)


if __name__ == "__main__":
    main()
