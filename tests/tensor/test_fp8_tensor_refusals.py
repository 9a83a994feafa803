"""Ops that FP8 bytes cannot serve: refused, never run on a silent dequantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor
from tests.support.models import complaint, randn

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
