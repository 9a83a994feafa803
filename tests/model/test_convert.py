"""Converting models in place: what is converted, what is not and why, and what must survive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    SmallKN,
    convert,
    functional,
    to_blockwise_fp8_weights,
)
from tests.support.models import (
    DIM,
    POWER_OF_TWO,
    TOKENS,
    Model,
    complaint,
    converted_names,
    plain,
    randn,
    reasons,
)

LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


# apply


def test_apply_converts_every_linear_whatever_its_size_or_name() -> None:
    model = Model()
    assert model.apply(to_blockwise_fp8_weights) is model
    assert converted_names(model) == [*LINEARS, "lm_head"]
    assert all(type(p.data) is Tensor for n, p in model.named_parameters() if "bias" in n)


def test_apply_twice_changes_nothing() -> None:
    model = Model().apply(lambda m: to_blockwise_fp8_weights(m, POWER_OF_TWO))
    inside = [p.master for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
    model.apply(to_blockwise_fp8_weights)
    again = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
    assert all(a.master is b for a, b in zip(again, inside, strict=True))
    assert {p.recipe for p in again} == {POWER_OF_TWO}


@pytest.mark.parametrize("use", ["apply", "convert"])
def test_tied_linears_stay_tied(use: str) -> None:
    a, b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    if use == "apply":
        model.apply(to_blockwise_fp8_weights)
    else:
        report = convert(model, auto_filter_small_kn=False)
        assert [e.reason for e in report.converted] == ["trainable", "tied to '0'"]
        assert report.bytes_before == 4 * DIM * DIM
    assert a.weight is b.weight
    assert isinstance(a.weight, BlockwiseFP8Weight)
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


def test_a_parametrized_linear_is_left_alone_and_said_so() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)))
    with pytest.warns(UserWarning, match="no weight of this Sequential is in FP8"):
        report = convert(model, auto_filter_small_kn=False)
    assert report.converted == ()
    assert "parametri" in reasons(report)["0.parametrizations.weight.original1"]


def test_a_linear_subclass_is_converted_and_other_modules_are_not() -> None:
    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "mine": Mine(DIM, DIM),
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
    report = convert(model, auto_filter_small_kn=False)
    assert {e.reason for e in report.converted} == {
        "trainable" if trainable else "initialised later"
    }
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
        model = Model().apply(to_blockwise_fp8_weights)
        y = model(TOKENS.to("meta"))
    assert (y.shape, y.device.type) == ((2, 6, 50), "meta")
    y.sum().backward()
    assert model.blocks[0].up.weight.grad.shape == (3 * DIM, DIM)


def test_a_model_in_float64() -> None:
    model = Model().double()
    with pytest.warns(UserWarning, match=r"dtype torch\.float64 \(4\)"):
        report = convert(copy.deepcopy(model), auto_filter_small_kn=False)
    assert reasons(report)["blocks.0.up"] == "dtype torch.float64"
    assert report.converted == ()
    text = complaint(TypeError, lambda: model.apply(to_blockwise_fp8_weights))
    assert_expected_inline(
        text,
        """\
the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )


# convert


@pytest.mark.parametrize("head", ["lm_head", "output", "head", "embed_out", "logits"])
def test_the_usual_heads_are_left_alone(head: str) -> None:
    model = Model(head=head)
    report = convert(model, auto_filter_small_kn=False)
    assert reasons(report) == {
        "embed": "embedding",
        head: "lm head: 50 outputs, the entries of 'embed'",
    }
    assert converted_names(model) == LINEARS


