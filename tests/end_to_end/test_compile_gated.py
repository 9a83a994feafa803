"""Gated MLPs and fused norms under torch.compile: one graph, registered ops, eager's bits."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.overrides import dynamo
from tests.support import mlps
from tests.support.compiling import (
    afresh,
    compiled_graphs,
    graphs,
    instantiates,
    ops_in,
)
from tests.support.gated import results, unfused, weights
from tests.support.groups import ends
from tests.support.models import plain, randn
from tests.support.norms import NAMES, Norm, OfTorch, fused_blocks
from tests.support.steps import assert_bits

pytestmark = instantiates
__all__ = ["afresh"]
dynamo.announce()
compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


def fused(*operands: Tensor, recompute: bool = False) -> Tensor:
    return functional.gated_mlp(*operands, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["weight", "tensor", "plain"])
def test_bits(kind: str, recompute: bool) -> None:
    frozen = (0, 1, 2) if kind == "tensor" else ()
    operands = weights(kind, frozen=frozen)
    wanted = results(unfused, randn(2, 70, 192, grad=True), operands)
    if kind == "plain":
        operands = [plain(w).requires_grad_() for w in operands]
    run = compiled(functools.partial(fused, recompute=recompute))
    for _ in range(2):
        assert_bits(results(run, randn(2, 70, 192, grad=True), operands), wanted)
    assert graphs() == 1


def checkpointed(*operands: Tensor) -> Tensor:
    made: Tensor = checkpoint(fused, *operands, use_reentrant=False)
    return made


@pytest.mark.parametrize(
    ("run", "recipe", "dtype", "mode"),
    [
        (fused, Recipe(cache_weight="step"), torch.bfloat16, torch.enable_grad),
        (fused, Recipe(), torch.float32, lambda: torch.autocast("cpu")),
        (fused, Recipe(), torch.bfloat16, torch.no_grad),
        (checkpointed, Recipe(), torch.bfloat16, torch.enable_grad),
    ],
    ids=["one cast for forward and backward", "autocast", "no_grad", "checkpoint"],
)
def test_other_ways(run: Any, recipe: Recipe, dtype: torch.dtype, mode: Any) -> None:
    operands, x = weights(recipe=recipe, dtype=dtype), randn(70, 192, dtype=dtype, grad=True)
    with mode():
        assert_bits(results(compiled(run), x, operands), results(unfused, x, operands))


def ops_that_run(run: Any, operands: list[Any]) -> list[str]:
    """The package's ops in the graphs of a forward and of its backward, and others of silu."""
    found = compiled_graphs(run, randn(9, 192), *operands, of=operands)
    names = [name.removeprefix("blocktensor.") for graph in found for name in ops_in(graph)]
    assert not any("silu" in name for name in names)
    return names


@pytest.mark.parametrize("recompute", [False, True])
def test_registered_ops_run(recompute: bool) -> None:
    made = ops_that_run(functools.partial(fused, recompute=recompute), weights())
    # with recompute, h is made again and the gradient of up is a gated product, too
    assert made.count("gated") == (3 if recompute else 1)
    assert made.count("gated_backward" if recompute else "gated_backward_with_h") == 1
    assert made.count("quantize_both") == 2


def saved_by(graph: torch.fx.Graph) -> list[Tensor]:
    """What a graph of a forward returns, its output among it."""
    made = [getattr(x, "meta", {}).get("val") for x in graph.output_node().args[0]]  # type: ignore[union-attr]
    return [x for x in made if isinstance(x, Tensor)]


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_stored_in_fp8(recompute: bool) -> None:
    """Compiled graphs save the bytes of gate and up, and no high precision beside them."""
    operands, x = weights(), randn(80, 192, grad=True)
    run = functools.partial(functional.gated_mlp, store_fp8=True, recompute=recompute)
    assert_bits(results(compiled(run), x, operands), results(run, x, operands))
    forward, _ = compiled_graphs(run, x, *operands, of=operands)
    rows = [t.dtype for t in saved_by(forward) if 320 in t.shape and 80 in t.shape]
    assert rows == [torch.float8_e4m3fn] * (2 if recompute else 3)  # gate, up and h


@pytest.mark.parametrize("norm", [Norm, OfTorch])
def test_fused_norms_save_one_form_of_each_input(norm: Any) -> None:
    model, twin = fused_blocks(norm, fused=NAMES if norm is Norm else [])
    forward, _ = compiled_graphs(
        model,
        call=lambda run: assert_bits(mlps.results(model, run=run), mlps.results(twin)),
    )
    assert graphs() == 1
    # Of each layer: the input of o_proj and two norms. That of down_proj is made by backward.
    assert [x.dtype for x in saved_by(forward)].count(torch.float8_e4m3fn) == 6


def test_gradients_of_rows_in_groups_are_made_one_after_the_other() -> None:
    stacks = [BlockwiseFP8Weight(torch.stack([plain(w)] * 2)).requires_grad_() for w in weights()]
    run = functools.partial(functional.gated_experts, offs=ends(4, 5))
    seen = ops_that_run(run, stacks)
    assert seen.count("gated") == 2  # the gradient of up is one, too
    assert seen.count("gated_backward") == 1
    assert seen.count("quantize_grouped") == 2


def test_before_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears then run one by one; and nothing is announced that would import Dynamo."""
    monkeypatch.setattr(dynamo, "_announced", False)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch._dynamo")
        dynamo.announce_if_loaded()
    assert not dynamo._announced
    monkeypatch.setattr(dynamo, "announce_if_loaded", lambda: None)
    x, operands = randn(9, 192, grad=True), weights()
    assert_bits(results(compiled(fused), x, operands), results(unfused, x, operands))
    assert not dynamo._announced
