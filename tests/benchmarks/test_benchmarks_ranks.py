"""Benchmarks of several ranks, on ranks of the CPU: their variants compute alike."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip("rich")

from benchmarks.timing import Call
from blocktensor import BlockwiseFP8Weight
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.scripts import examples


def calls_of(name: str, *arguments: Any) -> tuple[list[nn.Module], dict[str, Call]]:
    """The models of a benchmark's variants, and its ``calls`` of the shape "tiny"."""
    models: list[nn.Module] = []
    with examples(), pytest.MonkeyPatch.context() as patch:
        worker = importlib.import_module(f"benchmarks.{name}")
        made = worker.variant

        def variant(*args: Any) -> nn.Module:
            models.append(made(*args))
            return models[-1]

        patch.setattr(worker, "variant", variant)
        calls = worker.calls(worker.SHAPES["tiny"], *arguments)
        assert tuple(calls) == worker.VARIANTS
        return models, calls


def gradients(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


@on_ranks(2, gpus=())
def test_tensor_parallel_variants_compute_alike(world: int, device: str) -> None:
    mesh = shared_mesh(device, world, names=("tensor",))
    blocks, calls = calls_of("tensor_parallel", 256, mesh)
    computed = []
    for block, call in zip(blocks, calls.values(), strict=True):
        call()
        call()
        local = [p.to_local() if isinstance(p, DTensor) else p for p in block.parameters()]
        casts = [w.cache.casts for w in local if isinstance(w, BlockwiseFP8Weight)]
        assert casts in ([], [2] * 7)
        computed.append(torch.cat([grad.flatten() for grad in gradients(block).values()]))
    bf16, ours, fp8, square = computed
    assert torch.equal(bf16, ours)
    assert not torch.equal(fp8, square)
    for gradient in (fp8, square):
        assert 0 < (gradient - bf16).norm() < 0.1 * bf16.norm()


@on_ranks(2, gpus=())
def test_expert_parallel_variants_compute_alike(world: int, device: str) -> None:
    mesh = shared_mesh(device, world, names=("experts",))
    models, calls = calls_of("expert_parallel", 256, 1, mesh)
    computed = {}
    for model, (name, call) in zip(models, calls.items(), strict=True):
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
