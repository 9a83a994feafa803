"""The ways in which a linear may run, for tests to run in each of them; and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from blocktensor import Recipe, Scales
from blocktensor.autograd import plan
from blocktensor.autograd.repeat import REPEATED, Repeated
from blocktensor.ops import reference
from blocktensor.ops.runtime import build_player
from tests.support.backends import replace_op
from tests.support.fake_driver import player

WAYS = ("op by op", "sequence", "repeated")


def run_linears(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan all linears anew, to run in one of the ways.

    - "op by op": as large linears run, which frees every tensor as early as possible.
    - "sequence": each direction is one sequence to record, as small linears run on GPUs. A CPU
      cannot record and calls its ops.
    - "repeated": as sequences, and ``player.cpp`` runs all calls of a kind but the first.
    """
    has_gpu = torch.cuda.is_available()
    found: Any = None
    if way == "op by op":
        monkeypatch.setattr(plan, "LARGE_BYTES", 0)
    else:
        pytest.importorskip("triton")
        monkeypatch.setattr(plan, "RECORDED_DEVICES", ("cpu", "cuda"))
    if way == "repeated":
        found = build_player.load() if has_gpu else player()
    if not has_gpu:
        monkeypatch.setattr(build_player, "player", lambda: found)
    elif way != "repeated":
        monkeypatch.setattr(Repeated, "remember", lambda *_: None)
    monkeypatch.setattr(plan._PLANS, "_found", {})
    for layer in REPEATED:
        monkeypatch.setattr(layer, "table", None)


@pytest.fixture(params=WAYS)
def way_of_linears(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """:func:`run_linears`, in each of the ways."""
    way: str = request.param
    run_linears(way, monkeypatch)
    return way


def grads_of(
    module: nn.Module, x: Tensor, grad: Tensor, run: Callable[..., Tensor] | None = None
) -> list[Tensor | None]:
    """y, and the gradients of x and of every parameter, from scratch."""
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    y = run(module, leaf) if run else module(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def function_of(y: Tensor) -> Any:
    """The node of the FP8 function that made ``y``, below the node of the view that callers get."""
    assert y.grad_fn is not None
    return y.grad_fn.next_functions[0][0]


def assert_all_equal(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Bit for bit, and none is missing."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def gone_when(monkeypatch: pytest.MonkeyPatch, op: str, held: Any) -> list[bool]:
    """Return a list to which each run of the reference's ``op`` adds which of ``held`` are gone."""
    gone: list[bool] = []
    function = getattr(reference, op)

    def watched(*args: Any) -> Any:
        gone.extend(is_gone() for is_gone in held)
        return function(*args)

    replace_op(monkeypatch, op, watched)
    return gone


def storage_is_gone(x: Tensor) -> Callable[[], bool]:
    """Return whether the memory of ``x`` is freed, when it is called."""
    return StorageWeakRef(x.untyped_storage()).expired


ROWS, HIGH = Recipe(wgrad_input="1x128"), Recipe(wgrad_input="high_precision")
X_IN_POWERS = Recipe(scale=Scales(activations="power_of_two"), wgrad_input="1x128")
RECIPES = (ROWS, Recipe(scale="power_of_two", wgrad_input="1x128"), X_IN_POWERS, HIGH)
every_recipe = pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe.wgrad_input} {recipe.scale}"
)


def wgrad(grad: Tensor, x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """``gradᵀ x`` of matrices, spelled out."""
    format = recipe.wgrad_input_format
    if format is None:
        return (grad.t() @ x).to(dtype)
    g_col = reference.quantize_columnwise(grad, recipe.gradient_format)
    return reference.gemm(g_col, reference.quantize_columnwise(x, format), None, dtype)


def saved_by(run: Callable[[], Any]) -> list[Tensor]:
    """The tensors that ``run()`` saves for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved
