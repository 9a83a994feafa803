"""The Llama of the examples: its gated MLP and the norm before its attention are fused."""

from __future__ import annotations

import copy

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import convert, fuse
from tests.support.gated import assert_bits
from tests.support.mlps import results
from tests.support.scripts import Load


def test_a_block_is_fused_to_the_same_bits(load: Load) -> None:
    llama = load("common.llama")
    shape = llama.SHAPES["tiny"]
    model: nn.Module = llama.Block(shape).bfloat16()
    convert(model, skip_small=False)
    twin = copy.deepcopy(model)
    report = fuse(model)
    assert_expected_inline(
        "\n".join(f"{x.name}: {x.reason or x.computes}" for x in report.entries),
        """\
mlp: down(silu(gate(x)) * up(x))
attention_norm: torch computes it in one kernel
mlp_norm: torch computes it in one kernel""",
    )
    x = torch.randn(2, 40, shape.dim, generator=torch.Generator().manual_seed(0))
    tables = llama.rope_tables(shape, 40, torch.device("cpu"))

    def bits(block: nn.Module) -> list[Tensor | None]:
        return results(block, x, lambda leaf: block(leaf, *tables))

    assert_bits(bits(model), bits(twin))
