"""The result of a fused norm: FP8 to FP8 weights, and the norm's bits to everything else."""

from __future__ import annotations

import copy
import io
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd.rms_norm import normed
from blocktensor.ops.producers.norm_reference import normalize, rms_norm
from blocktensor.tensor import norm_call
from blocktensor.tensor.norm_call import AnyNormKind
from blocktensor.tensor.normed_tensor import NormedTensor
from tests.support.models import FP32_SCALES, Trace, assert_same, complaint, randn

K = 192


def operands(rows: tuple[int, ...] = (2, 70), dtype: Any = torch.bfloat16) -> tuple[Tensor, Tensor]:
    x = randn(*rows, K, dtype=dtype, grad=True)
    return x, randn(K, seed=8, dtype=dtype, grad=True)


class Norm(NamedTuple):
    """A norm, fused and as it is written."""

    kind: AnyNormKind = "llama"
    recompute: bool = False

    def made(self, x: Tensor, weight: Tensor, columnwise: bool = True) -> Any:
        return normed(x, weight, 1e-5, self.kind, FP32_SCALES, columnwise, self.recompute)

    def eager(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kind == "torch":
            return F.rms_norm(x, (K,), weight, 1e-5)
        return rms_norm(x, weight, 1e-5, self.kind)


def made(x: Tensor, weight: Tensor) -> Any:
    return Norm().made(x, weight)


@pytest.fixture(params=[("llama", False), ("gemma", True), ("torch", False), ("torch", True)])
def norm(request: Any) -> Norm:
    return Norm(*request.param)


def fp8_weight(n: int = 256) -> nn.Parameter:
    return nn.Parameter(BlockwiseFP8Weight(randn(n, K, seed=3, dtype=torch.bfloat16), FP32_SCALES))


def assert_same_forms(a: Any, b: Any) -> None:
    """The same bytes, shape and recipe; whether either can be read by other ops does not count."""
    assert_same(*(BlockwiseFP8Tensor.relabel(x.detach()) for x in (a, b)))


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda y: y + 1,
    "a slice": lambda y: y[..., 3:70],
    "a transpose": lambda y: y.transpose(0, 1) * 2,
    "heads": lambda y: y.view(2, 70, 3, 64).sum(-2),
    "another dtype": lambda y: y.float() * 3,
    "to": lambda y: y.to(torch.float32),
    "a gather": lambda y: y.flatten(0, 1)[torch.tensor([5, 5, 0])],
    "a plain linear": lambda y: F.linear(y, randn(64, K, dtype=torch.bfloat16)),
    "a plain product": lambda y: y @ randn(K, 64, dtype=torch.bfloat16),
    "einsum": lambda y: torch.einsum("bth,hn->btn", y, randn(K, 64, dtype=torch.bfloat16)),
    "a norm of it": lambda y: F.layer_norm(y, (K,)),
    "a plain convolution": lambda y: F.conv1d(
        y.mT, randn(K * 4, seed=1, dtype=torch.bfloat16).view(4, K, 1)
    ),
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y),
    "a concatenation": lambda y: torch.cat([y, y.detach()]),
    "the other side": lambda y: torch.ones(2, 70, K) - y,
    "unbind": lambda y: y.unbind(0)[1],
    "contiguous, clone": lambda y: y.contiguous().clone(),
    "detach and more": lambda y: y.detach() + y,
    "flat": lambda y: y.view(140, K).mul(2),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_get_the_norm(reader: str, norm: Norm) -> None:
    read = READERS[reader]
    x, weight = operands()
    other_x, other_weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    got = read(norm.made(x, weight))
    want = read(norm.eager(other_x, other_weight))
    assert type(got) is Tensor and torch.equal(got, want)
    grad = randn(*want.shape, seed=5).to(want.dtype)
    got.backward(grad), want.backward(grad)
    assert torch.equal(x.grad, other_x.grad) and torch.equal(weight.grad, other_weight.grad)  # type: ignore[arg-type]


