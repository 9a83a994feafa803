"""The differentiable grouped linear: what it multiplies and saves, and how it lives in autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blocktensor
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd import early_cast, grouped_plan
from blocktensor.autograd.grouped_linear import sum_groups
from tests.support.groups import GROUPS, columnwise, ends, ranges
from tests.support.models import (
    FP32_SCALES,
    POWER_OF_TWO,
    RECIPES,
    SQUARE,
    Trace,
    complaint,
    plain,
    randn,
)
from tests.support.numeric import assert_same, relative_error

N, K = 144, 192
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
every_grouping = pytest.mark.parametrize("groups", GROUPS)


@pytest.fixture(autouse=True, params=["early", "late"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the output's gradient is cast before backward begins, as a large one is."""
    if request.param == "early":
        monkeypatch.setattr(early_cast, "EARLY_BYTES", 0)
    monkeypatch.setattr(grouped_plan._PLANS, "_table", {})
    made: str = request.param
    return made


def stack(
    experts: int, *, recipe: Recipe = FP32_SCALES, dtype: Any = torch.bfloat16, kn: bool = False
) -> nn.Parameter:
    """Trainable experts ``[E, N, K]``, or ``[E, K, N]`` of the same values."""
    w = randn(experts, N, K, seed=1, dtype=dtype) / K**0.5
    return nn.Parameter(BlockwiseFP8Weight(w.mT.contiguous() if kn else w, recipe))


def expert_by_expert(
    x: Tensor, w: Tensor, offs: Tensor, grad: Tensor, bias: Tensor | None, recipe: Recipe
) -> tuple[list[Tensor], ...]:
    """y, dx, dw and dbias of each group, by dense FP8 linears; none for groups without rows."""
    results: tuple[list[Tensor], ...] = ([], [], [], [])
    for e, inside in enumerate(ranges(offs)):
        leaves = [x[inside], w[e], *([] if bias is None else [bias[e]])]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        y = functional.linear(*leaves, recipe=recipe)
        y.backward(grad[inside])
        for made, value in zip(results, (y.detach(), *(t.grad for t in leaves)), strict=False):
            made.append(value)
    return results


def grads(
    run: Callable[..., Tensor], x: Tensor, grad: Tensor, *leaves: Tensor
) -> list[Tensor | None]:
    """The output and the gradients of x and of ``leaves``, from scratch."""
    leaf = x.detach().clone().requires_grad_()
    for parameter in leaves:
        parameter.grad = None
    y = run(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in leaves)]


def sample(groups: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, the output's gradient and offs; NaN in the rows of no group."""
    rows, sizes = GROUPS[groups]
    x, grad = (randn(rows, c, seed=c, dtype=dtype) for c in (K, N))
    x[sum(sizes) :] = grad[sum(sizes) :] = float("nan")
    return x, grad, ends(*sizes)


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
    frozen = BlockwiseFP8Tensor.quantize(plain(w), SQUARE, recipe)
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
    frozen = BlockwiseFP8Tensor.quantize(plain(kn), SQUARE).transpose(1, 2)
    assert_same(functional.grouped_linear(x, frozen, offs), want[0])
    for weight in (kn, plain(kn).requires_grad_()):
        with Trace() as trace:
            y, dx, dw = grads(
                lambda t, weight=weight: functional.grouped_linear(t, weight.mT, offs),
                x, grad, weight,
            )  # fmt: skip
        assert_same(y, want[0])
        assert_same(dx, want[1])
        assert dw.is_contiguous()
        assert relative_error(dw.mT, want[2]) <= 1e-6 or not want[2].any()
        assert (trace.count("clone"), trace.count("copy")) == (1, 0)  # of x, by grads()


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
    x, grad, offs = sample("ragged")
    w, y = stack(len(offs)), []

    def traced(run: Callable[[], Any]) -> str:
        with Trace() as trace:
            run()
        return "\n".join(trace.ops)

    x.requires_grad_()
    assert_expected_inline(
        traced(lambda: y.append(functional.grouped_linear(x, w, offs))),
        """\
blocktensor.quantize_rowwise 128x128
blocktensor.quantize_grouped 1x128
blocktensor.grouped_gemm 1x128 128x128""",
    )
    assert_expected_inline(
        traced(lambda: y[0].backward(grad)),
        """\
blocktensor.quantize_grouped 1x128
blocktensor.transpose 128x128
blocktensor.grouped_gemm 1x128 128x128
blocktensor.grouped_gemm_wgrad 1x128 1x128""",
    )


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
        (True, True, "quantize_grouped", ("quantize_grouped", "grouped_gemm", "grouped_gemm_wgrad")),
        (True, False, "quantize_rowwise", ("quantize_rowwise", "grouped_gemm")),
        (False, True, "quantize_grouped", ("quantize_grouped_columnwise", "grouped_gemm_wgrad")),
        (False, False, "quantize_rowwise", ()),
    ],
)
@pytest.mark.parametrize("create_graph", [False, True])
def test_only_what_is_asked_for_is_computed(
    x_grad: bool, w_grad: bool, forward: str, backward: tuple[str, ...], create_graph: bool
) -> None:
    x, grad, offs = sample("ragged")
    w, bias = stack(len(offs)).requires_grad_(w_grad), randn(len(offs), N, seed=2, grad=True)
    x.requires_grad_(x_grad)
    with Trace() as trace:
        y = functional.grouped_linear(x, w, offs, bias)
    assert trace.ops[1] == f"blocktensor.{forward} 1x128"
    inputs = [t for t in (x, w, bias) if t.requires_grad]
    with Trace() as trace:
        torch.autograd.grad(y, inputs, grad, create_graph=create_graph)
    ours = [op.split()[0].removeprefix("blocktensor.") for op in trace.ops if "blocktensor" in op]
    assert tuple(op for op in ours if op != "transpose") == backward
    assert ours.count("transpose") == x_grad


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
    frozen = BlockwiseFP8Tensor.quantize(plain(w), SQUARE)
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
                lambda t, run=run, outputs=outputs: outputs.extend(run(t)) or outputs[0] - outputs[1],
                x, grad, *leaves,
            )  # fmt: skip
        results.append([y, *outputs, *rest])
    for a, b in zip(*results, strict=True):
        assert_same(a.detach(), b.detach())
    assert trace.ops.count("blocktensor.quantize_grouped 1x128") - len(leaves) == 1


