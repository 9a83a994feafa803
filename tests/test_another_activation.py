"""An activation that the package does not know: one entry in a table, and it runs everywhere."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blocktensor import functional, fuse
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from blocktensor.ops.producers import activations
from blocktensor.ops.producers.activations import ACTIVATIONS, Activation, ActivationName
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from tests.docs.code_blocks import ROOT
from tests.support.gated import EAGER, Kind, assert_bits, every_kind
from tests.support.mlps import MLP, converted, results

NEW: Any = "mish"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    monkeypatch.setitem(ACTIVATIONS, NEW, Activation(aten.mish, aten.mish_backward))
    monkeypatch.setitem(EAGER, NEW, F.mish)


@pytest.mark.parametrize("act", [nn.Mish(), F.mish], ids=["module", "function"])
def test_fuse_recognizes_it(act: Any) -> None:
    model = converted(MLP(act=act))
    wanted = results(model)
    (entry,) = fuse(model).fused
    assert entry.computes == "down_proj(mish(gate_proj(x)) * up_proj(x))"
    assert_bits(results(model), wanted)


@every_kind
def test_gated_functions_take_it(kind: Kind) -> None:
    kind.assert_same_bits(kind.inputs(), kind.weights(), NEW)


@pytest.mark.parametrize("backend", PRODUCER_BACKENDS[:-1], ids=lambda backend: backend.name)
def test_kernels_decline_it(backend: Any) -> None:
    gate, up = torch.empty((128, 512), dtype=torch.bfloat16, device="meta").chunk(2, 1)
    problem = ProducerProblem(NEW, (gate, up), BLOCKS_1X128, BLOCKS_128X128)
    assert backend.declines(problem) == "has no PTX of mish"


def test_every_activation_is_named_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (ACTIVATIONS, EAGER):
        monkeypatch.delitem(table, NEW)
    assert (*ACTIVATIONS,) == get_args(ActivationName), f"name it in {activations.__name__}, too"
    assert EAGER.keys() == ACTIVATIONS.keys(), "write it as models do in tests/support/gated.py"
    pages = {
        "functional.gated_mlp": str(functional.gated_mlp.__doc__),
        "docs/guides/fusing.md": (ROOT / "docs/guides/fusing.md").read_text("utf-8"),
    }
    for page, text in pages.items():
        missing = [name for name in ACTIVATIONS if f'"{name}"' not in text]
        assert missing == [], f"{page} lists the activations"
