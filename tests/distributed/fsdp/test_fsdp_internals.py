"""Ranks count the same changes, though FSDP pads rows again on some of them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe
from blocktensor.distributed import precompute_block_amax
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.sharded_checkpoints import (
    assert_forward_is_fresh,
    converted,
    loss_of,
    table_of,
    train,
    trained,
)


def assign_clones(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


PADS_AGAIN: dict[str, Callable[[nn.Module], Any]] = {
    "move": lambda model: model.half().bfloat16(),
    "assign": assign_clones,
}
CHANGES_NO_VALUES: dict[str, Callable[[nn.Module], Any]] = {
    "move to where it is": lambda model: model.bfloat16(),
    "load of nothing": lambda model: model.load_state_dict({}, strict=False),
}
both_policies = pytest.mark.parametrize("policy", ["backward", "step"])
RAISED = "was changed or moved on this rank between a forward and its backward"


@pytest.mark.parametrize("again", CHANGES_NO_VALUES)
@pytest.mark.parametrize("pads", PADS_AGAIN)
@on_ranks(3, gpus=())
def test_rows_that_were_padded_again(world: int, device: str, pads: str, again: str) -> None:
    model, optimizer = trained(mesh_of(world, device), recipe=Recipe(cache_weight="step"))
    PADS_AGAIN[pads](model)
    assert_forward_is_fresh(model)
    CHANGES_NO_VALUES[again](model)
    assert_forward_is_fresh(model)
    train(model, optimizer, 1)
    CHANGES_NO_VALUES[again](model)
    assert_forward_is_fresh(model)
    model, _ = trained(mesh_of(world, device))
    PADS_AGAIN[pads](model)
    loss_of(model, 0)
    assert precompute_block_amax(model) == 3
    CHANGES_NO_VALUES[again](model)
    assert_forward_is_fresh(model)


@both_policies
@on_ranks(3, gpus=())
def test_a_part_moves_and_the_root_pads_it_later(world: int, device: str, policy: Any) -> None:
    """FSDP notices the part, which it does not shard by itself, at the root's next load."""
    model = converted(recipe=Recipe(cache_weight=policy))
    fully_shard(model, mesh=mesh_of(world, device))
    loss_of(model, 0).backward()
    model.reshard()
    model[0].half().bfloat16()
    if policy == "step":
        loss_of(model, 0)
    else:
        assert precompute_block_amax(model) == 3
    model.reshard()
    tables = [table_of(model, layer) for layer in (0, 4)]
    before = [table.reductions for table in tables]
    model.load_state_dict({}, strict=False)
    loss_of(model, 0)
    made = [table.reductions - earlier for table, earlier in zip(tables, before, strict=True)]
    assert made == [0, policy == "step"]  # not every rank has rows of the last weight
    model.reshard()
    assert_forward_is_fresh(model)


@both_policies
@on_ranks(3, gpus=())
def test_a_move_between_forward_and_backward(world: int, device: str, policy: Any) -> None:
    """All ranks raise, those that did not pad again too; a load of nothing is no change."""
    for prepare in PADS_AGAIN.values():
        model, optimizer = trained(mesh_of(world, device), recipe=Recipe(cache_weight=policy))
        prepare(model)
        loss = loss_of(model, 0)
        model.load_state_dict({}, strict=False)
        loss.backward()
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        model.bfloat16()
        with pytest.raises(RuntimeError, match=RAISED):
            loss.backward()


@both_policies
@on_ranks(3, gpus=())
def test_a_move_under_inference_mode(world: int, device: str, policy: Any) -> None:
    """PyTorch counts no writes to such tensors: every forward sees them."""
    model, _ = trained(mesh_of(world, device), recipe=Recipe(cache_weight=policy))
    with torch.inference_mode():
        model.half().bfloat16()
        assert_forward_is_fresh(model)
        model[2].weight.mul_(8)
        assert_forward_is_fresh(model)


@on_ranks(2, gpus=())
def test_memory_that_a_model_gave_up_is_given_to_it_again(world: int, device: str) -> None:
    """An address that comes back does not hide the change: counters begin at 0 again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", lambda x: 0)
        model, _ = trained(mesh_of(world, device), recipe=Recipe(cache_weight="step"))
        for _ in range(2):
            model.half().bfloat16()
            before = table_of(model, 0).reductions
            loss_of(model, 0)
            assert table_of(model, 0).reductions == before + 1
