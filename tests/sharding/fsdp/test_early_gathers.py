"""Gathers that begin before their forward, because of ``unshard()`` or an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from blocktensor.sharding.fsdp import amax_table
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_equal, scale, step
from tests.support.sharded_layers import assert_same_step, batch, evaluate, twins

EARLY: dict[str, Callable[[Any], Any]] = {
    "the root": lambda model: model.unshard(),
    "the first block": lambda model: model[0].unshard(),
    "blocks": lambda model: [block.unshard() for block in model[:2]],
    "all": lambda model: [part.unshard(async_op=True) for part in (model, *model[:2])],
    "the root, after an evaluation": lambda model: (
        evaluate(model),
        model.reshard(),
        scale(2, *model.parameters()),
        scale(0.5, *model.parameters()),
        model.unshard(),
    ),
}


@pytest.mark.parametrize("early", EARLY)
@on_ranks(1, 2, gpus=())
def test_unshard_before_every_forward(mesh: DeviceMesh, early: str) -> None:
    """As training loops do, to begin the first gather early."""
    for first in (0, 1):
        model, single = twins(mesh)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, single)]
        for number in range(4):
            if number >= first:
                EARLY[early](model)
            assert_same_step(model, single, number)
            step(*optimizers)
        assert_equal(model.parameters(), single.parameters())


@on_ranks(1, 2, gpus=())
def test_evaluations_in_inference_mode(mesh: DeviceMesh) -> None:
    """What stays gathered after them serves the next step."""
    model, single = twins(mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single)]
    for number in range(3):
        assert_same_step(model, single, number)
        step(*optimizers)
        with torch.inference_mode():
            assert torch.equal(model(batch(9)), single(batch(9)))


@on_ranks(2, gpus=())
def test_a_gather_on_its_way_keeps_its_scales(mesh: DeviceMesh) -> None:
    """FSDP2 uses the values of the time when it began to gather."""
    model, single = twins(mesh)
    evaluate(model)
    for part in (*model[:2], model):
        part.reshard()
    model[1].unshard(async_op=True)
    scale(3, model[1].weight)
    assert torch.equal(evaluate(model), evaluate(single))  # the first gather reduces all amaxes
    model[1].reshard()
    scale(3, single[1].weight)
    assert torch.equal(evaluate(model), evaluate(single))


@on_ranks(2, gpus=())
def test_a_weight_that_is_gathered_early_again_is_not_compared_again(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first forward only the weights that are gathered together are known."""
    model, single = twins(mesh)
    agreed: list[Any] = []
    agree = amax_table.agree
    monkeypatch.setattr(amax_table, "agree", lambda *x: (agreed.append(x[1]), agree(*x)))
    for _ in range(2):
        for block in model[:2]:
            block.unshard()
            block.reshard()
    assert [len(lines) for lines in agreed] == [1, 1]
    assert torch.equal(evaluate(model), evaluate(single))
    model.reshard()
    assert torch.equal(evaluate(model), evaluate(single))
    assert [len(lines) for lines in agreed] == [1, 1, 3]
