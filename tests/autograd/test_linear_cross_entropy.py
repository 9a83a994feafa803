"""The loss of a head in chunks: the bits of the unchunked one, and what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, init_device_mesh

from blocktensor import Recipe, audit_step, convert, freeze, functional
from blocktensor.autograd import linear_cross_entropy as module_under_test
from blocktensor.ops.gemm.ops import gemm
from blocktensor.overrides import dynamo
from tests.support.asserts import Call, refused
from tests.support.linear_ways import saved_by
from tests.support.models import linear, randn
from tests.support.numeric import relative_error

BF16, FP32 = torch.bfloat16, torch.float32
V, K, T = 520, 200, 300

of_torch = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="of torch 2.13")

chunked = functional.linear_cross_entropy


def classes(*shape: int, n: int = V, ignored: int = -100, device: Any = "cpu") -> Tensor:
    made = torch.randint(0, n, shape, generator=torch.Generator().manual_seed(1))
    made.flatten()[::7] = ignored
    return made.to(device)


def whole(x: Tensor, head: nn.Linear, target: Tensor, **options: Any) -> Tensor:
    logits = F.linear(x, head.weight, head.bias).float()
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def run(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    """The loss and the gradients, which are taken off the leaves."""
    loss.backward()
    made = [loss.detach()]
    for leaf in leaves:
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad is not None
            made.append(leaf.grad)
            leaf.grad = None
    return made


def chunks_and_whole(
    x: Tensor, head: nn.Linear, target: Tensor, **options: Any
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The results in chunks of 128 tokens and of all logits, for each reduction."""
    leaves = x, head.weight, head.bias
    for reduction in ("mean", "sum"):
        want = run(whole(x, head, target, reduction=reduction, **options), *leaves)
        more = {"reduction": reduction, "chunk_size": 128, **options}
        loss = chunked(x, head.weight, target, head.bias, **more)
        assert loss.dtype == FP32
        made = run(loss, *leaves)
        torch.testing.assert_close(made[0], want[0], rtol=1e-6, atol=0, equal_nan=True)
        yield made, want


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("bias", [False, True])
def test_bits_of_the_whole(
    wgrad_input: Any, dtype: torch.dtype, bias: bool, device: torch.device
) -> None:
    recipe = Recipe(wgrad_input=wgrad_input)
    head = linear(V, K, bias=bias, dtype=dtype, device=device, recipe=recipe)
    x = randn(3, 100, K, dtype=dtype, device=device, grad=True)
    for made, want in chunks_and_whole(x, head, classes(3, 100, device=device)):
        if device.type == "cpu":
            assert torch.equal(made[1], want[1])
            assert relative_error(made[2], want[2]) <= (2e-3 if dtype == BF16 else 1e-5)
        else:  # the last bit of a logit's gradient may change its e4m3 number
            assert all(relative_error(made[i], want[i]) <= 2e-3 for i in (1, 2))
        for got, expected in zip(made[3:], want[3:], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "ignored"), [*((n, -100) for n in (0, 1, 127, 129, 256)), (300, 3)]
)
def test_any_number_of_tokens(rows: int, ignored: int) -> None:
    x, target = randn(rows, K, grad=True), torch.arange(rows) % V
    for made, want in chunks_and_whole(x, linear(V, K), target, ignore_index=ignored):
        assert torch.equal(made[1], want[1])
        assert rows == 0 or relative_error(made[2], want[2]) <= 2e-3


def class_weights(device: Any = "cpu") -> Tensor:
    """From 0 to 3, a step in memory."""
    return (torch.arange(2 * V, device=device) % 13 / 4)[::2]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_class_weights_and_label_smoothing(
    dtype: torch.dtype, weighted: bool, smoothing: float, device: torch.device
) -> None:
    head = linear(V, K, bias=True, dtype=dtype, device=device)
    x = randn(3, 100, K, dtype=dtype, device=device, grad=True)
    options: Any = {
        "weight": class_weights(device) if weighted else None,
        "label_smoothing": smoothing,
        "ignore_index": 3,
    }
    for made, want in chunks_and_whole(
        x, head, classes(3, 100, ignored=3, device=device), **options
    ):
        # the last bit of a logit's gradient may change its e4m3 number
        assert all(relative_error(made[i], want[i]) <= 2e-3 for i in (1, 2))
        torch.testing.assert_close(made[3], want[3], rtol=1e-2, atol=1e-6)


def test_an_evaluation_counts_class_weights_and_label_smoothing() -> None:
    head, x, target = linear(V, K), randn(T, K), classes(T)
    options: Any = {"weight": class_weights(), "label_smoothing": 0.1}
    with torch.no_grad():
        loss = chunked(x, head.weight, target, chunk_size=128, **options)
        want = whole(x, head, target, **options)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)


