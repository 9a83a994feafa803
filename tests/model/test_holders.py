"""The modules that hold a parameter, and frozen weights that another module needs."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, to_blockwise_fp8_weights
from blocktensor.model import holders
from blocktensor.model.holders import holders_of_weight
from tests.support.models import DIM, TOKENS, Model, converted_names, reasons


def test_who_holds_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, embedding, other = nn.Linear(DIM, 50), nn.Embedding(50, DIM), nn.Module()
    assert holders_of_weight(linear) == [linear]
    embedding.weight = linear.weight
    assert set(holders_of_weight(linear)) == {linear, embedding}
    other.some = linear.weight
    assert set(holders_of_weight(linear, known=2)) == {linear, embedding, other}
    elsewhere = [dict(linear.named_parameters()), list(linear.parameters())]
    assert set(holders_of_weight(linear)) == {linear, embedding, other}
    del other.some, elsewhere
    monkeypatch.setattr(holders.gc, "get_referrers", None)  # the search is saved
    assert holders_of_weight(linear, known=2) == [linear]


def test_apply_leaves_a_frozen_weight_to_its_embedding() -> None:
    model = Model(tied=True).requires_grad_(False)
    wanted = model.embed.weight.detach().clone()
    with pytest.warns(UserWarning, match="stays in high precision") as warned:
        model.apply(to_blockwise_fp8_weights)
    assert_expected_inline(
        textwrap.fill(str(warned[0].message), 84),
        """\
a frozen weight [50, 64] stays in high precision, because another module holds it
too (Embedding): give the linear a copy of its own, or let the weight require a
gradient""",
    )
    assert len(warned) == 1
    assert model.lm_head.weight is model.embed.weight
    assert type(model.embed.weight) is nn.Parameter
    assert torch.equal(model.embed.weight, wanted)
    assert len(converted_names(model)) == 4
    model(TOKENS)


def test_a_frozen_weight_that_attention_multiplies_by_stays() -> None:
    """Without calling the linear that holds it."""
    attention, linear = nn.MultiheadAttention(DIM, 2), nn.Linear(DIM, DIM)
    linear.weight = attention.out_proj.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="NonDynamicallyQuantizableLinear"):
        linear.apply(to_blockwise_fp8_weights)
    assert type(linear.weight) is nn.Parameter


def test_frozen_linears_that_share_a_weight_are_converted() -> None:
    a, b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    b.weight = a.weight
    model = nn.Sequential(a, b).requires_grad_(False)
    model.apply(to_blockwise_fp8_weights)
    assert a.weight is b.weight
    assert isinstance(a.weight, BlockwiseFP8Tensor)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_convert_knows_other_holders(inside: bool, frozen: bool) -> None:
    model, table = nn.Sequential(nn.Linear(DIM, 50), nn.Linear(DIM, DIM)), nn.Embedding(50, DIM)
    alias = nn.Module()
    table.weight = alias.alias = model[0].weight
    model.requires_grad_(not frozen)
    if inside:
        del table
        model.append(alias)
    else:
        del alias
    report = convert(model, auto_filter_small_kn=False)
    kind = "Module" if inside else "Embedding"
    if frozen:
        assert converted_names(model) == ["1"]
        why = f"frozen, and another module holds it too: {kind}"
        assert reasons(report)["0"] == why
    else:
        assert converted_names(model) == ["0", "1"]
        assert isinstance(model[0].weight, BlockwiseFP8Weight)
        others = {e.name: e.reason for e in report.converted}
        assert others == {
            "0": "trainable",
            "1": "trainable",
            **({"2.alias": "tied to '0'"} if inside else {}),
        }


@pytest.mark.parametrize("use", ["apply", "convert"])
def test_a_frozen_weight_on_meta_keeps_its_master(use: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"linear": nn.Linear(DIM, DIM), "alias": nn.Module()})
    model["alias"].of_linear = model["linear"].weight
    model.requires_grad_(False)
    if use == "apply":
        model.apply(to_blockwise_fp8_weights)
    else:
        report = convert(model, auto_filter_small_kn=False)
        assert [e.reason for e in report.converted] == ["initialised later", "tied to 'linear'"]
    assert isinstance(model["linear"].weight, BlockwiseFP8Weight)


def test_many_frozen_weights_are_converted_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search(*objects: Any) -> list[Any]:
        raise AssertionError("a search among all objects")

    for use in (
        lambda model: model.apply(to_blockwise_fp8_weights),
        lambda model: convert(model, auto_filter_small_kn=False),
    ):
        model = Model().requires_grad_(False)
        with monkeypatch.context() as patched:
            patched.setattr(holders.gc, "get_referrers", search)
            use(model)
        assert len(converted_names(model)) >= 4
