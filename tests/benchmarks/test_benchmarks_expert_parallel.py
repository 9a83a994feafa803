"""The benchmark of blocks with experts on several ranks, on ranks of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip("rich")

from benchmarks import expert_parallel
from tests.support.benchmark_workers import calls_of
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks, shared_mesh


def gradients(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


@on_ranks(2, gpus=())
def test_variants_compute_alike(world: int, device: str) -> None:
    mesh = shared_mesh(device, world, names=("experts",))
    worker, models, found = calls_of("expert_parallel_worker", 256, 1, mesh)
    assert tuple(found) == worker.VARIANTS
    assert len(found) == expert_parallel.total()
    computed = {}
    for model, (name, call) in zip(models, found.items(), strict=True):
        call()
        call()
        computed[name] = gradients(model)
    for name, parameters in computed.items():
        reference = computed["bf16, gathered" if "gathered" in name else "bf16"]
        for parameter, grad in parameters.items():
            error = (grad - reference[parameter]).norm() / reference[parameter].norm()
            if name.startswith("bf16"):
                assert error == 0
            elif "router" not in parameter:  # small differences send tokens elsewhere
                assert 0 < error < 0.15, (name, parameter)
    for parameter, grad in computed["fp8, fused"].items():
        assert_same(grad, computed["fp8"][parameter])
    sent = "fp8, fused, tokens sent in fp8", "fp8, fused, tokens and gradients sent in fp8"
    assert not torch.equal(*(computed[name]["0.q.weight"] for name in sent))
