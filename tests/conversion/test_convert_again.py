"""A model that is converted again, with another recipe or without one."""

from __future__ import annotations

import copy

import torch

from blocktensor import Recipe, convert, unfreeze
from blocktensor import to_blockwise_fp8_weights as apply
from tests.support.conversions import LAST, everything, refused
from tests.support.models import DIM, LINEARS, POWER_OF_TWO, TOKENS, Model, converted_names


def test_another_recipe_is_taken_and_all_else_kept() -> None:
    model = Model()
    everything(model)
    up = model.blocks[0].up
    up.weight.grad = torch.ones(3 * DIM, DIM)
    up.weight.tag = "mine"
    seen: list[str] = []
    up.weight.register_hook(lambda grad: seen.append("grad"))
    weights = [model.get_submodule(name).weight for name in LINEARS]
    masters = [p.master for p in weights]
    identities = [id(p) for p in model.parameters()]

    report = convert(model, POWER_OF_TWO)  # its size no longer matters
    assert {e.reason for e in report.converted} == {"trainable"}
    assert [id(p) for p in model.parameters()] == identities
    assert {p.recipe for p in weights} == {POWER_OF_TWO}
    assert all(p.master is m for p, m in zip(weights, masters, strict=True))
    assert up.weight.tag == "mine"
    assert torch.equal(up.weight.grad, torch.ones(3 * DIM, DIM))
    assert len(up._state_dict_hooks) == 1

    fresh = Model()
    everything(fresh, recipe=POWER_OF_TWO)
    assert torch.equal(model(TOKENS), fresh(TOKENS))
    model(TOKENS).sum().backward()
    assert seen == ["grad"]
    assert not torch.equal(up.weight.grad, torch.ones(3 * DIM, DIM))


def test_without_a_recipe_nothing_changes() -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    everything(model, recipe=POWER_OF_TWO)
    everything(model)
    model.apply(apply)
    everything(model, recipe=Recipe(), skip=["blocks"])
    weights = [model.get_submodule(name).weight for name in converted_names(model)]
    assert [w.recipe for w in weights] == [POWER_OF_TWO] * 4 + [Recipe()]


def test_a_frozen_weight_keeps_its_recipe() -> None:
    model = Model()
    model.get_submodule(LAST).requires_grad_(False)
    everything(model)
    assert refused(model, ValueError, recipe=POWER_OF_TWO) == (
        "the weight of 'blocks.1.down' is frozen in FP8, without its high-precision values: it "
        "was cast with scale='fp32' and cannot be cast with scale='power_of_two'; convert the "
        "original weights, or unfreeze(model) first, to cast the FP8 values, or call without a "
        "recipe, which leaves alone what is FP8 already"
    )
    other = copy.deepcopy(model)
    unfreeze(other)
    everything(other, recipe=POWER_OF_TWO)
    assert other.get_submodule(LAST).weight.recipe == POWER_OF_TWO
    layer = model.get_submodule(LAST)
    refused(layer, ValueError, lambda m: apply(m, POWER_OF_TWO))
    report = everything(model, recipe=POWER_OF_TWO, skip=[LAST])
    assert report.entries[-2].reason == "already converted"
    assert layer.weight.recipe == Recipe()
    assert model.blocks[0].up.weight.recipe == POWER_OF_TWO