def test_several_weights_that_do_not_fit() -> None:
    x, _, offs = sample("ragged")
    a, b = stack(len(offs)), stack(len(offs), recipe=POWER_OF_TWO)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [a, b], offs)),
        """\
weights of one input were cast in 1x128 and 1x128_pow2 blocks: give them one recipe,
or call grouped_linear(x, w, offs) for each""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [], offs)),
        """\
0 weights with 0 biases: expected one for each of at least one weight, or bias=None""",
    )
    bias = torch.zeros(len(offs), N)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [a, a], offs, [bias])),
        """\
2 weights with 1 biases: expected one for each of at least one weight, or bias=None""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [a, a], offs, bias)),
        """\
2 weights with a single bias: expected one for each of at least one weight, or
bias=None""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.grouped_linear(x, a, offs, [bias])),
        """one weight has one bias [E, N], got a list""",
    )


# Modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_grad_and_inference_mode(mode: Callable[[], Any], frozen: bool) -> None:
    x, _, offs = sample("ragged")
    w: Tensor = stack(len(offs))
    w = BlockwiseFP8Tensor.quantize(plain(w), SQUARE) if frozen else w
    want = functional.grouped_linear(x, w, offs)
    with mode():
        y = functional.grouped_linear(x, w, offs)
    assert not y.requires_grad
    assert_same(y, want.detach())


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_decides_the_output_and_grads_keep_their_dtypes(
    dtype: torch.dtype, autocast: torch.dtype
) -> None:
    x, grad, offs = sample("ragged", dtype)
    w, bias = stack(len(offs)), randn(len(offs), N, seed=2, grad=True)
    with torch.autocast("cpu", dtype=autocast):
        y, dx, dw, db = grads(
            lambda t: functional.grouped_linear(t, w, offs, bias), x, grad.to(autocast), w, bias
        )
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (autocast, dtype, *[torch.bfloat16] * 2)
    values = x.to(autocast), plain(w).to(autocast), offs, bias.detach().to(autocast)
    assert_same(y, functional.grouped_linear(*values))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, grad, offs = sample("ragged")
    w = stack(len(offs))

    def run(t: Tensor) -> Tensor:
        return functional.grouped_linear(t, w, offs)

    want = grads(run, x, grad, w)
    got = grads(lambda t: checkpoint(run, t, use_reentrant=reentrant), x, grad, w)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_offloading_saved_tensors() -> None:
    x, grad, offs = sample("ragged")
    for w in (stack(len(offs)), plain(stack(len(offs))).requires_grad_()):
        want = grads(lambda t, w=w: functional.grouped_linear(t, w, offs), x, grad, w)
        with torch.autograd.graph.save_on_cpu():
            got = grads(lambda t, w=w: functional.grouped_linear(t, w, offs), x, grad, w)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)


# Gradients of other kinds


def test_an_expanded_gradient() -> None:
    x, _, offs = sample("ragged")
    w, bias = stack(len(offs)), randn(len(offs), N, seed=2, grad=True)
    run = lambda t: functional.grouped_linear(t, w, offs, bias)  # noqa: E731
    want = grads(run, x, torch.ones(len(x), N).bfloat16(), w, bias)
    leaf = x.clone().requires_grad_()
    w.grad = bias.grad = None
    run(leaf).sum().backward()
    for a, b in zip((leaf.grad, w.grad, bias.grad), want[1:], strict=True):
        assert_same(a, b)


class Ends(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_where_no_gradient_arrives_none_leaves() -> None:
    x, _, offs = sample("ragged")
    w, bias = stack(len(offs)), randn(len(offs), N, seed=2, grad=True)
    x.requires_grad_()
    Ends.apply(functional.grouped_linear(x, w, offs, bias)).sum().backward()
    assert x.grad is w.grad is bias.grad is None
    assert w.cache.nbytes() == 0


def test_an_fp8_input_and_an_fp8_gradient() -> None:
    """Blocks along K know nothing of groups: they serve fprop and dgrad, and no wgrad."""
    x, grad, offs = sample("whole blocks")
    w = stack(len(offs)).requires_grad_(False)
    want = grads(lambda t: functional.grouped_linear(t, w, offs), x, grad)
    got = grads(
        lambda t: functional.grouped_linear(blocktensor.quantize(t), w, offs),
        x, BlockwiseFP8Tensor.quantize(grad),
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    trainable = stack(len(offs))
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
        complaint(NotImplementedError, lambda: y.backward(BlockwiseFP8Tensor.quantize(grad))),
        """\