def test_the_largest_product_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(dtype: torch.dtype = BF16, **options: Any) -> list[tuple[int, ...]]:
        head, x = linear(V, K, dtype=dtype), randn(T, K, dtype=dtype, grad=True)
        with mock.patch.object(module_under_test, "gemm", wraps=gemm) as seen:
            chunked(x, head.weight, classes(T), **options)
        return [(a.data.shape[0], b.data.shape[0]) for (a, b, *_), _ in seen.call_args_list]

    wanted = [size for m in (128, 128, 44) for size in ((m, V), (m, K), (V, K))]
    assert products(chunk_size=128) == wanted
    monkeypatch.setattr(module_under_test, "CHUNK_BYTES", 14 * 3 * 128 * V - 1)
    assert [size for size in products() if size[0] < V and size[1] == V] == [(256, V), (44, V)]
    assert products(FP32)[0] == (256, V)
    # 16 bytes a logit, of which two chunks are too many
    monkeypatch.setattr(module_under_test, "CHUNK_BYTES", 16 * 2 * 128 * V - 1)
    assert products(FP32)[0] == (128, V)


def test_an_evaluation_computes_no_gradients() -> None:
    head, x, write = linear(V, K, bias=True), randn(T, K), "loss_and_gradient_"
    with torch.no_grad(), mock.patch.object(module_under_test.CrossEntropy, write) as written:
        chunked(x, head.weight, classes(T), head.bias)
    assert not written.called


def test_a_head_whose_weight_is_a_transpose() -> None:
    x, weight, target = randn(T, K, grad=True), linear(K, V).weight, classes(T)
    want = run(F.cross_entropy((x @ weight).float(), target), x)
    assert all(map(torch.equal, run(chunked(x, weight.t(), target, chunk_size=384), x), want))


def test_what_is_saved() -> None:
    saved = saved_by(lambda: chunked(randn(T, K, grad=True), linear(V, K).weight, classes(T)))
    assert [t.shape for t in saved] == [(T, K), (V, K)]  # the gradients


@pytest.mark.parametrize("announced", [False, True])
def test_compiled_callers(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph breaks; of all logits in one graph where Dynamo met the function first."""
    head, x, target = linear(V, K), randn(T, K, grad=True), classes(T)
    options: Any = {"reduction": "sum", "weight": class_weights(), "label_smoothing": 0.25}
    want = run(chunked(x, head.weight, target, **options), x, head.weight)
    torch.compiler.reset()
    if announced:
        dynamo.announce()
    else:
        monkeypatch.setattr(dynamo, "_announced", False)
        monkeypatch.setattr(dynamo, "announce_if_loaded", lambda: None)

    def loss(x: Tensor) -> Tensor:
        return chunked(x, head.weight, target, **options)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=not announced)
    assert all(map(torch.equal, run(compiled(x), x, head.weight), want))
    if announced:
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(loss, backend="aot_eager", fullgraph=True)(x)


def test_audit_sees_fp8() -> None:
    head, x = linear(V, K), randn(T, K, grad=True)
    loss = partial(chunked, x, head.weight, classes(T), chunk_size=128)
    assert "FP8: 100.0% of FLOPs" in str(audit_step(head, lambda: loss().backward()))


def test_bad_input() -> None:
    x, w, target = randn(T, K), linear(V, K).weight, classes(T)
    calls: list[Call] = [
        lambda: chunked(x, w, target[:-1]),
        lambda: chunked(x, w, target.int()),
        lambda: chunked(functional.quantize(x), w, target),
        lambda: chunked(x, w, target, reduction="none"),
        *(lambda n=n: chunked(x, w, target, chunk_size=n) for n in (100, 0, 128.0)),
        lambda: chunked(x.float(), w, target),
        lambda: chunked(x[:, 1:], w, target),
        *(lambda s=s: chunked(x, w, target, label_smoothing=s) for s in (1.5, float("nan"), "0.1")),
        lambda: chunked(x, w, target, weight=torch.ones(V - 1)),
        lambda: chunked(x, w, target, weight=torch.ones(V, dtype=BF16)),
        lambda: chunked(x, w, target, weight=w),
        lambda: chunked(x, w, target, weight=torch.ones(V, device="meta")),
        lambda: chunked(x, w, target, weight=torch.ones(V, requires_grad=True)),
        lambda: chunked(x, w, target, weight=[1.0] * V),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
ValueError: the target of linear_cross_entropy is torch.int64 [299]: expected the indices of
  classes, torch.int64 [300]
ValueError: the target of linear_cross_entropy is torch.int32 [300]: expected the indices of
  classes, torch.int64 [300]
TypeError: the input of linear_cross_entropy is FP8 already: pass it in high precision, since
  each chunk of tokens is cast for itself
ValueError: reduction='none': expected 'mean' or 'sum'; the losses of single tokens need
  F.cross_entropy(linear(x, w), target, reduction='none')
ValueError: chunk_size=100: expected a positive multiple of 128 tokens
ValueError: chunk_size=0: expected a positive multiple of 128 tokens
ValueError: chunk_size=128.0: expected a positive multiple of 128 tokens
TypeError: the input is torch.float32 and the weight torch.bfloat16: convert one of them, or run
  under torch.autocast
ValueError: cannot contract input [300, 199] with weight [520, 200]: K is 199 in one and 200 in
  the other
ValueError: label_smoothing=1.5: expected a number from 0 to 1
ValueError: label_smoothing=nan: expected a number from 0 to 1
TypeError: label_smoothing is a str: expected a number from 0 to 1
ValueError: weight has shape [519]: expected the weights of the classes, [520]; the weight of
  the head is w
TypeError: the weights of the classes have dtype torch.bfloat16: expected torch.float32, as the
  loss is computed; pass weight.float()
ValueError: weight has shape [520, 200]: expected the weights of the classes, [520]; the weight
  of the head is w
ValueError: the input is on cpu and the weights of the classes on meta: move them to one device
NotImplementedError: linear_cross_entropy computes no gradient of the weights of the classes:
  pass weight.detach()
TypeError: weight is a list: expected a tensor""",
    )