def test_fp8_weights_get_its_casts_and_gradients_are_summed_as_without_it(norm: Norm) -> None:
    w, plain = fp8_weight(), randn(256, K, seed=4, dtype=torch.bfloat16)

    def read(y: Tensor) -> Tensor:
        return F.linear(y, w) * 2 + F.linear(y, plain) + y.mean() + F.linear(y.view(140, K), w)[3]

    x, weight = operands()
    want = read(norm.eager(x, weight))
    grad = randn(*want.shape, seed=5, dtype=torch.bfloat16)
    wanted = [want, *torch.autograd.grad(want, (x, weight, w), grad)]
    with Trace() as trace:
        got = read(norm.made(x, weight))
    assert trace.count("blocktensor.quantize_with_transpose 128x128") == 2  # of the weight, twice
    assert trace.count("blocktensor.quantize_") == 2 + (norm.kind == "torch")
    for a, b in zip([got, *torch.autograd.grad(got, (x, weight, w), grad)], wanted, strict=True):
        assert torch.equal(a, b)


STACK = nn.Parameter(
    BlockwiseFP8Weight(randn(2, 256, K, seed=3, dtype=torch.bfloat16), FP32_SCALES)
)
MATRIX = fp8_weight()
OFFS = torch.tensor([30, 70], dtype=torch.int32)
BESIDE_FP8: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda y: torch.matmul(y.view(2, 35, K), MATRIX.t()),
    "mm": lambda y: y.mm(MATRIX.t()),
    "addmm": lambda y: torch.addmm(torch.ones(256, dtype=torch.bfloat16), y, MATRIX.t()),
    "a product is added to it": lambda y: torch.addmm(
        y, torch.ones(70, 256, dtype=torch.bfloat16), MATRIX
    ),
    "on the right": lambda y: torch.mm(MATRIX, y.t()),
    "functional.linear": lambda y: functional.linear(y, MATRIX),
    "linear_cross_entropy": lambda y: functional.linear_cross_entropy(y, MATRIX, torch.arange(70)),
    "a sum": lambda y: y + MATRIX[:70],
    "where": lambda y: torch.where(y > 0, y, MATRIX[:70]),
    "a concatenation": lambda y: torch.cat([y, MATRIX]),
    "grouped_mm": lambda y: torch._grouped_mm(y, STACK.transpose(1, 2), OFFS),
    "grouped_linear": lambda y: functional.grouped_linear(y, STACK, OFFS),
    "bmm": lambda y: torch.bmm(y.view(2, 35, K), STACK.transpose(1, 2)),
    "matmul with a stack": lambda y: torch.matmul(y.view(2, 35, K), STACK.transpose(1, 2)),
}


@pytest.mark.parametrize("reader", BESIDE_FP8)
def test_readers_with_fp8_weights(reader: str, norm: Norm) -> None:
    x, weight = operands((70,))
    leaves = x, weight, MATRIX, STACK
    want, got = (BESIDE_FP8[reader](f(x, weight)) for f in (norm.eager, norm.made))
    assert torch.equal(got, want)
    grad = randn(*want.shape, seed=5).to(want.dtype)
    wanted, grads = (torch.autograd.grad(y, leaves, grad, allow_unused=True) for y in (want, got))
    for a, b in zip(grads, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_it_holds_the_cast_of_the_norm(norm: Norm) -> None:
    x, weight = operands()
    y = norm.made(x, weight)
    assert isinstance(y, NormedTensor) and y.shape == x.shape and y.dtype == x.dtype
    want = quantize(norm.eager(x, weight).detach(), FP32_SCALES)
    if norm.recompute:
        made, held = y.norm_call.columnwise(y.columnwise_format), want.columnwise()
        assert torch.equal(made.data.view(torch.uint8), held.data.view(torch.uint8))
        assert torch.equal(made.scale, held.scale)
        want = BlockwiseFP8Tensor(want.rowwise(), shape=x.shape, recipe=FP32_SCALES)
    assert_same_forms(y, want)
    assert_same_forms(y.view(140, K), want.view(140, K))
    assert quantize(y, FP32_SCALES) is y
    assert y.serves_wgrad
    alone = norm.made(x, weight, columnwise=False)
    assert alone.columnwise_data is None and not alone.serves_wgrad
    assert torch.equal(y.dequantize(), want.dequantize())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, norm: Norm) -> None:
    x, weight = operands()
    w, plain = fp8_weight(), randn(64, K, dtype=torch.bfloat16)
    with mode():
        want = norm.eager(x, weight)
        y = norm.made(x, weight, columnwise=False)
        assert torch.equal(F.linear(y, w), F.linear(want, w))
        assert torch.equal(F.linear(y, plain), F.linear(want, plain))
        assert torch.equal(y.transpose(0, 1), want.transpose(0, 1))


