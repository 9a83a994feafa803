"""What torch ops do on the two FP8 types: exactly FP8, or a loud refusal; never in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor
from tests.models import SQUARE, Trace, both_kinds, complaint, composed, linear, plain, randn

# What runs


def traced(run: Callable[[], Any]) -> str:
    with Trace() as trace:
        run()
    return "\n".join(trace.ops)


def test_trace_of_a_forward_and_a_backward() -> None:
    module, x, grad = linear(256, 384), randn(5, 384, grad=True), randn(5, 256, seed=3)
    y: list[Tensor] = []
    assert_expected_inline(
        traced(lambda: y.append(module(x))),
        """\
blocktensor.quantize_square
blocktensor.quantize_both
blocktensor.gemm""",
    )
    assert_expected_inline(
        traced(lambda: y[0].backward(grad)),
        """\
blocktensor.quantize_both
blocktensor.transpose_square
blocktensor.gemm
blocktensor.gemm""",
    )


def test_trace_with_bias_and_batch() -> None:
    module, x = linear(256, 384, bias=True), randn(2, 5, 384, grad=True)
    grad, y = randn(2, 5, 256, seed=3), []
    assert_expected_inline(
        traced(lambda: y.append(module(x))),
        """\
blocktensor.quantize_square
blocktensor.quantize_both
blocktensor.gemm""",
    )
    assert_expected_inline(
        traced(lambda: y[0].backward(grad)),
        """\
aten.sum.dim_IntList
aten._to_copy
blocktensor.quantize_both
blocktensor.transpose_square
blocktensor.gemm
blocktensor.gemm""",
    )


def test_trace_of_a_second_microbatch_casts_no_weight() -> None:
    module, x = linear(256, 384), randn(5, 384, grad=True)
    module(x)
    assert_expected_inline(
        traced(lambda: module(x)),
        """\
blocktensor.quantize_both
blocktensor.gemm""",
    )


@pytest.mark.parametrize(
    ("mode", "frozen"),
    [
        (torch.enable_grad, True),
        (torch.no_grad, True),
        (torch.inference_mode, True),
        (torch.no_grad, False),
        (torch.inference_mode, False),
    ],
)
def test_trace_without_gradients_casts_x_rowwise_only(
    mode: Callable[[], Any], frozen: bool
) -> None:
    module, x = linear(256, 384, frozen=frozen), randn(5, 384)
    module(x)
    with mode():
        assert_expected_inline(
            traced(lambda: module(x)),
            """\
blocktensor.quantize_rowwise
blocktensor.gemm""",
        )


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "cast", "gemms"),
    [
        (True, True, "blocktensor.quantize_both", 2),
        (True, False, "blocktensor.quantize_rowwise", 1),
        (False, True, "blocktensor.quantize_columnwise", 1),
        (False, False, "blocktensor.quantize", 0),
    ],
)
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_runs_only_what_is_asked_for(
    x_grad: bool, w_grad: bool, cast: str, gemms: int, create_graph: bool
) -> None:
    module = linear(256, 384, bias=True)
    module.weight.requires_grad_(w_grad)
    y = module(randn(5, 384, grad=x_grad))
    inputs = [p for p in module.parameters() if p.requires_grad]
    with Trace() as trace:
        torch.autograd.grad(y, inputs, randn(5, 256, seed=3), create_graph=create_graph)
    assert trace.count("blocktensor.quantize") == trace.count(cast) == (gemms > 0)
    assert trace.count("blocktensor.gemm") == trace.count("mm") == gemms
    assert trace.count("transpose_square") == x_grad


def test_below_autograd_products_are_fp8_too() -> None:
    """Callers that arrive there (DTensor's local ops) with plain or FP8 operands."""
    x, values, bias = randn(5, 384), randn(256, 384, seed=1), randn(256, seed=4)
    wanted = composed(x, values, randn(5, 256), bias=bias)[0]
    bare = composed(x, values, randn(5, 256))[0]
    for w in both_kinds(values).values():
        with torch.no_grad():
            assert torch.equal(torch.ops.aten.mm(x, w.t()), bare)
            assert torch.equal(torch.ops.aten.addmm(bias, x, w.t()), wanted)
            assert torch.equal(torch.ops.aten.mm(w, x.t()).t(), bare)
            scaled = torch.ops.aten.addmm(bias, x, w.t(), alpha=2, beta=3)
            torch.testing.assert_close(scaled, 2 * bare + 3 * bias, rtol=0.02, atol=0.05)


# A weight is its master to every other op


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:128],
        lambda w: w[3],
        lambda w: w[None],
        lambda w: w.view(-1),
        lambda w: w.expand(2, 256, 256),
        lambda w: w.chunk(2, 1)[1],
        lambda w: w.diagonal(),
        lambda w: w.view(2, 128, 256).transpose(0, 1),
    ],
)
def test_other_views_of_a_weight_are_plain_views_of_its_master(
    view: Callable[[Tensor], Tensor],
) -> None:
    w = linear(256, 256).weight
    got = view(w)
    assert type(got) is Tensor
    assert got.requires_grad
    assert got.data_ptr() == view(w.master).data_ptr()
    assert torch.equal(got, view(w.master))
    got.sum().backward()
    leaf = plain(w).requires_grad_()
    view(leaf).sum().backward()
    assert torch.equal(w.grad, leaf.grad)


