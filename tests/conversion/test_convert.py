"""Models converted in place by apply and by convert; trainable FP8 weights made frozen and back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    freeze,
    functional,
    unfreeze,
)
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.ops import reference
from tests.support.backends import replace_op
from tests.support.models import (
    DIM,
    LINEARS,
    POWER_OF_TWO,
    RECIPES,
    TOKENS,
    Model,
    complaint,
    converted_names,
    linear,
    plain,
    randn,
    reasons,
)

N, K = 200, 300

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "apply": lambda model: model.apply(apply),
    "convert": lambda model: convert(model, skip_small=False),
}
either_way = pytest.mark.parametrize("use", WAYS)


def test_apply_converts_every_linear_whatever_its_size_or_name() -> None:
    model = Model()
    assert model.apply(apply) is model
    assert converted_names(model) == [*LINEARS, "lm_head"]
    assert all(type(p.data) is Tensor for n, p in model.named_parameters() if "bias" in n)


@either_way
@pytest.mark.parametrize("frozen", [False, True])
def test_tied_linears_stay_tied(frozen: bool, use: str) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).requires_grad_(not frozen)
    model[1].weight = model[0].weight
    report = WAYS[use](model)
    if use == "convert":
        first = "frozen: high-precision copy dropped" if frozen else "trainable"
        assert [e.reason for e in report.converted] == [first, "tied to '0'"]
        assert report.bytes_before == 4 * DIM * DIM
    kinds = (BlockwiseFP8Tensor, BlockwiseFP8Weight)
    for kind, change in ((kinds[not frozen], freeze), (kinds[0], unfreeze), (kinds[1], None)):
        assert model[0].weight is model[1].weight
        assert isinstance(model[0].weight, kind)
        assert len(list(model.parameters())) == 3
        if change is not None:
            assert change(model) == ([] if frozen and change is freeze else ["0", "1"])


def test_apply_to_a_head_tied_to_an_embedding() -> None:
    model = Model(tied=True).apply(apply)
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.embed.weight, BlockwiseFP8Weight)
    rows = model.embed(TOKENS)
    assert torch.equal(rows, nn.functional.embedding(TOKENS, plain(model.embed.weight)))
    x = randn(3, DIM, dtype=torch.float32)
    assert torch.equal(model.lm_head(x), functional.linear(x, plain(model.embed.weight)))
    model(TOKENS).sum().backward()
    assert torch.isfinite(model.embed.weight.grad).all()


def test_a_linear_subclass_is_converted_and_other_modules_are_not() -> None:
    model = nn.ModuleDict(
        {
            "mine": type("Mine", (nn.Linear,), {})(DIM, DIM),
            "conv": nn.Conv1d(DIM, DIM, 1),
            "bilinear": nn.Bilinear(DIM, DIM, DIM),
            "norm": nn.LayerNorm(DIM),
            "attention": nn.MultiheadAttention(DIM, 2),
        }
    ).apply(apply)
    assert converted_names(model) == ["mine"]
    x = randn(3, 1, DIM, dtype=torch.float32)
    assert model["attention"](x, x, x)[0].shape == x.shape


# Frozen, meta, other dtypes


def test_a_frozen_weight_drops_its_high_precision_copy(device: torch.device) -> None:
    module = nn.Linear(DIM, 3 * DIM, device=device).requires_grad_(False)
    wanted = plain(module.weight)
    x = randn(5, DIM, dtype=torch.float32, device=device, grad=True)
    apply(module, POWER_OF_TWO)
    assert type(module.weight) is BlockwiseFP8Tensor
    assert isinstance(module.weight, nn.Parameter)
    assert not module.weight.requires_grad
    assert torch.equal(module(x), functional.linear(x, wanted, module.bias, recipe=POWER_OF_TWO))
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


@either_way
@pytest.mark.parametrize("trainable", [True, False])
def test_meta_modules_are_initialised_later(
    trainable: bool, use: str, device: torch.device
) -> None:
    with torch.device("meta"):
        model = Model().requires_grad_(trainable)
    report = WAYS[use](model)
    if use == "convert":
        why = "trainable" if trainable else "initialised later"
        assert {e.reason for e in report.converted} == {why}
        assert converted_names(model) == LINEARS
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    up = model.blocks[0].up
    assert isinstance(up.weight, BlockwiseFP8Weight)
    assert up.weight.master.device.type == device.type
    x = randn(5, DIM, dtype=torch.float32, device=device)
    assert torch.equal(up(x), functional.linear(x, plain(up.weight), up.bias))


def test_a_meta_module_can_run_for_its_shapes() -> None:
    with torch.device("meta"):
        model = Model().apply(apply)
        y = model(TOKENS.to("meta"))
    assert (y.shape, y.device.type) == ((2, 6, 50), "meta")
    y.sum().backward()
    assert model.blocks[0].up.weight.grad.shape == (3 * DIM, DIM)


def test_a_model_in_float64() -> None:
    model = Model().double()
    with pytest.warns(UserWarning, match=r"dtype torch\.float64 \(4\)"):
        report = convert(copy.deepcopy(model), skip_small=False)
    assert reasons(report)["blocks.0.up"] == "dtype torch.float64"
    assert report.converted == ()
    assert_expected_inline(
        complaint(TypeError, lambda: model.apply(apply)),
        """\
