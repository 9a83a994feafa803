"""What a grouped linear layer saves for its backward, and what its backward computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline

from blocktensor import BlockwiseFP8Tensor, Recipe, functional, quantize
from tests.support.asserts import refused
from tests.support.grouped_linears import N, grads, grads_of, sample, stack
from tests.support.groups import columnwise
from tests.support.linear_ways import (
    HIGH,
    ROWS,
    assert_all_equal,
    gone_when,
    saved_by,
    storage_is_gone,
)
from tests.support.models import SQUARE, Trace, plain, randn
from tests.support.numeric import assert_same
from tests.support.steps import ours

OF_GROUPS = "quantize_grouped 1x128"
PRODUCT, WGRAD = "grouped_gemm 1x128 128x128", "grouped_gemm_wgrad 1x128 128x128"


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "forward", "backward"),
    [
        (True, True, f"{OF_GROUPS} 128x128", [f"{OF_GROUPS} 1x128", PRODUCT, WGRAD]),
        (True, False, OF_GROUPS, [OF_GROUPS, PRODUCT]),
        (False, True, f"{OF_GROUPS} 128x128", [OF_GROUPS, WGRAD]),
        (False, False, OF_GROUPS, []),
    ],
)
def test_only_what_is_asked_for_is_computed(
    x_grad: bool, w_grad: bool, forward: str, backward: list[str]
) -> None:
    """And nothing is read on the host."""
    x, grad, offs = sample("rows of no group")
    w, bias = stack(len(offs)).requires_grad_(w_grad), randn(len(offs), N, seed=2, grad=True)
    x.requires_grad_(x_grad)
    with Trace() as of_y:
        y = functional.grouped_linear(x, w, offs, bias)
    of_weight = "quantize_with_transpose" if x_grad else "quantize_rowwise"
    assert ours(of_y) == [f"{of_weight} 128x128", forward, PRODUCT]
    with Trace() as of_grads:
        torch.autograd.grad(y, [t for t in (x, w, bias) if t.requires_grad], grad)
    assert ours(of_grads) == backward
    assert of_grads.count("aten.segment_reduce") == 1
    for name in ("_local_scalar_dense", "item", "nonzero"):
        assert of_y.count(name) == of_grads.count(name) == 0


@pytest.mark.parametrize("recipe", [Recipe(), ROWS, HIGH], ids=lambda r: r.wgrad_input)
def test_what_is_saved(recipe: Recipe) -> None:
    x, _, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs), recipe=recipe)
    ends_, *of_x, weight = saved_by(lambda: functional.grouped_linear(x, w, offs))
    assert torch.equal(ends_, offs)
    assert weight is w or weight.master is w.master
    if recipe is HIGH:
        assert [t.data_ptr() for t in of_x] == [x.data_ptr()]
    else:
        want = columnwise(x.detach(), offs, recipe.wgrad_input_format)
        assert_same(of_x[0], want.data)
        assert_same(of_x[1], want.scale)
    w.requires_grad_(False)
    frozen = BlockwiseFP8Tensor.from_values(plain(w), SQUARE)
    saved = saved_by(lambda: [functional.grouped_linear(x, each, offs) for each in (w, frozen)])
    assert [t.dtype for t in saved] == [
        torch.int32,
        torch.bfloat16,
        torch.int32,
        torch.float8_e4m3fn,
        torch.float32,
    ]


def test_an_fp8_input_and_an_fp8_gradient() -> None:
    """Blocks along K know nothing of groups: they serve fprop and dgrad, and no wgrad."""
    x, grad, offs = sample("whole blocks")
    w, fp8_grad = stack(len(offs)).requires_grad_(False), BlockwiseFP8Tensor.from_values(grad)
    want = grads_of(x, w, offs, grad)
    got = grads(lambda t: functional.grouped_linear(quantize(t), w, offs), x, fp8_grad)
    assert_all_equal(got, want)
    trainable = stack(len(offs))
    with torch.no_grad():
        y = functional.grouped_linear(quantize(x), trainable, offs)
    assert_same(y, want[0])
    y = functional.grouped_linear(x, trainable, offs)
    assert_expected_inline(
        refused(
            lambda: functional.grouped_linear(quantize(x), trainable, offs),
            lambda: y.backward(fp8_grad, retain_graph=True),
        ),
        """\
ValueError: the input [384, 192] of a grouped FP8 linear layer is FP8 already, and its
  columnwise blocks, which the gradient of the weight needs, ignore the groups; to cast them
  from its rowwise blocks would round twice, since their scales are no powers of two: pass the
  high-precision tensor (share_inputs(model) casts it once for several weights), or give tokens
  and weights Recipe(scale=Scales(activations='power_of_two'))
NotImplementedError: a gradient of a grouped FP8 linear layer that is FP8 already: its
  columnwise blocks, which the gradient of the weight needs, ignore the groups; pass it in high
  precision (.dequantize())""",
    )


def test_ends_of_groups_that_change_before_backward_raise() -> None:
    x, grad, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs))
    y = functional.grouped_linear(x, w, offs)
    offs.mul_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.backward(grad)


@pytest.mark.not_repeated
@pytest.mark.parametrize("bias", [False, True])
def test_a_large_gradient_is_gone_when_the_products_run(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Callable[[], bool]] = []
    gone = gone_when(monkeypatch, "grouped_gemm", held)
    x, _, offs = sample("ragged")
    added = randn(len(offs), N, seed=2, grad=True) if bias else None
    y = functional.grouped_linear(x.requires_grad_(), stack(len(offs)), offs, added)
    y.register_hook(lambda g: held.append(storage_is_gone(g)))
    y.square().sum().backward()
    assert gone == [hasattr(torch.autograd.Function, "boxed_grads_call")]
