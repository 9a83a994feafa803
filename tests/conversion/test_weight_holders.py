"""Other modules that hold the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, freeze, unfreeze
from blocktensor import to_blockwise_fp8_weights as apply
from tests.support.conversions import refused
from tests.support.models import DIM, TOKENS, Model, reasons


def test_apply_does_not_see_the_embedding_of_a_frozen_weight() -> None:
    model = Model(tied=True).requires_grad_(False).apply(apply)
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.embed.weight, BlockwiseFP8Tensor)
    with pytest.raises(NotImplementedError, match=r"embedding.*dequantize"):
        model(TOKENS)


HOLDERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "Module": lambda: (holder := nn.Module(), holder),
    "Embedding": lambda: (holder := nn.Embedding(DIM, DIM), holder),
    "NonDynamicallyQuantizableLinear": lambda: (
        attention := nn.MultiheadAttention(DIM, 2),
        attention.out_proj,
    ),
}
"""Modules, and the part of each that may hold the weight of a linear."""


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", HOLDERS)
def test_convert_and_freeze_know_other_holders(kind: str, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    whole, holder = HOLDERS[kind]()
    holder.weight = model[0].weight
    model.append(whole).requires_grad_(not frozen)
    report = convert(model, skip_small=False, convert_head=True)
    if frozen:
        assert isinstance(model[1].weight, BlockwiseFP8Tensor)
        assert type(model[0].weight) is nn.Parameter
        why = f"frozen, and another module holds it too: {kind}"
        assert reasons(report)["0"] == ("tied to embedding '2'" if kind == "Embedding" else why)
    elif kind == "Module":  # which may be anything
        assert isinstance(holder.weight, BlockwiseFP8Weight)
        assert reasons(report) == {"2": "not the weight of a linear layer: in Module; tied to '0'"}
    else:
        model[0].apply(apply)
    if not frozen:
        text = refused(model, ValueError, freeze)
        assert f"'0' cannot be frozen, because another module reads its values too ({kind})" in text
        assert unfreeze(model) == []  # it is trainable already
