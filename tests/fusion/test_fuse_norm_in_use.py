"""A fused norm keeps its bits in its surroundings: hooks, adapters, tensor parallel readers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import freeze, fuse
from blocktensor.distributed import ColwiseParallel
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.gated import assert_bits
from tests.support.mlps import K, X, results, with_adapter
from tests.support.models import POWER_OF_TWO, plain, randn
from tests.support.norms import (
    Norm,
    OfTorch,
    blocks,
    fused_blocks,
    fused_norms,
    runs_fused,
)
from tests.support.ranks import on_ranks, shared_mesh


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", [Norm, OfTorch])
def test_bits(norm: Any, dtype: torch.dtype, device: torch.device) -> None:
    names = {"fused": []} if norm is OfTorch else {}
    models = fused_blocks(norm, recipe=POWER_OF_TWO, dtype=dtype, **names)
    model, twin = (x.to(device) for x in models)
    for i, rows in enumerate((0, 1, 127, 129, 300)):
        x = randn(rows, K, seed=i, device=device)
        assert_bits(results(model, x), results(twin, x))
    # in fp32 gradients of x from elsewhere are added between those of the norm's two reads
    as_written = dtype == torch.float32 and norm is Norm
    assert runs_fused(model, x.to(dtype)) == (0 if as_written else len(fused_norms(model)))
    made = model.layers[0].input_layernorm(x.to(dtype))
    assert type(made) is torch.Tensor  # which anything may read


def test_what_changes_later() -> None:
    def other_eps(block: Any) -> None:
        block.input_layernorm.variance_epsilon = 1e-2

    def other_dtype(block: Any) -> None:
        block.input_layernorm.float()

    def plain_linear(block: Any) -> None:
        q = block.self_attn.q_proj
        q.weight = nn.Parameter(plain(q.weight))

    def no_weight(block: Any) -> None:
        block.input_layernorm.weight = None
        block.input_layernorm.forward = lambda x: x * 2

    for change in (other_eps, other_dtype, plain_linear, no_weight):
        model, twin = fused_blocks()
        for each in (model, twin):
            change(each.layers[0])
        x = X.bfloat16()
        with torch.no_grad():
            if change is other_dtype:  # fp32 beside bf16 weights
                for each in (model, twin):
                    with pytest.raises((TypeError, ValueError)):
                        each(x)
                continue
            assert torch.equal(model(x), twin(x))
        assert runs_fused(model) == 3 + (change is plain_linear)


def test_hooks_see_the_norm() -> None:
    model, twin = fused_blocks()
    for each in (model, twin):
        each.layers[0].input_layernorm.register_forward_hook(lambda m, args, y: y * 3)
        each.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    assert_bits(results(model), results(twin))


@pytest.mark.parametrize("first", ["adapters", "fuse"])
def test_adapters(first: str) -> None:
    model = blocks()
    freeze(model)
    wanted = with_adapter(copy.deepcopy(model), "q_proj")
    if first == "fuse":
        fuse(model)
        made = with_adapter(model, "q_proj")
    else:
        made = with_adapter(model, "q_proj")
        reasons = [x.reason for x in fuse(made).left_alone]
        assert reasons == []
    assert_bits(results(made), results(wanted))


def test_torch_func_runs_as_written() -> None:
    model, twin = fused_blocks()
    x = X.bfloat16()
    for each in (model, twin):
        for p in each.parameters():
            p.requires_grad_(False)
    outputs = [torch.func.vmap(each.layers[0].input_layernorm)(x[None]) for each in (model, twin)]
    assert torch.equal(*outputs)


@on_ranks(2)
def test_tensor_parallel_readers(world: int, device: str) -> None:
    mesh = shared_mesh(device, 1, world, names=("data", "tensor"))["tensor"]
    model, twin = (x.to(device) for x in fused_blocks())
    for each in (model, twin):
        for layer in each.layers:
            for name in ("q_proj", "v_proj"):
                style = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(layer.self_attn, mesh, {name: style})
    assert_bits(results(model, X.to(device)), results(twin, X.to(device)))
    assert runs_fused(model, X.to(device).bfloat16()) == 4