# Refused: any op that FP8 bytes cannot serve

X = randn(4, 256, dtype=torch.float32)
INDEX = torch.zeros(1, 256, dtype=torch.long)
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.sub.Tensor": lambda x: X - x,
    "aten.mul.Tensor": lambda x: x * x,
    "aten.neg.default": lambda x: -x,
    "aten.sum.default": lambda x: x.sum(),
    "aten.mean.default": lambda x: x.mean(),
    "aten.sin.default": lambda x: x.sin(),
    "aten.stack.default": lambda x: torch.stack([x, x]),
    "aten.index.Tensor": lambda x: x[[0, 2]],
    "aten.argmax.default": lambda x: x.argmax(),
    "aten._softmax.default": lambda x: x.softmax(-1),
    "aten.where.self": lambda x: torch.where(X > 0, x, X),
    "aten._local_scalar_dense.default": lambda x: BlockwiseFP8Tensor.quantize(X[:1, :1]).item(),
    "aten.eq.Tensor": lambda x: x == X,
    "aten.equal.default": lambda x: torch.equal(x, x),
    "aten.isnan.default": lambda x: x.isnan(),
    "aten.abs.default": lambda x: x.isfinite(),
    "aten.linalg_vector_norm.default": lambda x: x.norm(),
    "aten.gather.default": lambda x: x.gather(0, INDEX),
    "aten.flip.default": lambda x: x.flip(0),
    "aten.repeat.default": lambda x: x.repeat(2, 1),
    "aten.gelu.default": lambda x: F.gelu(x),
    "aten.embedding.default": lambda x: F.embedding(INDEX, x),
    "aten.native_layer_norm.default": lambda x: F.layer_norm(x, (256,)),
    "aten.as_strided.default": lambda x: x.as_strided((2, 2), (1, 1)),
    "aten.view.dtype": lambda x: x.view(torch.int32),
    "aten.zero_.default": lambda x: x.zero_(),
    "aten.fill_.Scalar": lambda x: x.fill_(1),
    "aten.add_.Tensor": lambda x: X.clone().add_(x),
    "aten.lerp_.Scalar": lambda x: X.clone().lerp_(x, 0.5),
    "aten.normal_.default": lambda x: x.normal_(),
    "aten._foreach_add.Scalar": lambda x: torch._foreach_add([x], 1),
    "aten.copy_.default": lambda x: X.clone().copy_(x),
}


@pytest.mark.parametrize("op", REFUSED)
def test_an_unsupported_op_names_itself_and_the_way_out(op: str) -> None:
    text = complaint(NotImplementedError, lambda: REFUSED[op](BlockwiseFP8Tensor.quantize(X)))
    assert text.startswith(op)
    assert ".dequantize()" in text


@pytest.mark.parametrize("block", [(1, 128), SQUARE])
def test_ops_between_fp8_and_plain_tensors_change_neither(block: tuple[int, int]) -> None:
    target, fp8 = X.clone(), BlockwiseFP8Tensor.quantize(X, block)
    before = fp8.dequantize()
    for run in (lambda: target.copy_(fp8), lambda: fp8.copy_(target + 1), lambda: fp8.mul_(2)):
        complaint(NotImplementedError, run)
    with pytest.raises(NotImplementedError):
        target[:] = fp8
    assert torch.equal(target, X)
    assert torch.equal(fp8.dequantize(), before)


@pytest.mark.parametrize("convert", [lambda x: x.tolist(), lambda x: x.numpy()])
def test_conversions_to_python_are_refused(convert: Callable[[Tensor], Any]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"numpy|tolist"):
        convert(BlockwiseFP8Tensor.quantize(X))


def test_the_text_of_a_refusal() -> None:
    text = complaint(NotImplementedError, lambda: BlockwiseFP8Tensor.quantize(X).sin())
    assert_expected_inline(
        text,
        """\
aten.sin.default is not implemented for BlockwiseFP8Tensor, which keeps its values
in FP8: call .dequantize() first to work on a plain tensor""",
    )


def test_the_text_of_a_refusal_to_write() -> None:
    text = complaint(NotImplementedError, lambda: BlockwiseFP8Tensor.quantize(X).add_(1))
    assert_expected_inline(
        text,
        """\
aten.add_.Tensor is not implemented for BlockwiseFP8Tensor, which keeps its values
in FP8: call .dequantize() first to work on a plain tensor; to write to a frozen
weight (merge an adapter into it, say), call blocktensor.unfreeze(model) first and
blocktensor.freeze(model) after""",
    )


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(-1),
        lambda x: x.view(2, 512),
        lambda x: x.flatten(),
        lambda x: x.t().view(256, 2, 2),
        lambda x: x.t().view(2, 128, 4),
        lambda x: BlockwiseFP8Tensor.quantize(x.dequantize(), SQUARE).view(2, 2, 256),
        lambda x: x.view(2, 2, 256).transpose(0, 1),
        lambda x: x.view(2, 2, 256).mT,
        lambda x: x.view(2, 2, 256).permute(2, 0, 1),
    ],
)
def test_reshapes_that_move_blocks_are_refused(run: Callable[[Tensor], Any]) -> None:
    assert ".dequantize()" in complaint(
        NotImplementedError, lambda: run(BlockwiseFP8Tensor.quantize(X))
    )
