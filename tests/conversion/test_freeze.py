"""Trainable FP8 weights made frozen, and frozen ones trainable."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    freeze,
    functional,
    to_blockwise_fp8_weights,
    unfreeze,
)
from blocktensor.ops import reference
from tests.support.models import DIM, POWER_OF_TWO, RECIPES, linear, plain, randn
from tests.support.reference_ops import replace_op

N, K = 200, 300


def model(recipe: object = None) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K, bias=False)).bfloat16()
    if recipe is not None:
        convert(made, recipe, skip_small=False)
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_freezing_keeps_the_bits_of_forward_and_data_gradient(recipe: object) -> None:
    trained = model(recipe)
    x, grad = randn(5, K, grad=True), randn(5, K, seed=2)
    y = trained(x)
    y.backward(grad)
    wanted, x.grad = (y.detach(), x.grad), None
    del y  # its graph holds the weights' caches
    masters = [weakref.ref(layer.weight.master) for layer in (trained[0], trained[2])]
    parameters = list(trained.parameters())
    assert freeze(trained) == ["0", "2"]
    assert list(map(id, trained.parameters())) == list(map(id, parameters))
    again = trained(x)
    again.backward(grad)
    assert torch.equal(again, wanted[0])
    assert torch.equal(x.grad, wanted[1])
    for layer in (trained[0], trained[2]):
        assert isinstance(layer.weight, BlockwiseFP8Tensor)
        assert layer.weight.recipe is recipe
        assert not layer.weight.requires_grad
        assert layer.weight.grad is None
    assert trained[0].bias.requires_grad
    assert [ref() for ref in masters] == [None, None]
    assert freeze(trained) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_unfrozen_weight_trains_from_the_values_it_had(dtype: torch.dtype) -> None:
    trained = model(RECIPES[0]).to(dtype)
    freeze(trained)
    values = [layer.weight.dequantize() for layer in (trained[0], trained[2])]
    assert unfreeze(trained) == ["0", "2"]
    assert all(parameter.requires_grad for parameter in trained.parameters())
    for layer, value in zip((trained[0], trained[2]), values, strict=True):
        assert isinstance(layer.weight, BlockwiseFP8Weight)
        assert torch.equal(layer.weight.master, value)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    x = randn(5, K, dtype=dtype)
    trained(x).square().sum().backward()
    optimizer.step()
    last = trained[2]
    assert not torch.equal(last.weight.master, values[1])
    h = randn(5, N, dtype=dtype)
    assert torch.equal(last(h), functional.linear(h, plain(last.weight)))
    state = trained.state_dict()
    assert all(type(x) is torch.Tensor for x in state.values())
    assert unfreeze(trained) == []


def test_the_columnwise_form_of_a_frozen_weight_is_made_for_each_dgrad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, calls = model(Recipe()), []
    freeze(made)
    transpose = reference.transpose
    replace_op(monkeypatch, "transpose", lambda q: (calls.append(1), transpose(q))[1])
    grads = []
    for _ in range(3):
        x = randn(5, K, grad=True)
        made[0](x).sum().backward()
        grads.append(x.grad)
    assert len(calls) == 3
    assert made[0].weight.columnwise_data is None
    assert torch.equal(grads[0], grads[2])


def test_a_linear_itself_is_frozen_again_with_another_recipe() -> None:
    module = linear(N, K)
    assert freeze(module) == unfreeze(module) == [""]
    convert(module, POWER_OF_TWO, skip_small=False)
    wanted, x = module(randn(5, K)), randn(5, K)
    freeze(module)
    assert module.weight.format == POWER_OF_TWO.weight_format
    assert torch.equal(module(x), wanted)


def test_tied_weights_stay_tied() -> None:
    a, b = nn.Linear(K, N, bias=False).bfloat16(), nn.Linear(K, N, bias=False)
    b.weight = a.weight
    tied = nn.ModuleList([a, b])
    convert(tied, skip_small=False)
    for change, kind in ((freeze, BlockwiseFP8Tensor), (unfreeze, BlockwiseFP8Weight)):
        assert change(tied) == ["0", "1"]
        assert tied[0].weight is tied[1].weight
        assert isinstance(tied[0].weight, kind)


def test_frozen_weights_that_were_told_to_require_a_gradient() -> None:
    made = model(RECIPES[0])
    freeze(made)
    made.requires_grad_(True)
    assert unfreeze(made) == ["0", "2"]
    assert all(isinstance(made[i].weight, BlockwiseFP8Weight) for i in (0, 2))


def test_what_is_not_fp8_is_left_alone() -> None:
    made = model()
    reference = weakref.ref(made[0].weight)  # it could not be exchanged
    assert freeze(made) == unfreeze(made) == []
    del reference
    with torch.device("meta"):
        on_meta = nn.Linear(K, N)
    convert(on_meta, skip_small=False)
    assert freeze(on_meta) == []


def test_a_weight_that_an_embedding_holds_too_is_not_frozen() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(64, DIM), "head": nn.Linear(DIM, 64)})
    model["head"].weight = model["embedding"].weight
    model.apply(to_blockwise_fp8_weights)
    weight = model["head"].weight
    with pytest.raises(ValueError, match=r"'head' cannot be frozen.* \(Embedding\)"):
        freeze(model)
    assert isinstance(weight, BlockwiseFP8Weight)
    assert model["embedding"].weight is weight


def test_frozen_weights_keep_attributes_and_take_assigned_values_in_fp8() -> None:
    module = nn.Sequential(linear(DIM, DIM))
    state = {name: 2 * value for name, value in module.state_dict().items()}
    freeze(module)
    module[0].weight.tag = "mine"
    module.half()
    assert module[0].weight.tag == "mine"
    module.bfloat16().load_state_dict(state, assign=True)
    weight = module[0].weight
    assert isinstance(weight, BlockwiseFP8Tensor)
    assert not weight.requires_grad
    wanted = BlockwiseFP8Tensor.from_values(state["0.weight"], (128, 128))
    assert torch.equal(weight.dequantize(), wanted.dequantize())


def test_a_weight_that_was_never_trainable_keeps_its_type_after_unfreezing() -> None:
    module = linear(128, 192, frozen=True)
    assert unfreeze(module) == [""]
    values = randn(128, 192, seed=5)
    module.load_state_dict({"weight": values}, assign=True)
    assert isinstance(module.weight, BlockwiseFP8Weight)
    assert module.weight.master.data_ptr() == values.data_ptr()


def test_freezing_while_a_graph_waits_that_does_not_read_the_weight() -> None:
    """That of a first layer, say: its gradient is dropped, as after requires_grad_(False)."""
    made, wanted = linear(DIM, DIM, bias=True), nn.Linear(DIM, DIM).bfloat16()
    for module, change in ((made, freeze), (wanted, lambda m: m.weight.requires_grad_(False))):
        kept = module(randn(5, DIM)).sum()
        kept.backward()  # a loss that is kept for its value
        waiting = module(randn(5, DIM, seed=2)).sum()
        change(module)
        assert module.weight.grad is None or module is wanted
        module.weight.grad = module.bias.grad = None
        waiting.backward()
        assert module.weight.grad is None
        assert module.bias.grad is not None
    assert isinstance(made.weight, BlockwiseFP8Tensor)
    assert isinstance(made.weight, nn.Parameter)
    unfreeze(made)
    made(randn(5, DIM)).sum().backward()
    assert made.weight.grad is not None


class Stack(nn.Module):
    def __init__(self, w: nn.Parameter) -> None:
        super().__init__()
        self.w = w


def test_a_stack_that_two_modules_hold() -> None:
    w = nn.Parameter(torch.randn(2, 256, 256))
    model = nn.Sequential(Stack(w), Stack(w))
    convert(model, skip_small=False, stacks={"0": ["w"], "1": ["w"]})
    assert freeze(model) == ["0.w", "1.w"]