a gradient of a grouped FP8 linear that is FP8 already: its columnwise blocks, which
the gradient of the weight needs, ignore the groups; pass it in high precision
(.dequantize())""",
    )


def test_a_second_backward_raises() -> None:
    x, grad, offs = sample("ragged")
    w = stack(len(offs))
    y = functional.grouped_linear(x.requires_grad_(), w, offs)
    (dx,) = torch.autograd.grad(y, [x], grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


def test_retained_graphs_and_accumulation() -> None:
    x, grad, offs = sample("ragged", torch.float32)
    w = stack(len(offs), dtype=torch.float32)
    y = functional.grouped_linear(x.requires_grad_(), w, offs)
    first = torch.autograd.grad(y, [x, w], grad, retain_graph=True)
    second = torch.autograd.grad(y, [x, w], grad)
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)
    for _ in range(2):
        functional.grouped_linear(x, w, offs).backward(grad)
    assert_same(w.grad, first[1] + first[1])


def test_the_output_may_be_changed_in_place() -> None:
    x, grad, offs = sample("ragged")
    w = stack(len(offs))
    changed = grads(lambda t: functional.grouped_linear(t, w, offs).mul_(2).relu_(), x, grad, w)
    want = grads(lambda t: (functional.grouped_linear(t, w, offs) * 2).relu(), x, grad, w)
    for a, b in zip(changed, want, strict=True):
        assert_same(a, b)


# Never stale


def test_a_write_between_forward_and_backward_raises() -> None:
    x, grad, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs))
    for written in (w, w.master, offs):
        y = functional.grouped_linear(x, w, offs)
        with torch.no_grad():
            written.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an in-?place operation"):
            y.backward(grad)


def test_every_forward_sees_the_weight_as_it_is() -> None:
    x, _, offs = sample("ragged")
    w = stack(len(offs))
    before = functional.grouped_linear(x, w, offs)
    w.data.view(-1).mul_(2)
    assert_same(functional.grouped_linear(x, w, offs).detach(), 2 * before.detach())


def test_rowwise_bytes_of_a_weight_are_gone_after_backward() -> None:
    x, grad, offs = sample("ragged")
    w = stack(len(offs))
    y = functional.grouped_linear(x.requires_grad_(), w, offs)
    assert w.cache.nbytes() > 0
    y.backward(grad)
    gc.collect()
    assert w.cache.nbytes() == 0


# main_grad


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("through", ["functional", "F.grouped_mm"])
def test_main_grad(kn: bool, through: str) -> None:
    """Also of a transpose, as grouped products take the weight."""
    x, grad, offs = sample("rows of no group")
    w = stack(len(offs), kn=kn)

    def run(t: Tensor) -> Tensor:
        if through == "functional":
            return functional.grouped_linear(t, w.mT if kn else w, offs)
        return F.grouped_mm(t, w if kn else w.transpose(-2, -1), offs=offs)

    y, dx, dw = grads(run, x, grad, w)
    w.main_grad = start = torch.ones_like(dw, dtype=torch.float32)
    for _ in range(2):
        again = grads(run, x, grad, w)
        assert again[2] is None
        assert_same(again[0], y)
        assert_same(again[1], dx)
    assert w.main_grad is start
    torch.testing.assert_close((start - 1) / 2, dw.float(), rtol=1e-2, atol=1e-3)
    assert torch.equal(start[1], torch.ones_like(start[1]))  # a group without rows adds nothing


def test_main_grad_takes_only_what_is_asked_for() -> None:
    x, grad, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs))
    w.main_grad = torch.zeros(w.shape)
    torch.autograd.grad(F.grouped_mm(x, w.mT, offs=offs), [x], grad)
    assert not w.main_grad.any()
    (dw,) = torch.autograd.grad(F.grouped_mm(x, w.mT, offs=offs), [w], grad)
    assert dw.shape == w.shape
    assert not w.main_grad.any()


def test_buffers_that_are_refused() -> None:
    w = stack(2)
    for buffer, kind, text in (
        (torch.zeros(2, N, K).bfloat16(), TypeError, "main_grad is torch.bfloat16"),
        (torch.zeros(2, K, N), ValueError, "expected the weight's [2, 144, 192] on cpu"),
        (torch.zeros(2, K, N).mT, ValueError, "expected a contiguous stack [2, 144, 192]"),
    ):
        assert text in complaint(kind, lambda b=buffer: setattr(w, "main_grad", b)).replace("\n", " ")
    assert w.main_grad is None


# Operands that do not fit


def test_refusals() -> None:
    x, _, offs = sample("ragged")
    w = plain(stack(len(offs)))

    def said(kind: type[Exception], *args: Any, **kwargs: Any) -> str:
        return complaint(kind, lambda: functional.grouped_linear(*args, **kwargs))

    assert_expected_inline(
        said(ValueError, x, w[0], offs),
        """\
