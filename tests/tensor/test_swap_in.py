"""A parameter that becomes FP8 stays the same object, with all that hangs on it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import (
    BlockwiseFP8Weight,
    Recipe,
    convert,
    freeze,
    functional,
    to_blockwise_fp8_weights,
    unfreeze,
)
from tests.support.models import (
    DIM,
    FP32_SCALES,
    POWER_OF_TWO,
    TOKENS,
    Model,
    complaint,
    linear,
    plain,
    randn,
)


def test_apply_preserves_all_that_hangs_on_the_model() -> None:
    model = Model().eval()
    seen: list[str] = []
    up = model.blocks[0].up
    up.register_forward_hook(lambda *_: seen.append("forward"))
    up.register_forward_pre_hook(lambda *_: seen.append("pre"))
    up.weight.register_hook(lambda g: seen.append("grad"))
    up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    up.weight.grad = torch.ones_like(up.weight)
    before = {
        "ids": [id(p) for p in model.parameters()],
        "names": [n for n, _ in model.named_parameters()],
        "classes": [type(m) for m in model.modules()],
        "values": [p.detach().clone() for p in model.parameters()],
    }
    model.apply(to_blockwise_fp8_weights)
    assert [id(p) for p in model.parameters()] == before["ids"]
    assert [n for n, _ in model.named_parameters()] == before["names"]
    assert [type(m) for m in model.modules()] == before["classes"]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    for p, values in zip(model.parameters(), before["values"], strict=True):
        assert torch.equal(plain(p), values)
    assert not model.training
    assert torch.equal(up.weight.grad, torch.ones_like(up.weight.grad))
    model(TOKENS).sum().backward()
    assert seen == ["pre", "forward", "grad", "accumulated"]
    assert up.weight.grad.max() > 1.0001  # and accumulates


def test_attributes_of_a_parameter_survive() -> None:
    module = nn.Linear(DIM, DIM)
    module.weight.tensor_model_parallel = True
    to_blockwise_fp8_weights(module)
    assert module.weight.tensor_model_parallel


def test_an_optimizer_made_before_conversion_keeps_working() -> None:
    models = Model(), Model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for module in (models[1], *models):  # one optimizer has state already
        module(TOKENS).sum().backward()
    models[0].apply(to_blockwise_fp8_weights)
    for model, optimizer in zip(models, optimizers, strict=True):
        for i, p in enumerate(model.parameters()):
            p.grad = randn(*p.shape, seed=i, dtype=p.dtype)
        optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain(a), plain(b))
    assert set(optimizers[0].param_groups[0]["params"]) == set(models[0].parameters())


@pytest.mark.parametrize("x_grad", [False, True])
def test_converting_between_forward_and_backward_is_an_error(x_grad: bool) -> None:
    module = nn.Linear(DIM, DIM)
    loss = module(randn(3, DIM, dtype=torch.float32, grad=x_grad)).sum()

    def convert_then_backward() -> None:
        to_blockwise_fp8_weights(module)
        loss.backward()

    text = complaint(RuntimeError, convert_then_backward).replace("\n", " ")
    assert "between" in text
    assert "forward and" in text
    assert module.weight.grad is None


def test_attributes_that_others_hung_on_a_weight_stay() -> None:
    made = nn.Sequential(nn.Linear(DIM, DIM))
    convert(made, auto_filter_small_kn=False)
    made[0].weight.tag = "mine"
    freeze(made)
    assert made[0].weight.tag == "mine"
    unfreeze(made)
    assert made[0].weight.tag == "mine"
    assert not hasattr(made[0].weight, "rowwise_data")


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to dtype": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "bfloat16 and back": lambda m: m.bfloat16().float(),
    "_apply": lambda m: m._apply(lambda t: t.clone()),
    "data": lambda m: setattr(m.weight, "data", m.weight.data.to(torch.bfloat16)),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_hangs_on_a_weight_stays_as_in_plain_pytorch(move: str) -> None:
    module = linear(DIM, DIM, dtype=torch.float32)
    seen: list[str] = []
    weight, buffer = module.weight, torch.zeros(DIM, DIM)
    weight.register_hook(lambda g: seen.append("no grad" if g is None else "grad"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    weight.tag = "mine"
    weight.main_grad = buffer
    MOVES[move](module)
    assert module.weight is weight
    assert isinstance(weight, BlockwiseFP8Weight)
    assert weight.tag == "mine"
    assert weight.main_grad is buffer
    x = randn(3, DIM, dtype=weight.dtype)
    module(x).sum().backward()
    assert buffer.any()
    assert weight.grad is None
    assert seen == ["no grad", "accumulated"]
    weight.main_grad = None
    module(x).sum().backward()
    assert weight.grad is not None
    assert seen[2:] == ["grad", "accumulated"]


def test_pickles_keep_attributes_and_main_grad() -> None:
    module = linear(DIM, DIM)
    module.weight.tag, module.weight.main_grad = "mine", torch.ones(DIM, DIM)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(module)):
        assert twin.weight.tag == "mine"
        assert torch.equal(twin.weight.main_grad, torch.ones(DIM, DIM))
        twin(randn(3, DIM)).sum().backward()
        assert not torch.equal(twin.weight.main_grad, torch.ones(DIM, DIM))
    assert torch.equal(module.weight.main_grad, torch.ones(DIM, DIM))


@pytest.mark.parametrize("recipe", [FP32_SCALES, POWER_OF_TWO], ids=lambda r: r.scale)
def test_new_data_of_another_dtype_as_accelerate_sets_it(recipe: Recipe) -> None:
    module = linear(DIM, DIM, recipe=recipe)
    optimizer = torch.optim.AdamW(module.parameters())
    values = plain(module.weight).float()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32)
    assert optimizer.param_groups[0]["params"][0] is module.weight
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight.master, values)
    x = randn(3, DIM, dtype=torch.float32)
    assert module.weight.recipe == recipe
    assert torch.equal(module(x), functional.linear(x, values, recipe=recipe))
    with pytest.raises(TypeError, match=r"torch\.int64"):
        module.weight.data = torch.ones(DIM, DIM, dtype=torch.int64)
    assert torch.equal(module(x), functional.linear(x, values, recipe=recipe))


def test_main_grad_moves_with_its_weight() -> None:
    module = linear(DIM, DIM)
    module.weight.main_grad = torch.zeros(DIM, DIM)
    module.to("meta")
    assert module.weight.is_meta
    assert module.weight.main_grad.is_meta


def test_new_data_without_high_precision_values_is_refused() -> None:
    module, frozen = linear(DIM, DIM), linear(DIM, DIM, frozen=True)
    x, master = randn(3, DIM), module.weight.master
    wanted = module(x)
    for new in (frozen.weight, frozen.weight.detach().to(torch.float32)):
        with pytest.raises(TypeError, match=r"new \.data of an FP8 weight is .*\.dequantize\(\)"):
            module.weight.data = new
    with pytest.raises(TypeError, match=r"new \.data of an FP8 weight has dtype torch\.int64"):
        module.weight.data = torch.ones(DIM, DIM, dtype=torch.int64)
    for new in (frozen.weight, module.weight):
        with pytest.raises(TypeError, match="master of a BlockwiseFP8Weight must be plain"):
            BlockwiseFP8Weight(new)
    with pytest.raises(TypeError, match="master of a BlockwiseFP8Weight must be plain"):
        module.load_state_dict({"weight": frozen.weight}, assign=True)
    assert module.weight.master is master
    assert torch.equal(module(x), wanted)
    module.weight.data = frozen.weight.dequantize()
    assert torch.equal(module(x), frozen(x))
