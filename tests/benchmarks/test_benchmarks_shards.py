"""The benchmark of tensor parallel shards, small enough for a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import shards
from benchmarks.llama import Shape, step
from blocktensor import BlockwiseFP8Weight
from tests.support.mlps import fused_in
from tests.support.models import randn

TINY = Shape(dim=256, hidden=1024, heads=16, kv_heads=8)


def test_variants_compute_alike() -> None:
    torch.manual_seed(0)
    base = shards.Shard(TINY).to(torch.bfloat16)
    shapes = {tuple(p.shape) for p in base.parameters()}
    assert shapes == {(32, 256), (16, 256), (256, 32), (128, 256), (256, 128)}
    x, grad = randn(24, TINY.dim, grad=True), randn(24, TINY.dim, seed=1)
    found: dict[str, list[Tensor]] = {}
    for name in shards.VARIANTS:
        model = shards.variant(name, base)
        weights = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
        assert len(weights) == (0 if name == "bf16" else 7)
        assert len(fused_in(model)) == ("fused" in name)
        step(model, model, x, grad)()
        assert x.grad is not None
        found[name] = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
    fp8 = found.pop("fp8")
    assert len(fp8) == 8
    for name, made in found.items():
        for a, b in zip(made, fp8, strict=True):
            if name == "bf16" or ("128x128" in name and b.shape != x.shape):
                assert 0 < (a - b).norm() < 0.15 * a.norm()
            else:
                assert torch.equal(a, b)
    assert shards.total() == 10
    assert shards.total(**shards.QUICK) == 5