def test_values_are_computed_once_and_only_if_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        norm_call, "normalize", lambda *args: calls.append(args) or normalize(*args)
    )
    x, weight = operands()
    y, w = made(x, weight), fp8_weight()
    (F.linear(y, w) + F.linear(y, w)).sum().backward()
    assert calls == []
    assert torch.equal(y + 1, y + 1)
    assert len(calls) == 1


def test_a_norm_whose_input_was_changed_refuses() -> None:
    x = randn(4, K, dtype=torch.bfloat16)
    y = made(x, randn(K, seed=8, dtype=torch.bfloat16))
    x.mul_(2)
    assert_expected_inline(
        complaint(RuntimeError, lambda: y + 1),
        """\
the input [4, 192] of a fused norm, or its weight, was changed in place before the
values of the norm were read: read them first, or call blocktensor.unfuse(norm)""",
    )
    F.linear(y, fp8_weight())  # its casts are as they were
    weight = randn(K, seed=8, dtype=torch.bfloat16)
    y = made(x, weight)
    weight.mul_(2)
    assert "or its weight" in complaint(RuntimeError, lambda: y + 1)
    y = Norm(recompute=True).made(x, weight)
    x.mul_(2)
    assert "of a fused norm" in complaint(RuntimeError, lambda: F.linear(y, fp8_weight()))


def test_writes_are_refused() -> None:
    x, weight = (t.detach() for t in operands())
    y = made(x, weight)
    assert_expected_inline(
        complaint(NotImplementedError, lambda: y.mul_(2)),
        """\
aten.mul_.Tensor writes to the result of a fused norm, which is computed from the
norm's input: write to a copy, or call blocktensor.unfuse(norm)""",
    )
    into = torch.zeros(2, 70, K, dtype=torch.bfloat16)
    into.add_(y)
    assert torch.equal(into, rms_norm(x, weight, 1e-5, "llama"))
    assert torch.equal(torch.empty_like(into).copy_(y), into)


def test_repr() -> None:
    x, weight = operands()
    assert_expected_inline(
        textwrap.fill(repr(made(x, weight)), 80),
        """\
NormedTensor(shape=[2, 70, 192], dtype=torch.bfloat16, block_shape=(1, 128),
scale='fp32', forms=rowwise+columnwise, device='cpu', requires_grad=True)""",
    )


def test_parts_rebuild_it(norm: Norm) -> None:
    x, weight = (t.detach() for t in operands())
    y = norm.made(x, weight)
    names, context = y.__tensor_flatten__()
    inner = {name: getattr(y, name) for name in names}
    again = NormedTensor.__tensor_unflatten__(inner, context, y.shape, y.stride())
    assert_same_forms(again, y)
    assert type(again) is NormedTensor
    assert torch.equal(again + 0, norm.eager(x, weight))


def test_copies_and_files_hold_its_values(norm: Norm) -> None:
    x, weight = operands()
    y, want = norm.made(x, weight), norm.eager(x, weight)
    file = io.BytesIO()
    torch.save(y.detach(), file)
    file.seek(0)
    for other in (copy.deepcopy(y.detach()), torch.load(file, weights_only=True), y.clone()):
        assert type(other) is Tensor and torch.equal(other, want)
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(y)


def test_other_orientations_hold_the_forms_alone() -> None:
    x, weight = operands((70,))
    y = made(x, weight)
    assert type(y.relabel(transpose=True)) is BlockwiseFP8Tensor
    assert type(y.relabel(dtype=torch.float32)) is BlockwiseFP8Tensor
    assert torch.equal(y.t(), rms_norm(x, weight, 1e-5, "llama").t())


def test_another_recipe_is_refused_by_the_linear() -> None:
    x, weight = operands()
    w = nn.Parameter(BlockwiseFP8Weight(randn(256, K), Recipe(scale="power_of_two")))
    assert "mixed recipes" in complaint(ValueError, lambda: F.linear(made(x, weight), w.bfloat16()))
