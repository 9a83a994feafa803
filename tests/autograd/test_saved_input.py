"""Linears that read a norm save its operands in place of a cast, and compute the same."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd.rms_norm import normed
from blocktensor.tensor.norm_call import AnyNormKind, NormCall
from tests.support.models import FP32_SCALES, Trace, complaint, randn

K = 192
KINDS: list[AnyNormKind] = ["llama", "gemma", "torch"]
SQUARE = Recipe(wgrad_input="128x128", scale="power_of_two")


class Layer:
    """A norm, three linears that read it, and a gated MLP that does."""

    def __init__(
        self,
        kind: AnyNormKind = "llama",
        recompute: bool = True,
        recipe: Recipe = FP32_SCALES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.kind, self.recompute, self.recipe = kind, recompute, recipe
        self.scales = randn(K, seed=8, device=device, grad=True)
        self.qkv, self.mlp = (
            [self._weight(i, n, k, device) for i, (n, k) in enumerate(shapes)]
            for shapes in (((256, K),) * 3, ((320, K), (320, K), (256, 320)))
        )

    def _weight(self, seed: int, n: int, k: int, device: torch.device | str) -> nn.Parameter:
        return nn.Parameter(BlockwiseFP8Weight(randn(n, k, seed=seed, device=device), self.recipe))

    def norm(self, x: Tensor) -> Tensor:
        return normed(x, self.scales, 1e-5, self.kind, self.recipe, True, self.recompute)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (F.linear(y, w) for w in self.qkv)
        return q * k.sigmoid() + v + functional.gated_mlp(y, *self.mlp)

    def gradients(self, x: Tensor, y: Tensor, **options: Any) -> list[Tensor]:
        leaves = x, self.scales, *self.qkv, *self.mlp
        return [*torch.autograd.grad(y, leaves, torch.ones_like(y), **options)]


def inputs(*rows: int, device: torch.device | str = "cpu") -> Tensor:
    return randn(*(rows or (2, 70)), K, device=device, grad=True)


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))


def makes_form(layer: Layer) -> str:
    """The op that makes the columnwise form alone."""
    return (
        "quantize_columnwise 1x128" if layer.kind == "torch" else f"normalized {layer.kind} 1x128"
    )


@pytest.mark.parametrize("rows", [(2, 70), (0,), (1,), (127,), (129,), (300,)])
@pytest.mark.parametrize("recipe", [FP32_SCALES, SQUARE])
@pytest.mark.parametrize("kind", KINDS)
def test_bits(kind: Any, recipe: Recipe, rows: tuple[int, ...], device: torch.device) -> None:
    made = []
    for recompute in (False, True):
        layer, x = Layer(kind, recompute, recipe, device), inputs(*rows, device=device)
        y = layer(x)
        made.append([y, *layer.gradients(x, y)])
    assert_equal(*made)


@pytest.mark.parametrize("kind", KINDS)
def test_one_form_is_made_for_all_and_none_is_saved(kind: Any) -> None:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.extend([x] if x.dtype == torch.float8_e4m3fn else [])
        return x

    for recompute, forms in ((False, 4), (True, 0)):  # none of h, which backward makes
        layer, x = Layer(kind, recompute), inputs()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = layer(x)
        assert len(saved) == forms
        saved.clear()
    for _ in range(2):
        with Trace() as trace:
            layer.gradients(x, y, retain_graph=True)
        assert trace.count(makes_form(layer)) == 1


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """References to the data of the forms that backwards make."""
    made: list[Any] = []
    columnwise = NormCall.columnwise

    def noted(self: NormCall, format: Any) -> Any:
        form = columnwise(self, format)
        made.append(weakref.ref(form.data))
        return form

    monkeypatch.setattr(NormCall, "columnwise", noted)
    return made


def test_the_form_is_freed_by_its_last_reader(forms: list[Any]) -> None:
    layer, x = Layer(), inputs()
    y = layer.norm(x)
    outputs = [F.linear(y, w) for w in layer.qkv]
    for i, output in enumerate(outputs):
        output.backward(torch.ones_like(output), retain_graph=True)
        assert (forms[0]() is None) == (i == 2)
    assert len(forms) == 1


def test_one_thread_does_not_take_the_form_of_another(forms: list[Any]) -> None:
    layer, x = Layer(), inputs()
    y = layer.norm(x)
    outputs = [F.linear(y, w) for w in layer.qkv]
    wanted = [torch.autograd.grad(o.sum(), w, retain_graph=True)[0]
              for o, w in zip(outputs, layer.qkv, strict=True)]  # fmt: skip
    got: list[Tensor] = []

    def run() -> None:
        for o, w in zip(outputs, layer.qkv, strict=True):
            got.extend(torch.autograd.grad(o.sum(), w, retain_graph=True))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert len(forms) == 3
    assert all(any(torch.equal(g, want) for want in wanted) for g in got) and len(got) == 6
    assert all(form() is None for form in forms)


def test_inputs_that_change() -> None:
    layer = Layer()
    x = inputs().detach() * 1
    y = layer.norm(x)
    output = F.linear(y, layer.qkv[0])
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert "of a fused norm" in complaint(RuntimeError, lambda: F.linear(y, layer.qkv[0]))


def test_the_weight_of_the_norm_may_change() -> None:
    """As FSDP2 frees it where the norm is in another of its groups than the linears."""
    layer, x = Layer(), inputs()
    y = F.linear(layer.norm(x), layer.qkv[0])
    wanted = torch.autograd.grad(y.sum(), layer.qkv[0], retain_graph=True)
    with torch.no_grad():
        layer.scales.zero_()
    assert_equal([*torch.autograd.grad(y.sum(), layer.qkv[0])], [*wanted])


def test_frozen_weights_make_no_form(forms: list[Any]) -> None:
    layer, x = Layer(), inputs()
    for w in layer.qkv[1:]:
        w.requires_grad_(False)
    y = layer.norm(x)
    outputs = [F.linear(y, w) for w in layer.qkv]
    sum(outputs).sum().backward()  # type: ignore[union-attr]
    assert len(forms) == 1 and forms[0]() is None


def test_offloaded(forms: list[Any]) -> None:
    """Hooks may return copies of what was saved."""
    layer, x = Layer(), inputs()
    y = layer(x)
    wanted = layer.gradients(x, y)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        y = layer(x)
    assert_equal(layer.gradients(x, y), wanted)
    run: Callable[..., Tensor] = checkpoint
    y = run(layer, x, use_reentrant=False)
    assert_equal(layer.gradients(x, y), wanted)
    assert len(forms) == 3
