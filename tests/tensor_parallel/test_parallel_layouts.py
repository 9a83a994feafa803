"""Inputs and outputs of parallel linear layers: layouts, FP8 inputs, missing gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, quantize
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from blocktensor.sharding.dtensor import own_part
from tests.support.numeric import assert_same
from tests.support.parallel_linears import BF16, converted, drawn, my_part
from tests.support.prepared_inputs import K, input_of, parallel, siblings
from tests.support.ranks import on_ranks
from tests.support.sharded import Wire


@on_ranks(2, gpus=())
def test_an_output_that_is_cut_by_features(mesh: DeviceMesh) -> None:
    x = my_part(mesh, drawn((6, K), BF16, 1), -1)
    whole = parallelize_module(converted(), mesh, RowwiseParallel())
    module = parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(-1)))
    assert_same(module(x), my_part(mesh, whole(x), -1))
    assert_same(module(quantize(x)), module(x))
    module = parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(0)))
    for needs_dx in (True, False):
        y = module(x.clone().requires_grad_(needs_dx))
        with Wire() as wire:
            y.sum().backward()
        assert len(wire.gathered) == 1 + 2 * needs_dx  # bf16 rows; bytes and scales


@on_ranks(2, gpus=())
def test_plain_inputs_of_other_layouts(mesh: DeviceMesh) -> None:
    x = drawn((2, 3, K), BF16, 1)
    part = my_part(mesh, x, -1)
    y = [parallelize_module(converted(), mesh, ColwiseParallel())(x)]
    y += [parallel(siblings(mesh), mesh, Replicate())(x)]
    for layout, given in ((Shard(-1), part), (Partial(), x * (mesh.get_local_rank() == 0))):
        module = parallelize_module(converted(), mesh, ColwiseParallel(input_layouts=layout))
        assert_same(module(given), y[0])
        assert_same(parallel(siblings(mesh), mesh, layout)(given), y[1])
    module = parallelize_module(converted(), mesh, RowwiseParallel(input_layouts=Replicate()))
    assert_same(module(x), parallelize_module(converted(), mesh, RowwiseParallel())(part))


@on_ranks(2, gpus=())
def test_an_fp8_input_whose_tokens_are_cut_off_the_grid(mesh: DeviceMesh) -> None:
    """Only a weight gradient reads columnwise blocks, of the tokens of all ranks."""
    module = parallelize_module(converted(), mesh, ColwiseParallel(input_layouts=Shard(0)))
    x = drawn((50, K), BF16, 1)
    with torch.no_grad():
        assert_same(module(quantize(x)), module(x))
    with pytest.raises(ValueError, match="its columnwise blocks of 128 tokens do not begin"):
        module(quantize(x))
    recipe = Recipe(wgrad_input="high_precision")  # whose weight gradient reads none
    module = parallelize_module(
        converted(recipe=recipe), mesh, ColwiseParallel(input_layouts=Shard(0))
    )
    assert_same(module(quantize(x, recipe=recipe)), module(x))


@on_ranks(2, gpus=())
@pytest.mark.parametrize("tokens", [Replicate(), Shard(1)])
def test_data_gradients_travel_in_the_dtype_of_an_input_in_fp8(
    mesh: DeviceMesh, tokens: Any
) -> None:
    """Which autocast does not change: sums of an fp32 input are not rounded to bf16."""
    linear = parallelize_module(converted(), mesh, ColwiseParallel(input_layouts=tokens))
    x = drawn((2, 128, K), torch.float32, 1).requires_grad_()
    with torch.autocast("cpu", BF16):
        y = linear(quantize(x))
    with Wire() as wire:
        y.sum().backward()
    sent = wire.scattered if tokens == Shard(1) else wire.reduced
    assert [each.dtype for each in sent] == [torch.float32]
    assert (x.grad != x.grad.to(BF16)).any()


@on_ranks(2, gpus=())
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_outputs_may_be_changed_in_place(mesh: DeviceMesh, style: Any, sequence: bool) -> None:
    is_colwise = style is ColwiseParallel
    layout = Shard(0) if sequence else Replicate()
    module = parallelize_module(
        converted(), mesh, style(**{f"{'input' if is_colwise else 'output'}_layouts": layout})
    )
    x = input_of(mesh).detach().flatten(0, -2)
    x = x if is_colwise else my_part(mesh, x, -1)
    grads = []
    for change in (lambda y: y * 2, lambda y: y.mul_(2)):
        leaf = x.clone().requires_grad_()
        change(module(leaf)).sum().backward()
        grads.append(leaf.grad)
    assert_same(*grads)


@on_ranks(2, gpus=())
def test_outputs_without_a_gradient_send_nothing(mesh: DeviceMesh) -> None:
    """And the input gets none, as from linear layers of torch, whose gradients may be undefined."""
    colwise = ColwiseParallel(input_layouts=Shard(1))
    for module in (
        parallel(siblings(mesh), mesh),
        parallel(siblings(mesh), mesh, Replicate()),
        parallelize_module(converted(), mesh, colwise),
        parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(0))),
    ):
        x = input_of(mesh)
        if isinstance(module, nn.Linear) and module.weight.placements == (Shard(1),):
            x = my_part(mesh, x.detach(), -1).requires_grad_()
        y = torch._C._functions.UndefinedGrad()(module(x))
        with Wire() as wire:
            y.sum().backward()
        assert wire.collectives == [] and x.grad is None
        # DTensor of torch 2.11 makes zeros
        assert not any(own_part(p.grad).any() for p in module.parameters() if p.grad is not None)
