"""How a grouped linear lives in autograd: modes, gradients of all kinds, writes in between."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import blocktensor
from blocktensor import BlockwiseFP8Tensor, Recipe, functional
from blocktensor.ops import reference
from tests.support.experts import N, grads, sample, stack
from tests.support.models import SQUARE, complaint, plain, randn
from tests.support.numeric import assert_same
from tests.support.reference_ops import replace_op

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_grad_and_inference_mode(mode: Callable[[], Any], frozen: bool) -> None:
    x, _, offs = sample("ragged")
    w: Tensor = stack(len(offs))
    w = BlockwiseFP8Tensor.from_values(plain(w), SQUARE) if frozen else w
    want = functional.grouped_linear(x, w, offs)
    with mode():
        y = functional.grouped_linear(x, w, offs)
    assert not y.requires_grad
    assert_same(y, want.detach())


# Gradients of other kinds


def test_an_fp8_input_and_an_fp8_gradient() -> None:
    """Blocks along K know nothing of groups: they serve fprop and dgrad, and no wgrad."""
    x, grad, offs = sample("whole blocks")
    w = stack(len(offs)).requires_grad_(False)
    want = grads(lambda t: functional.grouped_linear(t, w, offs), x, grad)
    got = grads(
        lambda t: functional.grouped_linear(blocktensor.quantize(t), w, offs),
        x, BlockwiseFP8Tensor.from_values(grad),
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    trainable = stack(len(offs))
    with torch.no_grad():
        y = functional.grouped_linear(blocktensor.quantize(x), trainable, offs)
    assert_same(y, want[0])
    assert_expected_inline(
        complaint(
            ValueError,
            lambda: functional.grouped_linear(blocktensor.quantize(x), trainable, offs),
        ),
        """\
the input of a grouped FP8 linear is FP8 already, and its columnwise blocks, which
the gradient of the weight needs, ignore the groups: pass the high-precision tensor;
functional.grouped_linear(x, [w1, w3], offs) casts it once for several weights""",
    )
    y = functional.grouped_linear(x, trainable, offs)
    assert_expected_inline(
        complaint(NotImplementedError, lambda: y.backward(BlockwiseFP8Tensor.from_values(grad))),
        """\
a gradient of a grouped FP8 linear that is FP8 already: its columnwise blocks, which
the gradient of the weight needs, ignore the groups; pass it in high precision
(.dequantize())""",
    )


# Never stale


def test_a_write_between_forward_and_backward_raises() -> None:
    x, grad, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs))
    for written in (w, w.master, offs):
        y = functional.grouped_linear(x, w, offs)
        with torch.no_grad():
            written.mul_(1)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            y.backward(grad)


def test_rowwise_bytes_of_a_weight_are_gone_after_backward() -> None:
    x, grad, offs = sample("ragged")
    w = stack(len(offs))
    y = functional.grouped_linear(x.requires_grad_(), w, offs)
    assert w.cache.nbytes() > 0
    y.backward(grad)
    gc.collect()
    assert w.cache.nbytes() == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_large_gradient_is_gone_when_the_products_run(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a bias sums it."""
    gradients: list[StorageWeakRef] = []
    gone: list[bool] = []
    product = reference.grouped_gemm

    def watched(*args: Any) -> Tensor:
        gone.extend(gradient.expired() for gradient in gradients)
        return product(*args)

    replace_op(monkeypatch, "grouped_gemm", watched)
    x, _, offs = sample("ragged")
    w, added = stack(len(offs)), randn(len(offs), N, seed=2, grad=True) if bias else None
    y = functional.grouped_linear(x.requires_grad_(), w, offs, added)
    y.register_hook(lambda g: gradients.append(StorageWeakRef(g.untyped_storage())))
    y.square().sum().backward()
    assert gone == [hasattr(torch.autograd.Function, "boxed_grads_call")]


@pytest.mark.parametrize("kn", [False, True])
def test_a_form_that_is_reused_in_a_step_is_released_by_its_last_backward(kn: bool) -> None:
    w = stack(5, recipe=Recipe(cache_weight="step"), kn=kn)
    x, grad, offs = sample("ragged")
    want = grads(
        lambda t: functional.grouped_linear(t, plain(w).mT if kn else plain(w), offs), x, grad
    )
    optimizer = torch.optim.SGD([w], lr=0.0)
    for _ in range(2):
        casts = w.cache.casts
        for _ in range(2):
            got = grads(lambda t: functional.grouped_linear(t, w.mT if kn else w, offs), x, grad)
            for a, b in zip(got, want, strict=True):
                assert_same(a, b)
        assert w.cache.casts <= casts + 2
        optimizer.step()
        optimizer.zero_grad()
    assert w.cache.nbytes() == 0


@pytest.mark.parametrize("kn", [False, True])
def test_an_fp8_stack_that_requires_a_gradient(kn: bool) -> None:
    """As FSDP2 gathers one: a BlockwiseFP8Tensor."""
    w = stack(5, kn=kn)
    gathered = nn.Parameter(w._quantized())
    x, grad, offs = sample("ragged")
    for _ in range(3):
        results = [
            grads(
                lambda t, each=each: functional.grouped_linear(t, each.mT if kn else each, offs),
                x, grad, each,
            )
            for each in (w, gathered)
        ]  # fmt: skip
        for a, b in zip(*results, strict=True):
            assert_same(a, b)