def test_a_tied_head_of_any_name_is_left_alone() -> None:
    model = Model(tied=True, head="anything")
    report = convert(model, auto_filter_small_kn=False)
    assert reasons(report) == {"embed": "embedding", "anything": "tied to embedding 'embed'"}
    assert model.anything.weight is model.embed.weight
    assert type(model.embed.weight.data) is Tensor


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("by", ["skip", "filter"])
def test_a_linear_that_is_left_out_keeps_its_weight_for_those_tied_to_it(
    by: str, first: bool
) -> None:
    model = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in ("a", "b", "c")})
    model["b"].weight = model["a"].weight
    out, other = ("a", "b") if first else ("b", "a")
    if by == "skip":
        report, why = (
            convert(model, skip=[out], auto_filter_small_kn=False),
            f"skip pattern {out!r}",
        )
    else:
        report, why = (
            convert(model, filter=lambda m, n: n != out, auto_filter_small_kn=False),
            "filter",
        )
    assert converted_names(model) == ["c"]
    assert reasons(report) == {out: why, other: f"tied to {out!r}: {why}"}


def test_tied_linears_convert_once_and_say_so_again() -> None:
    model = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in ("a", "b")})
    model["b"].weight = model["a"].weight
    for first in ("trainable", "already converted"):
        report = convert(model, auto_filter_small_kn=False)
        assert [e.reason for e in report.entries] == [first, "tied to 'a'"]
    model["embed"] = nn.Embedding(DIM, DIM)
    model["embed"].weight = model["a"].weight
    report = convert(model, auto_filter_small_kn=False)
    assert [e.converted for e in report.entries] == [True] * 3
    assert [e.reason for e in report.entries] == ["already converted"] + ["tied to 'a'"] * 2


def test_the_output_projection_of_attention_is_left_alone() -> None:
    model = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)
    report = convert(model, auto_filter_small_kn=False)
    assert [e.name for e in report.converted] == ["linear1", "linear2"]
    assert "MultiheadAttention" in reasons(report)["self_attn.out_proj"]
    x = randn(2, 5, DIM, dtype=torch.float32, grad=True)
    model(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert model.eval()(x).shape == x.shape


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"auto_filter_small_kn": False}, LINEARS),
        ({"auto_filter_small_kn": SmallKN(n=DIM, k=DIM, size=0)}, LINEARS),
        ({"auto_filter_small_kn": SmallKN(n=DIM + 1, k=0, size=0)}, ["blocks.0.up", "blocks.1.up"]),
        (
            {"auto_filter_small_kn": SmallKN(n=0, k=DIM + 1, size=0)},
            ["blocks.0.down", "blocks.1.down"],
        ),
        ({"auto_filter_small_kn": False, "skip": ["*.up"]}, ["blocks.0.down", "blocks.1.down"]),
        ({"auto_filter_small_kn": False, "skip": ("blocks.0.*", "*.1.up")}, ["blocks.1.down"]),
        (
            {"auto_filter_small_kn": False, "filter": lambda m, name: m.bias is None},
            ["blocks.0.down", "blocks.1.down"],
        ),
    ],
)
def test_what_convert_leaves_out(options: dict[str, Any], left: list[str]) -> None:
    model = Model()
    report = convert(model, **options)
    assert converted_names(model) == left == [e.name for e in report.converted]
    assert len(report.entries) == 6
    assert all(entry.reason for entry in report.entries)


def test_the_filter_sees_only_linears_that_could_be_converted() -> None:
    seen: list[tuple[type, str]] = []

    def see(module: nn.Module, name: str) -> bool:
        seen.append((type(module), name))
        return True

    convert(Model(), filter=see, auto_filter_small_kn=False)
    assert seen == [(nn.Linear, name) for name in LINEARS]


def test_biases_stay_and_training_goes_on(device: torch.device) -> None:
    model, reference = Model(), Model()
    for m in (model, reference):
        m.to(device)
    convert(model, auto_filter_small_kn=False)
    losses = []
    for m in (model, reference):
        loss = m(TOKENS.to(device)).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = (p.grad - q.grad).norm() / q.grad.norm()
        assert error < 0.2, name


def test_other_thresholds_are_refused() -> None:
    model = Model()
    with pytest.raises(TypeError, match=r"auto_filter_small_kn='yes': expected True, False or a"):
        convert(model, auto_filter_small_kn="yes")  # type: ignore[arg-type]
    assert not any(isinstance(p, BlockwiseFP8Weight) for p in model.parameters())
