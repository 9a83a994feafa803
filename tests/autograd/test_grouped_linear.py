"""The differentiable grouped linear: what it multiplies and saves, and how it lives in autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import blocktensor
from blocktensor import BlockwiseFP8Tensor, Recipe, functional
from blocktensor.autograd.products import sum_groups
from blocktensor.ops import reference
from tests.support.experts import (
    K,
    N,
    expert_by_expert,
    grads,
    sample,
    stack,
)
from tests.support.groups import GROUPS, columnwise, ends, ranges
from tests.support.models import (
    RECIPES,
    SQUARE,
    Trace,
    complaint,
    plain,
    randn,
)
from tests.support.numeric import assert_same, relative_error
from tests.support.reference_ops import replace_op
from tests.support.steps import assert_trace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRODUCTS = ("grouped_gemm", "grouped_gemm_wgrad")
every_grouping = pytest.mark.parametrize("groups", GROUPS)


# The ONE rule


@every_grouping
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_equals_dense_linears_expert_by_expert(
    groups: str, recipe: Recipe, dtype: torch.dtype
) -> None:
    """Bit for bit on the CPU, of trainable, frozen and plain weights; NaN rows reach nothing."""
    x, grad, offs = sample(groups, dtype)
    used = int(offs[-1])
    w, bias = stack(len(offs), recipe=recipe, dtype=dtype), randn(len(offs), N, seed=2, dtype=dtype)
    want = expert_by_expert(x, plain(w), offs, grad, bias, recipe)
    leaf = plain(w).requires_grad_()
    frozen = BlockwiseFP8Tensor.from_values(plain(w), SQUARE, recipe)
    for weight in (w, leaf, frozen):
        added = bias.clone().requires_grad_()
        y, dx, *dws, db = grads(
            lambda t, weight=weight, added=added: functional.grouped_linear(
                t, weight, offs, added, recipe=recipe
            ),
            x, grad, *([] if weight is frozen else [weight]), added,
        )  # fmt: skip
        for got, parts in ((y, want[0]), (dx, want[1])):
            assert_same(got[:used], torch.cat(parts))
            assert not got[used:].any()
        for dw in dws:
            assert_same(dw, torch.stack(want[2]))
        torch.testing.assert_close(db, torch.stack(want[3]), rtol=1e-2, atol=1e-2)
        assert type(y) is type(dx) is Tensor


@every_grouping
def test_a_stack_that_lies_transposed(groups: str) -> None:
    """Its gradient is computed as the stack lies: equal but for the order of fp32 sums."""
    x, grad, offs = sample(groups, torch.float32)
    w, kn = (stack(len(offs), dtype=torch.float32, kn=kn) for kn in (False, True))
    want = grads(lambda t: functional.grouped_linear(t, w, offs), x, grad, w)
    frozen = BlockwiseFP8Tensor.from_values(plain(kn), SQUARE).transpose(1, 2)
    assert_same(functional.grouped_linear(x, frozen, offs), want[0])
    x.requires_grad_()
    for weight in (kn, plain(kn).requires_grad_()):
        y = functional.grouped_linear(x, weight.mT, offs)
        dx, dw = torch.autograd.grad(y, [x, weight], grad)
        assert_same(y.detach(), want[0])
        assert_same(dx, want[1])
        assert dw.is_contiguous()  # before autograd lays it out as the weight
        assert relative_error(dw.mT, want[2]) <= 1e-6 or not want[2].any()


@every_grouping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bias_is_summed_in_fp32(groups: str, dtype: torch.dtype) -> None:
    rows, sizes = GROUPS[groups]
    grad = 1 + randn(rows, N, dtype=dtype) / 8
    grad[sum(sizes) :] = float("nan")
    offs = ends(*sizes)
    want = torch.stack([grad[inside].double().sum(0) for inside in ranges(offs)])
    for given in (grad, grad.t().contiguous().t(), grad[:, :1].expand(-1, N)):
        got = sum_groups(given, offs)
        assert got.dtype == torch.float32
        exact = want if given.stride(1) else want[:, :1].expand(-1, N)
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-4)


def test_ends_out_of_range_are_not_read_by_the_bias() -> None:
    x = torch.ones(10, 3)
    offs = torch.tensor([4, 2, -7, 10**6], dtype=torch.int32)
    assert sum_groups(x, offs)[:, 0].tolist() == [4, 0, 0, 6]


def test_trace_of_a_forward_and_a_backward() -> None:
    x, _, offs = sample("ragged")
    product = "grouped_gemm 1x128 128x128"
    assert_trace(
        functional.grouped_linear, x, stack(len(offs)), offs,
        forward=["quantize_with_transpose 128x128", "quantize_grouped 1x128", product],
        backward=["quantize_grouped 1x128", product, "grouped_gemm_wgrad 1x128 1x128"],
    )  # fmt: skip


def test_a_step_with_bias_reads_nothing_on_the_host() -> None:
    x, grad, offs = sample("rows of no group")
    w, bias = stack(len(offs)), randn(len(offs), N, seed=2, grad=True)
    with Trace() as trace:
        functional.grouped_linear(x.requires_grad_(), w, offs, bias).backward(grad)
    assert trace.count("aten.segment_reduce") == 1
    assert trace.count("_local_scalar_dense") == trace.count("item") == trace.count("nonzero") == 0


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "forward", "backward"),
    [
        (True, True, "quantize_grouped", ("quantize_grouped", *PRODUCTS)),
        (True, False, "quantize_rowwise", ("quantize_rowwise", "grouped_gemm")),
        (False, True, "quantize_grouped", ("quantize_grouped_columnwise", "grouped_gemm_wgrad")),
        (False, False, "quantize_rowwise", ()),
    ],
)
def test_only_what_is_asked_for_is_computed(
    x_grad: bool, w_grad: bool, forward: str, backward: tuple[str, ...]
) -> None:
    x, grad, offs = sample("ragged")
    w, bias = stack(len(offs)).requires_grad_(w_grad), randn(len(offs), N, seed=2, grad=True)
    x.requires_grad_(x_grad)
    with Trace() as trace:
        y = functional.grouped_linear(x, w, offs, bias)
    of_weight = "quantize_with_transpose" if x_grad else "quantize_rowwise"
    assert trace.ops[:2] == [f"blocktensor.{of_weight} 128x128", f"blocktensor.{forward} 1x128"]
    inputs = [t for t in (x, w, bias) if t.requires_grad]
    with Trace() as trace:
        torch.autograd.grad(y, inputs, grad)
    ours = [op.split()[0].removeprefix("blocktensor.") for op in trace.ops if "blocktensor" in op]
    assert tuple(ours) == backward


def test_what_is_saved() -> None:
    x, _, offs = sample("ragged")
    w, saved = stack(len(offs)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.grouped_linear(x.requires_grad_(), w, offs)
    ends_, data, scale, weight = saved
    want = columnwise(x.detach(), offs)
    assert_same(data, want.data)
    assert_same(scale, want.scale)
    assert torch.equal(ends_, offs)
    assert weight is w or weight.master is w.master
    saved.clear()
    w.requires_grad_(False)
    frozen = BlockwiseFP8Tensor.from_values(plain(w), SQUARE)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.grouped_linear(x, w, offs)
        functional.grouped_linear(x, frozen, offs)
    assert [t.dtype for t in saved] == [
        *(torch.int32, torch.bfloat16),
        *(torch.int32, torch.float8_e4m3fn, torch.float32),
    ]


# Several weights of one input


@pytest.mark.parametrize("kind", ["trainable", "one frozen", "plain", "transposed"])
@pytest.mark.parametrize("autocast", [False, True])
def test_several_weights_share_one_cast(kind: str, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    x, grad, offs = sample("ragged", dtype)
    grad = grad.bfloat16()
    ws = [stack(len(offs), dtype=dtype), stack(len(offs), dtype=dtype, kn=kind == "transposed")]
    if kind == "plain":
        ws = [plain(w).requires_grad_() for w in ws]
    ws[1].requires_grad_(kind != "one frozen")
    leaves = [w for w in ws if w.requires_grad]
    used = [w.mT if w.shape[1] == K else w for w in ws]
    biases = [None, randn(len(offs), N, seed=2, dtype=dtype)]

    def one_by_one(t: Tensor) -> tuple[Tensor, ...]:
        t = t.to(grad.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            pairs = zip(used, biases, strict=True)
            return tuple(functional.grouped_linear(t, w, offs, b) for w, b in pairs)

    def together(t: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return functional.grouped_linear(t, used, offs, biases)

    results = []
    for run in (one_by_one, together):
        outputs: list[Tensor] = []
        with Trace() as trace:
            y, *rest = grads(
                lambda t, run=run, outputs=outputs: outputs.extend(run(t)) or sum(outputs),
                x, grad, *leaves,
            )  # fmt: skip
        results.append([y, *outputs, *rest])
    for a, b in zip(*results, strict=True):
        assert_same(a.detach(), b.detach())
    assert trace.ops.count("blocktensor.quantize_grouped 1x128") - len(leaves) == 1
    with torch.no_grad(), Trace() as trace:
        together(x)
    assert trace.count("quantize_grouped") == 0  # no gradient of a weight, no columnwise form


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


def test_ends_of_groups_that_change_before_backward_raise() -> None:
    x, grad, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs))
    y = functional.grouped_linear(x, w, offs)
    offs.mul_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.backward(grad)


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