@of_torch
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_loss_of_torch(frozen: bool, bias: bool) -> None:
    """``F.linear_cross_entropy`` of an FP8 weight runs in FP8 or raises."""
    options: Any = {"reduction": "sum", "label_smoothing": 0.1, "ignore_index": 0}
    module = nn.LinearCrossEntropyLoss(K, V, bias=bias, dtype=BF16, **options)
    convert(module, skip_small=False)
    if frozen:
        freeze(module)
    x, target = randn(T, K, grad=True), classes(T, ignored=0)
    leaves = x, *(p for p in module.parameters() if p.requires_grad)
    want = run(
        F.cross_entropy(F.linear(x, *module.linear.parameters()), target, **options), *leaves
    )
    assert all(map(torch.equal, run(module(x, target), *leaves), want))
    one = F.linear_cross_entropy(x[0], module.linear.weight, torch.tensor(3))
    assert torch.equal(one, F.cross_entropy(F.linear(x[0], module.linear.weight), torch.tensor(3)))
    in_chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=100)
    with pytest.raises(NotImplementedError, match=r"functional\.linear_cross_entropy"):
        F.linear_cross_entropy(x, module.linear.weight, target, options=in_chunks)


@pytest.mark.usefixtures("group")
def test_tensors_without_memory_are_refused() -> None:
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="tensors in eager mode, or"):
        chunked(torch.empty(T, K), torch.empty(V, K), torch.empty(T, dtype=torch.int64))
    weight = DTensor.from_local(linear(V, K).weight.detach(), init_device_mesh("cpu", (1,)))
    with pytest.raises(NotImplementedError, match="a DTensor"):
        chunked(randn(T, K), weight, classes(T))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("loss_scale", "chunk"), [(1.0, 128), (1.0, 384), (2.0**16, 128)])
def test_fp16_under_a_loss_scale(
    loss_scale: float, chunk: int, weighted: bool, reduction: str
) -> None:
    """Small gradients do not vanish before backward multiplies them, nor do large ones overflow."""
    tokens, words = 384, 4096
    x = randn(tokens, K, seed=1, dtype=torch.float16)
    w, bias = randn(words, K, seed=2, dtype=torch.float16) / 40, torch.zeros(words).half()
    target = torch.arange(tokens) * 7 % words
    target[:5] = -100
    if reduction == "sum":
        loss_scale /= tokens
    options: dict[str, Any] = {"reduction": reduction}
    doubled = None
    if weighted:  # a row's gradient is up to 300 times as large
        options |= {"weight": 10.0 + torch.arange(words) % 290, "label_smoothing": 0.1}
        doubled, loss_scale = options["weight"].double(), loss_scale / 16
    want = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    exact = F.cross_entropy(F.linear(*want), target, **{**options, "weight": doubled})
    (exact * loss_scale).backward()
    leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
    loss = chunked(*leaves[:2], target, leaves[2], chunk_size=chunk, **options)
    with torch.no_grad():
        evaluated = chunked(*leaves[:2], target, leaves[2], chunk_size=chunk, **options)
    assert relative_error(loss, exact) < 1e-3 > relative_error(evaluated, exact)
    (loss * loss_scale).backward()
    for got, true in zip(leaves, want, strict=True):
        assert got.grad is not None and true.grad is not None
        rounded = true.grad.half().double()  # what fp16 can hold
        assert relative_error(got.grad, rounded) < 0.06
        assert (got.grad == 0).sum() <= (rounded == 0).sum() * 1.1 + 0.01 * rounded.numel()
