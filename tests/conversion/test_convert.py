"""Models converted in place: by apply and by convert, frozen, on meta, and what must survive."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    convert,
    functional,
    to_blockwise_fp8_weights,
)
from tests.support.models import (
    DIM,
    LINEARS,
    POWER_OF_TWO,
    TOKENS,
    Model,
    complaint,
    converted_names,
    plain,
    randn,
    reasons,
)

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "apply": lambda model: model.apply(to_blockwise_fp8_weights),
    "convert": lambda model: convert(model, skip_small=False),
}
either_way = pytest.mark.parametrize("use", WAYS)


def test_apply_converts_every_linear_whatever_its_size_or_name() -> None:
    model = Model()
    assert model.apply(to_blockwise_fp8_weights) is model
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
        assert [e.reason for e in report.converted] == [first, "tied to '0'"]  # type: ignore[attr-defined]
        assert report.bytes_before == 4 * DIM * DIM  # type: ignore[attr-defined]
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight)
    assert len(list(model.parameters())) == 3


def test_apply_to_a_head_tied_to_an_embedding() -> None:
    model = Model(tied=True).apply(to_blockwise_fp8_weights)
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
    ).apply(to_blockwise_fp8_weights)
    assert converted_names(model) == ["mine"]
    x = randn(3, 1, DIM, dtype=torch.float32)
    assert model["attention"](x, x, x)[0].shape == x.shape


# Frozen, meta, other dtypes


def test_a_frozen_weight_drops_its_high_precision_copy(device: torch.device) -> None:
    module = nn.Linear(DIM, 3 * DIM, device=device).requires_grad_(False)
    wanted = plain(module.weight)
    x = randn(5, DIM, dtype=torch.float32, device=device, grad=True)
    to_blockwise_fp8_weights(module, POWER_OF_TWO)
    assert type(module.weight) is BlockwiseFP8Tensor
    assert isinstance(module.weight, nn.Parameter)
    assert not module.weight.requires_grad
    assert torch.equal(module(x), functional.linear(x, wanted, module.bias, recipe=POWER_OF_TWO))
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


@pytest.mark.parametrize("trainable", [True, False])
def test_meta_modules_are_initialised_later(trainable: bool, device: torch.device) -> None:
    with torch.device("meta"):
        model = Model().requires_grad_(trainable)
    report = convert(model, skip_small=False)
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


@either_way
def test_a_frozen_weight_on_meta_keeps_its_master(use: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"linear": nn.Linear(DIM, DIM), "alias": nn.Module()})
    model["alias"].of_linear = model["linear"].weight
    report = WAYS[use](model.requires_grad_(False))
    if use == "convert":
        why = [e.reason for e in report.converted]  # type: ignore[attr-defined]
        assert why == ["initialised later", "tied to 'linear'"]
    assert isinstance(model["linear"].weight, BlockwiseFP8Weight)


def test_a_meta_module_can_run_for_its_shapes() -> None:
    with torch.device("meta"):
        model = Model().apply(to_blockwise_fp8_weights)
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
        complaint(TypeError, lambda: model.apply(to_blockwise_fp8_weights)),
        """\
the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
