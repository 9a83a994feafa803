"""The benchmark of a head: its variants compute one loss."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import head
from blocktensor import BlockwiseFP8Weight, to_blockwise_fp8_weights
from tests.support.models import randn


def test_variants_compute_one_loss() -> None:
    x, target = randn(140, 256), torch.arange(140) % 300
    losses = {}
    for name, (is_fp8, loss) in head.variants().items():
        if "compiled" in name:
            continue
        module = nn.Linear(256, 300, bias=False, dtype=torch.bfloat16)
        torch.nn.init.normal_(module.weight, std=0.05, generator=torch.Generator().manual_seed(0))
        if is_fp8:
            to_blockwise_fp8_weights(module)
        assert isinstance(module.weight, BlockwiseFP8Weight) == is_fp8
        losses[name] = loss(x, module, target).item()
    assert losses["fp8"] == losses["fp8, in chunks"] != losses["bf16"]
    assert head.total() == len(head.SHAPES) * len(head.variants())