the weight of a grouped FP8 linear has 2 dimensions, shape [144, 192]: expected 3;
stacks of experts are [E, N, K]; a matrix needs functional.linear""",
    )
    assert_expected_inline(
        said(ValueError, x[None], w, offs),
        """\
the input of a grouped FP8 linear has 3 dimensions, shape [1, 270, 192]: expected 2;
flatten tokens to [T, K]""",
    )
    assert_expected_inline(
        said(TypeError, x.double(), w, offs),
        """\
the input of a grouped FP8 linear has dtype torch.float64: blocktensor casts
torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
.to(torch.bfloat16)""",
    )
    assert_expected_inline(
        said(ValueError, x[:, 1:], w, offs),
        """\
cannot contract input [270, 191] with weight [5, 144, 192]: K is 191 in one and 192
in the other""",
    )
    assert_expected_inline(
        said(TypeError, x, w, offs.long()),
        """offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)""",
    )
    assert_expected_inline(
        said(ValueError, x, w, offs[1:]),
        """\
offs ends 4 groups, and the weight [5, 144, 192] is a stack of 5 experts: expected
one end for each""",
    )
    assert_expected_inline(
        said(ValueError, x, w, offs.to("meta")),
        """the input is on cpu and offs on meta: move them to one device""",
    )
    assert_expected_inline(
        said(ValueError, x, w, offs, torch.zeros(N).bfloat16()),
        """the bias has shape [144]: expected [5, 144]""",
    )
    assert_expected_inline(
        said(TypeError, x.float(), w, offs),
        """\
the input is torch.float32 and the weight torch.bfloat16: convert one of them, or
run under torch.autocast""",
    )
    rows = BlockwiseFP8Tensor.quantize(w)
    assert_expected_inline(
        said(ValueError, x, rows, offs),
        """\
the weight of a grouped FP8 linear has blocks of (1, 128): expected (128, 128)""",
    )
    shared = blocktensor.quantize(x)
    assert "mixed recipes" in said(ValueError, shared, w, offs, recipe=POWER_OF_TWO)
    nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    assert "nested" in said(NotImplementedError, nested, w, offs)
