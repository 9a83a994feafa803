"""Copies and states of parallel models have weights, recipes and gradients of their own."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import BlockwiseFP8Weight, Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.numeric import assert_same
from tests.support.parallel_linears import (
    BF16,
    Mlp,
    assert_alike,
    batch,
    batches,
    block,
    compute,
    converted,
    drawn,
    local,
    parallel_block,
    plain,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import scale, whole

POW2 = Recipe(scale="power_of_two")


@on_ranks(2)
def test_a_copy_has_its_own_weights(mesh: DeviceMesh) -> None:
    model, (x, _) = parallel_block(mesh), batches(mesh)
    y = model(x)
    other = copy.deepcopy(model)
    assert_same(other(x), y)
    scale(2, other.mlp.gate.weight)
    assert_same(model(x), y)
    assert (other(x) != y).any()


@pytest.mark.parametrize("by_keyword", [False, True])
@on_ranks(2, gpus=())
def test_a_copy_casts_its_input_by_its_own_recipe(mesh: DeviceMesh, by_keyword: bool) -> None:
    """Not by the recipe of the module that it was copied from, whose hooks it shares."""

    def made(recipe: Recipe) -> Mlp:
        torch.manual_seed(0)
        mlp = Mlp(384).bfloat16()
        convert(mlp, recipe, skip_small=False)
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(mlp, mesh, plan)
        if by_keyword:
            layouts: Any = {
                "input_kwarg_layouts": {"x": Replicate()},
                "desired_input_kwarg_layouts": {"x": Replicate()},
            }
        else:
            layouts = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
        return parallelize_module(mlp, mesh, PrepareModuleInput(**layouts))

    def run(mlp: Mlp) -> Tensor:
        x = batch(1)
        return mlp(x=x) if by_keyword else mlp(x)

    model = made(Recipe())
    want = {Recipe(): run(model), POW2: run(made(POW2))}
    other = copy.deepcopy(model)
    convert(other, POW2, skip_small=False)
    assert_same(run(other), want[POW2])
    assert_same(run(model), want[Recipe()])


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@on_ranks(2, gpus=())
def test_a_copy_has_its_own_gradients(mesh: DeviceMesh, style: Any) -> None:
    """Also of a rank whose part begins inside a block."""
    for recipe in (Recipe(), Recipe(wgrad_input="high_precision")):
        model = plain(128, 128, True, BF16)
        convert(model, recipe, skip_small=False)
        parallelize_module(model, mesh, style())
        model(drawn((32, 128 if style is ColwiseParallel else 64), BF16, 1)).sum().backward()
        other = copy.deepcopy(model)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(local(q.grad), local(p.grad))
            q.grad.mul_(2)
            assert (local(q.grad) != local(p.grad)).any()


@on_ranks(2, gpus=())
def test_no_module_is_pickled(mesh: DeviceMesh) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        module = nn.Sequential(parallelize_module(converted(), mesh, style))
        for save in (lambda model: torch.save(model, io.BytesIO()), pickle.dumps):
            with pytest.raises(NotImplementedError, match=r"get_model_state_dict\(model\)"):
                save(module)


@on_ranks(2)
def test_state_dict_holds_masters(mesh: DeviceMesh, device: str) -> None:
    model, other = parallel_block(mesh), parallel_block(mesh)
    masters = block(None).to(device).state_dict()
    for name, value in model.state_dict().items():
        assert type(local(value)) is Tensor
        assert_same(whole(value), masters[name])
    scale(0, *other.parameters())
    other.load_state_dict(model.state_dict())
    assert_alike(compute(other, *batches(mesh)), compute(model, *batches(mesh)))
    other.load_state_dict(model.state_dict(), assign=True)
    assert isinstance(other.mlp.gate.weight.to_local(), BlockwiseFP8Weight)
