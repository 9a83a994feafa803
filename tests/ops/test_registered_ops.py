"""The registered ops: schemas, fakes, visibility, and the same bits either way they are called."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from blocktensor.ops import formats, reference
from blocktensor.ops.cast import ops as cast_ops
from blocktensor.ops.cast.ops import quantize_rowwise
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    Quantized,
)
from blocktensor.ops.gemm import ops as gemm_ops
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.grouped_gemm import ops as grouped_gemm_ops
from blocktensor.ops.linear_layer import adapted
from blocktensor.ops.linear_layer import ops as linear_ops
from blocktensor.ops.op import OPS
from blocktensor.ops.producers import ops as producer_ops
from blocktensor.ops.thin import ops as thin_ops
from tests.support.groups import columnwise, ends, stack
from tests.support.models import Trace
from tests.support.numeric import E4M3, assert_same, operand, values

NAMES = torch.ops.blocktensor
SHAPES = ((130, 300), (512, 256), (1, 300), (1, 1), (0, 5), (40, 0))
# Compilers see any size but 0 and 1 as a symbol.
SHAPES_IN_GRAPHS = ((130, 300), (1, 1), (0, 5))
Samples = dict[str, tuple[Any, ...]]


def cast_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    x = values("normal", *shape, torch.bfloat16, rng)
    stack, place = torch.stack([x, -x]).mT, (100, 3)
    row, square = (
        reference.quantize_rowwise(x, f) for x, f in ((x, BLOCKS_1X128), (stack, BLOCKS_128X128))
    )
    amax = reference.shard_amax(x, BLOCKS_128X128, *place)
    powers = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
    return {
        "columnwise_from_rowwise": (powers, BLOCKS_1X128_POW2, None),
        "columnwise_from_rowwise in squares": (powers, BLOCKS_128X128_POW2, None),
        "columnwise_from_rowwise by groups": (powers, BLOCKS_128X128_POW2, grouped(len(x))),
        "columnwise_from_rowwise of tokens": (powers, BLOCKS_1X128_POW2, grouped(len(x)), len(x)),
        "quantize_rowwise": (x.t(), BLOCKS_1X128),
        "quantize_rowwise of a stack": (stack, BLOCKS_128X128_POW2),
        "quantize_columnwise": (x, BLOCKS_1X128_POW2),
        "quantize_columnwise in squares": (x, BLOCKS_128X128),
        "quantize_both": (x, BLOCKS_1X128),
        "quantize_both in two formats": (x, BLOCKS_1X128_POW2, BLOCKS_128X128_POW2),
        "quantize_with_transpose": (x, BLOCKS_128X128_POW2),
        "quantize_with_transpose of a stack": (stack, BLOCKS_128X128),
        "quantize_transpose": (x, BLOCKS_128X128_POW2),
        "quantize_transpose of columns": (x.t().contiguous().t(), BLOCKS_128X128),
        "quantize_transpose of a stack": (stack, BLOCKS_128X128),
        "transpose": (square,),
        "dequantize": (row, torch.float16),
        "dequantize of a stack": (square, torch.float32),
        "dequantize of a view": (row._replace(data=row.data.t().contiguous().t()), torch.float32),
        "shard_amax": (x, BLOCKS_128X128_POW2, *place),
        "shard_amax of a stack": (torch.stack([x, -x]), BLOCKS_128X128, *place),
        "quantize_shard": (x, amax, BLOCKS_128X128_POW2, *place),
        "quantize_shard with a check": (x, amax * 2, BLOCKS_128X128, *place, amax),
    }


def gemm_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    (m, k), n = shape, 129
    a, b = operand(m, k, 1, rng), operand(n, k, 128, rng)
    return {"gemm": (a, b, torch.randn(n, generator=rng), torch.float32)}


def grouped_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    (m, k), n, offs = shape, 129, grouped(shape[0])
    x = values("normal", m, k, torch.bfloat16, rng)
    bias = torch.randn(3, n, generator=rng)
    left, right = (torch.randn(*s, generator=rng).bfloat16() for s in ((m, 24), (3, n, 24)))
    a, b = operand(m, k, 1, rng), stack(3, n, k, rng)
    g_col, x_col = (columnwise(torch.randn(m, c, generator=rng), offs) for c in (n, k))
    return {
        "quantize_grouped": (x, offs, BLOCKS_1X128, BLOCKS_1X128),
        "quantize_grouped in two formats": (x, offs, BLOCKS_1X128_POW2, BLOCKS_128X128_POW2),
        "quantize_grouped columnwise": (x, offs, None, BLOCKS_1X128_POW2),
        "quantize_grouped columnwise in squares": (x, offs, None, BLOCKS_128X128),
        "grouped_gemm": (a, b, offs, bias, torch.float32),
        "grouped_gemm of low rank": (a, b, offs, bias, torch.bfloat16, m, left, right),
        "grouped_gemm_wgrad": (g_col, x_col, offs, m, torch.float16),
    }


def thin_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    (m, k), offs, bf16 = shape, grouped(shape[0]), torch.bfloat16
    x, u = (values("normal", m, c, bf16, rng) for c in (k, 8))
    w = torch.randn(3, 5, k, generator=rng)
    return {
        "thin_operand": (w, bf16),
        "thin_operand of a transpose": (w.mT, torch.float16),
        "thin_rows": (x, thin_ops.thin_operand(w.mT, bf16), offs, 0.3),
        "thin_products": (x, u, offs, 5, torch.float32, "ecr"),
        "thin_products in another order": (x, u, offs, 8, bf16, "cre"),
    }


def adapted_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    (m, k), n, bf16, offs = shape, 129, torch.bfloat16, grouped(shape[0])
    x, u, grad = (values("normal", m, c, bf16, rng) for c in (k, 8, n))
    w, bias = stack(3, n, k, rng), torch.randn(3, n, generator=rng).bfloat16()
    a, b = torch.randn(3, 5, k, generator=rng), torch.randn(3, n, 5, generator=rng)
    thin = [thin_ops.thin_operand(t, bf16) for t in (a.mT, b)]
    x_row, _ = cast_ops.quantize_forms(x, BLOCKS_1X128, None)
    in_groups, _ = cast_ops.quantize_grouped(x, offs, BLOCKS_1X128, None)
    w_col = cast_ops.transpose(w)
    one, one_col = (q._replace(data=q.data[:1], scale=q.scale[:1]) for q in (w, w_col))
    how = 0.3, BLOCKS_1X128, bf16
    of_term = 0.3, 5, torch.float32, bf16, "erc", "cre", BLOCKS_1X128, bf16
    thin_of_one = [t[:1] for t in thin]
    return {
        "adapted_fprop": (x, x_row, one, bias[:1], None, a[:1].mT, b[:1], *how),
        "adapted_fprop of experts": (x, in_groups, w, bias, offs, a.mT, b, *how),
        "adapted_backward": (grad, x, u, one_col, *thin_of_one, None, *of_term),
        "adapted_backward of experts": (grad, x, u, w_col, *thin, offs, *of_term),
        "adapted_backward of the input": (grad, None, None, w_col, *thin, offs, *of_term),
        "adapted_backward of the term": (grad, x, u, None, None, thin[1], offs, *of_term),
    }


def producer_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    grad, gate, up = (values("normal", *shape, torch.bfloat16, rng) for _ in range(3))
    both, offs, silu = torch.cat([gate, up], 1), grouped(shape[0]), "silu"
    row, square = BLOCKS_1X128, BLOCKS_128X128
    return {
        "gated": (gate, up, silu, row, row),
        "gated by groups": (gate, up, silu, row, square, offs),
        "gated columnwise": (gate, up, "gelu", None, square),
        "gated_backward": (grad, gate, up, silu, row, square),
        "gated_backward by groups, of gate alone": (grad, gate, up, silu, row, row, offs, False),
        "gated_backward rowwise": (grad, gate, up, "relu2", row, None),
        "joint_gated_backward": (grad, both, silu, row, square),
        "joint_gated_backward by groups": (grad, both, "gelu_tanh", None, row, offs),
    }


def linear_samples(shape: tuple[int, int], rng: Generator) -> Samples:
    (m, k), n, offs = shape, 129, grouped(shape[0])
    row, square, bf16 = BLOCKS_1X128, BLOCKS_128X128, torch.bfloat16
    x, grad = (values("normal", m, c, bf16, rng) for c in (k, n))
    w, bias = values("normal", n, k, bf16, rng), torch.randn(n, generator=rng)
    experts, biases = torch.stack([w, -w, w * 2]), torch.randn(3, n, generator=rng)
    x_row, x_col = cast_ops.quantize_forms(x, row, square)
    x_in_groups = cast_ops.quantize_grouped(x, offs, row, row)
    w_col = cast_ops.quantize_transpose(w, square)
    experts_col = cast_ops.quantize_transpose(experts, square)
    how = row, square, torch.float32, bf16
    return {
        "linear_fprop": (x_row, w, bias, None, square, torch.float32, m, False),
        "linear_fprop of experts": (x_in_groups[0], experts, biases, offs, square, bf16, m, False),
        "linear_backward": (grad, x_col, w, None, None, *how, False),
        "linear_backward of a cast weight": (grad, x_col, None, w_col, None, *how, False),
        "linear_backward of the input": (grad, None, w, None, None, *how, False),
        "linear_backward of the weight": (grad, x_col, None, None, None, *how, False),
        "linear_backward of three dimensions": (grad[None], x_col, w, None, None, *how, False),
        "linear_backward of experts": (grad, x_in_groups[1], experts, None, offs, *how, False),
        "linear_backward of experts [K, N]": (
            grad,
            x_in_groups[1],
            None,
            experts_col,
            offs,
            *how,
            True,
        ),
    }


def grouped(rows: int) -> Tensor:
    """The ends of three groups, of which one is empty; the last row belongs to none."""
    return ends(rows // 3, 0, max(rows - rows // 3 - 1, 0))


@functools.cache
def samples(shape: tuple[int, int]) -> Samples:
    """The arguments of the functions, by a label: the op's name, and what is special.

    All tests share them: ``test_opcheck`` shows that no op changes its arguments.
    """
    made: Samples = {}
    for of in (
        cast_samples,
        gemm_samples,
        grouped_samples,
        thin_samples,
        adapted_samples,
        producer_samples,
        linear_samples,
    ):
        made |= of(shape, Generator().manual_seed(0))
    return made


def op_samples(label: str, shape: tuple[int, int]) -> tuple[Any, ...]:
    """The arguments of a registered op: a format goes by its name, ``Quantized`` as three."""
    args, kinds = samples(shape)[label], typing.get_type_hints(public(label)).values()
    flat: list[Any] = []
    for x, kind in zip(args, kinds, strict=False):  # without the type of the result
        absent = x is None and Quantized in typing.get_args(kind)
        flat += [None] * 3 if absent else tree_leaves(x)
    return tuple(x.name if isinstance(x, formats.BlockFormat) else x for x in flat)


LINEAR_PRODUCTS = {
    "linear_fprop": 1,
    "linear_fprop of experts": 1,
    "linear_backward": 2,
    "linear_backward of the input": 1,
    "linear_backward of the weight": 1,
    "linear_backward of three dimensions": 2,
    "linear_backward of experts [K, N]": 2,
}

LABELS = tuple(samples((1, 1)))
every_op = pytest.mark.parametrize("label", LABELS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def op_of(label: str) -> Any:
    return getattr(NAMES, label.split()[0]).default


def public(label: str) -> Callable[..., Any]:
    """The function of the package."""
    name = label.split()[0]
    modules = (cast_ops, gemm_ops, grouped_gemm_ops, thin_ops, producer_ops, linear_ops, adapted)
    function: Callable[..., Any] = next(vars(m)[name] for m in modules if name in vars(m))
    return function


def outputs(result: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def on_meta(args: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to("meta"), args)


def test_every_registered_op_is_tested() -> None:
    declared = {name for name in OPS if not name.startswith("tried_")}
    assert declared == {label.split()[0] for label in LABELS}


@every_op
@every_shape
def test_opcheck(label: str, shape: tuple[int, int]) -> None:
    args = op_samples(label, shape)
    before = tree_map_only(Tensor, torch.clone, args)
    checks = ["test_autograd_registration", "test_faketensor"]
    if shape in SHAPES_IN_GRAPHS:
        checks.append("test_aot_dispatch_dynamic")
    if not any(x.dtype == E4M3 for x in outputs(args)):  # this one multiplies the inputs
        checks.append("test_schema")
    passed = torch.library.opcheck(op_of(label), args, test_utils=checks)
    assert passed == dict.fromkeys(checks, "SUCCESS")
    for x, y in zip(outputs(args), outputs(before), strict=True):
        assert_same(x, y)  # opcheck works on copies


@every_op
def test_a_tangent_does_not_end_at_an_op(label: str) -> None:
    """A compiled graph without gradients calls ops, which no autograd function stands before."""
    args = op_samples(label, (130, 300))
    first = next(x for x in args if isinstance(x, Tensor) and x.is_floating_point())
    with forward_ad.dual_level(), torch.no_grad():
        op_of(label)(*args)
        with torch.inference_mode():
            op_of(label)(*tree_map_only(Tensor, torch.clone, args))
        tangent = torch.zeros(first.shape).to(first.dtype)
        dual = forward_ad.make_dual(first, tangent)
        assert forward_ad.unpack_dual(dual).tangent is not None
        with pytest.raises(NotImplementedError, match=r"forward-mode AD \(jvp\).*reverse mode"):
            op_of(label)(*(dual if x is first else x for x in args))


@every_op
@every_shape
def test_the_op_and_the_direct_call_give_the_same_bits(label: str, shape: tuple[int, int]) -> None:
    direct, registered = samples(shape)[label], op_samples(label, shape)
    made = public(label)(*direct)
    for x, y in zip(outputs(made), outputs(op_of(label)(*registered)), strict=True):
        assert_same(x, y)
        assert x.stride() == y.stride()


@every_op
@every_shape
def test_meta_and_fake_outputs_are_laid_out_as_real_ones(label: str, shape: Any) -> None:
    args = samples(shape)[label]
    real, meta = public(label)(*args), public(label)(*on_meta(args))
    assert all(t.is_meta for t in outputs(meta))
    with FakeTensorMode() as mode:
        fake = public(label)(*tree_map_only(Tensor, mode.from_tensor, args))
    for x, *others in zip(*map(tree_leaves, (real, meta, fake)), strict=True):
        for y in others:
            if isinstance(x, Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            else:  # a format
                assert x is y


@every_op
def test_a_dispatch_mode_sees_the_op_and_nothing_inside(label: str) -> None:
    args = samples((130, 300))[label]
    with Trace() as trace:
        public(label)(*args)
    # the check of a joint tensor looks at its halves
    (name,) = (op.split()[0] for op in trace.ops if op != "aten.split.Tensor")
    assert name == f"blocktensor.{label.split()[0]}"


@every_op
def test_a_compiled_graph_holds_the_op(label: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    args = samples((130, 300))[label]
    torch._dynamo.reset()
    got = torch.compile(public(label), backend=backend, fullgraph=True)(*args)
    for x, y in zip(outputs(got), outputs(public(label)(*args)), strict=True):
        assert_same(x, y)
    (graph,) = graphs
    assert op_of(label) in [n.target for n in graph.graph.nodes if n.op == "call_function"]


def test_one_graph_serves_all_sizes() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def product(x: Tensor, w: Tensor) -> Tensor:
        return gemm(quantize_rowwise(x, BLOCKS_1X128), quantize_rowwise(w, BLOCKS_128X128))

    w = torch.randn(129, 300)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (130, 7, 257):
            x = torch.randn(m, 300)
            a, b = quantize_rowwise(x, BLOCKS_1X128), quantize_rowwise(w, BLOCKS_128X128)
            assert_same(product(x, w), gemm(a, b))


@pytest.mark.parametrize("shape", [(130, 300), (0, 5), (2, 0)])
@pytest.mark.parametrize("label", [x for x in LABELS if "gemm" in x])
def test_flops_of_products_are_counted(label: str, shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        public(label)(*samples(shape)[label])
    rows, k = shape
    rank = 24 * label.endswith("of low rank")
    assert counter.get_total_flops() == 2 * rows * (k + rank) * 129


@pytest.mark.parametrize(("label", "products"), LINEAR_PRODUCTS.items())
def test_flops_of_linear_layers_are_counted(label: str, products: int) -> None:
    with FlopCounterMode(display=False) as counter:
        public(label)(*samples((130, 300))[label])
    assert counter.get_total_flops() == products * 2 * 130 * 300 * 129


@pytest.mark.parametrize("label", ["gemm", "grouped_gemm"])
def test_products_default_to_bf16_without_bias(label: str) -> None:
    *args, _, _ = samples((130, 300))[label]
    assert_same(public(label)(*args), getattr(reference, label)(*args, None, torch.bfloat16))


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0), (3, 5)])
def test_an_empty_contraction_gives_the_bias(m: int, n: int) -> None:
    a = reference.quantize_rowwise(torch.empty(m, 0), BLOCKS_1X128)
    b = reference.quantize_rowwise(torch.empty(n, 0), BLOCKS_128X128)
    bias = torch.arange(float(n))
    assert torch.equal(gemm(a, b, bias=bias).float(), bias.expand(m, n))


@pytest.mark.parametrize("label", [x for x in LABELS if "gemm" in x])
def test_autocast_leaves_the_products_alone(label: str) -> None:
    args = samples((130, 300))[label]
    want = public(label)(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(public(label)(*args), want)
