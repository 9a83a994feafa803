"""The registered ops: schemas, fakes, visibility, and the same bits either way they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from blocktensor.ops import library, reference
from tests.support.numeric import E4M3, assert_same, operand, values

OPS = torch.ops.blocktensor
SHAPES = ((130, 300), (128, 256), (1, 300), (1, 1), (0, 5), (5, 0))


def cast_samples(shape: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    """The arguments of every op but the GEMMs, by the op's name."""
    rng = torch.Generator().manual_seed(0)
    x = values("normal", shape[0], shape[1], torch.bfloat16, rng)
    stack = torch.stack([x, -x]).mT
    row, square = reference.quantize_rowwise(x, False), reference.quantize_square(stack, False)
    return {
        "quantize_rowwise": (x.t(), False),
        "quantize_columnwise": (x, True),
        "quantize_both": (x, False),
        "quantize_square": (stack, True),
        "transpose_square": square,
        "dequantize": (*row, torch.float16),
    }


def gemm_samples(shape: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    rng = torch.Generator().manual_seed(0)
    (m, k), n = shape, 129
    a, b = operand(m, k, 1, rng), operand(n, k, 128, rng)
    bias, out = torch.randn(n, generator=rng), torch.randn(m, n, generator=rng)
    return {"gemm": (*a, *b, bias, torch.float32), "gemm_add_": (out, *a, *b)}


def samples(shape: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    return {**cast_samples(shape), **gemm_samples(shape)}


NAMES = tuple(samples((1, 1)))
every_op = pytest.mark.parametrize("name", NAMES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def public(name: str) -> Callable[..., Any]:
    """The function of `library` with the positional arguments of the op."""
    if name != "gemm":
        return getattr(library, name)
    return lambda a, sa, b, sb, bias, dtype: library.gemm(a, sa, b, sb, bias=bias, out_dtype=dtype)


def outputs(result: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def test_every_registered_op_is_tested() -> None:
    ops = [x for x in vars(library).values() if isinstance(x, torch.library.CustomOpDef)]
    assert {op._opoverload for op in ops} == {getattr(OPS, name).default for name in NAMES}


@every_op
@every_shape
def test_opcheck(name: str, shape: tuple[int, int]) -> None:
    args, before = samples(shape)[name], samples(shape)[name]
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name.startswith("quantize"):  # this one multiplies the inputs: e4m3 cannot
        checks.append("test_schema")
    passed = torch.library.opcheck(getattr(OPS, name).default, args, test_utils=checks)
    assert passed == dict.fromkeys(checks, "SUCCESS")
    for x, y in zip(outputs(args), outputs(before), strict=True):
        assert_same(x, y)  # opcheck works on copies


@every_op
@every_shape
def test_the_op_and_the_direct_call_give_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    direct, registered = samples(shape)[name], samples(shape)[name]
    got = outputs(public(name)(*direct))
    want = outputs(getattr(OPS, name)(*registered)) or [registered[0]]  # gemm_add_ returns nothing
    for x, y in zip(got, want, strict=True):
        assert_same(x, y)
        assert x.stride() == y.stride()


def laid_out_alike(got: object, want: object) -> None:
    for x, y in zip(outputs(got), outputs(want), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@every_op
@every_shape
def test_meta_and_fake_outputs_are_laid_out_as_real_ones(name: str, shape: tuple[int, int]) -> None:
    args = samples(shape)[name]
    real = public(name)(*args)
    on_meta = public(name)(*tree_map_only(Tensor, lambda t: t.to("meta"), args))
    assert all(t.device.type == "meta" for t in outputs(on_meta))
    laid_out_alike(on_meta, real)
    with FakeTensorMode() as mode:
        fake = public(name)(*tree_map_only(Tensor, mode.from_tensor, args))
    laid_out_alike(fake, real)


def test_dequantize_of_a_view_is_contiguous_as_its_fake_is() -> None:
    data, scale, dtype = cast_samples((130, 300))["dequantize"]
    view = data.t().contiguous().t()
    assert library.dequantize(view.to("meta"), scale.to("meta"), dtype).is_contiguous()
    assert library.dequantize(view, scale, dtype).is_contiguous()


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.seen.append(func)
        return func(*args, **kwargs or {})


@every_op
def test_a_dispatch_mode_sees_the_op_and_nothing_inside(name: str) -> None:
    args = samples((130, 300))[name]
    with Recorder() as recorder:
        public(name)(*args)
    assert recorder.seen == [getattr(OPS, name).default]


@every_op
def test_a_compiled_graph_holds_the_op(name: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    args, same = samples((130, 300))[name], samples((130, 300))[name]
    torch._dynamo.reset()
    compiled = torch.compile(public(name), backend=backend, fullgraph=True)
    got = compiled(*args)
    for x, y in zip(outputs(got), outputs(public(name)(*same)), strict=True):
        assert_same(x, y)
    (graph,) = graphs
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert getattr(OPS, name).default in called


def test_one_graph_serves_all_sizes() -> None:
    """Of activations whose scales need padding; a multiple of 4 rows makes another graph."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def product(x: Tensor, w: Tensor) -> Tensor:
        a, b = library.quantize_rowwise(x, False), library.quantize_square(w, False)
        return library.gemm(*a, *b)

    w = torch.randn(129, 300)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (130, 7, 257):
            x = torch.randn(m, 300)
            a, b = library.quantize_rowwise(x, False), library.quantize_square(w, False)
            assert_same(product(x, w), library.gemm(*a, *b))


@pytest.mark.parametrize(("m", "n", "k"), [(130, 129, 300), (0, 3, 5), (2, 3, 0)])
def test_flops_of_a_gemm_are_counted(m: int, n: int, k: int) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = operand(m, k, 1, rng), operand(n, k, 1, rng)
    with FlopCounterMode(display=False) as counter:
        library.gemm(*a, *b)
        library.gemm_add_(torch.zeros(m, n), *a, *b)
    assert counter.get_total_flops() == 2 * 2 * m * n * k


def test_gemm_add_returns_its_output() -> None:
    (out, *operands) = gemm_samples((130, 300))["gemm_add_"]
    assert library.gemm_add_(out, *operands) is out


def test_gemm_defaults_to_bf16_without_bias() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = operand(130, 300, 1, rng), operand(129, 300, 128, rng)
    assert_same(library.gemm(*a, *b), reference.gemm(*a, *b, None, torch.bfloat16))


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0), (3, 5)])
def test_an_empty_contraction_gives_the_bias(m: int, n: int) -> None:
    a = torch.empty(m, 0, dtype=E4M3), torch.empty(m, 0)
    b = torch.empty(n, 0, dtype=E4M3), torch.empty(-(-n // 128), 0)
    bias = torch.arange(float(n))
    assert torch.equal(library.gemm(*a, *b, bias=bias).float(), bias.expand(m, n))
    out = torch.ones(m, n)
    assert torch.equal(library.gemm_add_(out, *a, *b), torch.ones(m, n))


def test_autocast_leaves_the_products_alone() -> None:
    args = gemm_samples((130, 300))["gemm"]
    want = public("gemm")(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(public("gemm")(*args), want)