the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )


# Freezing


def linears(recipe: Recipe | None = None) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K, bias=False)).bfloat16()
    if recipe is not None:
        convert(made, recipe, skip_small=False)
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_freezing_keeps_the_bits_of_forward_and_data_gradient(recipe: Recipe) -> None:
    trained = linears(recipe)
    x, grad = randn(5, K, grad=True), randn(5, K, seed=2)
    y = trained(x)
    y.backward(grad)
    wanted, x.grad = (y.detach(), x.grad), None
    del y  # its graph holds the weights' caches
    weights = [trained[0].weight, trained[2].weight]
    masters = [weakref.ref(weight.master) for weight in weights]
    assert freeze(trained) == ["0", "2"]
    again = trained(x)
    again.backward(grad)
    assert torch.equal(again, wanted[0])
    assert torch.equal(x.grad, wanted[1])
    for weight, layer in zip(weights, (trained[0], trained[2]), strict=True):
        assert layer.weight is weight
        assert isinstance(weight, BlockwiseFP8Tensor)
        assert weight.recipe is recipe
        assert not weight.requires_grad
        assert weight.grad is None
    assert trained[0].bias.requires_grad
    assert [ref() for ref in masters] == [None, None]
    assert freeze(trained) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("told", [False, True], ids=["", "told to require a gradient"])
def test_an_unfrozen_weight_trains_from_the_values_it_had(dtype: torch.dtype, told: bool) -> None:
    trained = linears(RECIPES[0]).to(dtype)
    freeze(trained)
    if told:
        trained.requires_grad_(True)
    values = [layer.weight.dequantize() for layer in (trained[0], trained[2])]
    assert unfreeze(trained) == ["0", "2"]
    assert all(parameter.requires_grad for parameter in trained.parameters())
    for layer, value in zip((trained[0], trained[2]), values, strict=True):
        assert isinstance(layer.weight, BlockwiseFP8Weight)
        assert torch.equal(layer.weight.master, value)
    trained(randn(5, K, dtype=dtype)).square().sum().backward()
    torch.optim.SGD(trained.parameters(), lr=0.5).step()
    last, h = trained[2], randn(5, N, dtype=dtype)
    assert not torch.equal(last.weight.master, values[1])
    assert torch.equal(last(h), functional.linear(h, plain(last.weight)))
    assert all(type(x) is torch.Tensor for x in trained.state_dict().values())
    assert unfreeze(trained) == []


def test_the_columnwise_form_of_a_frozen_weight_is_made_for_each_dgrad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, calls = linears(Recipe()), []
    freeze(made)
    transpose = reference.transpose
    replace_op(monkeypatch, "transpose", lambda q: calls.append(1) or transpose(q))
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


def test_a_stack_that_two_modules_hold() -> None:
    model = nn.Sequential(nn.Module(), nn.Module())
    model[0].w = model[1].w = nn.Parameter(torch.randn(2, 256, 256))
    convert(model, skip_small=False, stacks={"0": ["w"], "1": ["w"]})
    assert freeze(model) == ["0.w", "1.w"]


def test_what_is_not_fp8_is_left_alone() -> None:
    made = linears()
    reference = weakref.ref(made[0].weight)  # it could not be exchanged
    for change in (freeze, unfreeze):
        with pytest.warns(UserWarning, match=f"{change.__name__} changes nothing: this Sequential"):
            assert change(made) == []
    del reference


def test_a_weight_that_was_never_trainable_keeps_its_type_after_unfreezing() -> None:
    module = linear(128, 192, frozen=True)
    assert unfreeze(module) == [""]
    values = randn(128, 192, seed=5)
    module.load_state_dict({"weight": values}, assign=True)
    assert isinstance(module.weight, BlockwiseFP8Weight)
    assert module.weight.master.data_ptr() == values.data_ptr()


def test_freezing_while_a_graph_waits_that_does_not_read_the_weight() -> None:
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


def test_freezing_in_inference_mode_with_a_graph_that_is_kept() -> None:
    module = linear(DIM, DIM)
    y = module(randn(8, DIM))
    with torch.inference_mode():
        freeze(module)
    assert isinstance(module.weight, BlockwiseFP8Tensor) and y.requires_grad


def test_a_master_has_the_sign_of_the_values() -> None:
    """Optimizers write to its memory."""
    values = randn(DIM, DIM, dtype=torch.complex64).conj().imag
    assert values.is_neg()
    module = nn.Linear(DIM, DIM)
    module.weight = nn.Parameter(values)
    convert(module, skip_small=False)
    master = module.weight.master
    assert not master.is_neg() and torch.equal(master, values)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: convert(m, skip_small=False),
        lambda m: m.apply(apply),
        lambda m: (convert(m, skip_small=False), freeze(m)),
        lambda m: (convert(m, skip_small=False), freeze(m), unfreeze(m)),
    ],
)
def test_weights_changed_in_inference_mode_can_be_trained(change: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    with torch.inference_mode():
        change(model)
    assert not any(p.is_inference() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = randn(8, DIM, dtype=torch.float32).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    assert x.grad is not None
