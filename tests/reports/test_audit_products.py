"""Shapes and FLOPs of every op that is a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import BlockwiseFP8Weight, functional
from blocktensor.reports.audit import audit, audit_step
from blocktensor.reports.audit_products import Product, product_of
from tests.support.models import randn

aten = torch.ops.aten
A, B, V = torch.ones(3, 5), torch.ones(5, 7), torch.ones(5)
BATCH, BATCHED = torch.ones(2, 3, 5), torch.ones(2, 5, 7)


class Found(TorchDispatchMode):
    """The products among the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        product = product_of(func, args, kwargs or {}, out)
        self.products += [product] if product else []
        return out


def found(run: Callable[[], Any]) -> list[tuple[int, ...]]:
    """Batch, M, N, K of each product of ``run()``, whose FLOPs are 2 for each of them."""
    with Found() as mode:
        run()
    for p in mode.products:
        assert p.is_attention or p.flops == 2 * p.batch * p.m * p.n * p.k
    return [p[:4] for p in mode.products]


MATRICES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mm": (lambda: torch.mm(A, B), (1, 3, 7, 5)),
    "mm out": (lambda: torch.mm(A, B, out=torch.empty(3, 7)), (1, 3, 7, 5)),
    "addmm": (lambda: torch.addmm(torch.ones(7), A, B), (1, 3, 7, 5)),
    "addmm_": (lambda: torch.ones(3, 7).addmm_(A, B), (1, 3, 7, 5)),
    "bmm": (lambda: torch.bmm(BATCH, BATCHED), (2, 3, 7, 5)),
    "baddbmm": (lambda: torch.baddbmm(torch.ones(2, 3, 7), BATCH, BATCHED), (2, 3, 7, 5)),
    "addbmm": (lambda: torch.addbmm(torch.ones(3, 7), BATCH, BATCHED), (2, 3, 7, 5)),
    "mv": (lambda: torch.mv(A, V), (1, 3, 1, 5)),
    "addmv": (lambda: torch.addmv(torch.ones(3), A, V), (1, 3, 1, 5)),
    "dot": (lambda: torch.dot(V, V), (1, 1, 1, 5)),
    "empty": (lambda: torch.mm(torch.ones(0, 5), B), (1, 0, 7, 5)),
    "conv": (lambda: F.conv1d(torch.ones(2, 4, 9), torch.ones(8, 4, 3)), (1, 14, 8, 12)),
    "fp8": (lambda: functional.linear(randn(3, 5), randn(7, 5)), (1, 3, 7, 5)),
}


@pytest.mark.parametrize("op", MATRICES)
def test_matrices(op: str) -> None:
    run, shape = MATRICES[op]
    assert found(run) == [shape]


def test_grouped_products() -> None:
    """Rows, contractions or columns are cut into groups; their lengths do not matter."""
    offs = torch.tensor([8, 32], dtype=torch.int32)
    x, w = torch.ones(32, 16, dtype=torch.bfloat16), torch.ones(2, 16, 8, dtype=torch.bfloat16)
    g = torch.ones(32, 8, dtype=torch.bfloat16)
    assert found(lambda: F.grouped_mm(x, w, offs=offs)) == [(1, 32, 8, 16)]
    assert found(lambda: F.grouped_mm(x.t(), g, offs=offs)) == [(1, 16, 8, 32)]
    assert found(lambda: F.grouped_mm(w.mT, x.t(), offs=offs)) == [(1, 8, 32, 16)]


class Experts(nn.Module):
    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(BlockwiseFP8Weight(randn(3, n, k)))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.mT, offs=offs)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Experts(256, 128), Experts(128, 256)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x, offs)), offs)


def test_grouped_products_in_fp8() -> None:
    """The contraction of wgrad is that of tokens, not of the blocks that they are cast in."""
    model, offs = MoE(), torch.tensor([3, 3, 50], dtype=torch.int32)
    assert_expected_inline(
        str(audit(model, randn(50, 128, grad=True), offs)),
        """\
module  product  M x N x K       precision  FLOPs
------  -------  --------------  ---------  -----
up      fprop    50 x 256 x 128  FP8        16.7%
up      dgrad    50 x 128 x 256  FP8        16.7%
up      wgrad    256 x 128 x 50  FP8        16.7%
down    fprop    50 x 128 x 256  FP8        16.7%
down    dgrad    50 x 256 x 128  FP8        16.7%
down    wgrad    128 x 256 x 50  FP8        16.7%
FP8: 100.0% of FLOPs""",
    )
    for weight in model.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    report = audit(model, randn(50, 128, grad=True), offs)
    found = [(e.m, e.n, e.k) for e in report.entries if e.kind == "wgrad"]
    assert found == [(128, 256, 50), (256, 128, 50)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype) -> None:
    q = torch.ones(2, 4, 6, 16, dtype=dtype, requires_grad=True)
    k, v = (torch.ones(2, 4, 10, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    y: list[Tensor] = []
    with Found() as mode:
        y.append(F.scaled_dot_product_attention(q, k, v))
        y[0].sum().backward()
    forward, backward = mode.products
    assert forward[:4] == backward[:4] == (8, 6, 10, 16)
    assert forward.is_attention and backward.is_attention
    assert forward.flops == 2 * 2 * 8 * 6 * 10 * 16  # scores, and scores by values
    assert backward.flops == 5 * forward.flops / 2  # two products for each of them, scores again


def test_layouts_of_attention() -> None:
    q, k = torch.ones(2, 6, 4, 16), torch.ones(2, 10, 4, 16)  # heads after lengths
    flash = aten._efficient_attention_forward.default
    product = product_of(flash, (q, k, k, None, None, None, None, None, 0.0, 0), {}, (q,))
    assert product is not None
    assert product[:4] == (8, 6, 10, 16)
    assert product.flops == 2 * 2 * 8 * 6 * 10 * 16


def test_sequences_of_several_lengths() -> None:
    """[total, heads, size]: attention stays within a sequence."""
    q, offsets = torch.ones(6, 4, 16), torch.tensor([0, 2, 6])
    flash = aten._flash_attention_forward.default
    product = product_of(flash, (q, q, q, offsets, offsets, 4, 4, 0.0, True, False), {}, (q,))
    assert product is not None
    assert product.flops == 2 * 2 * 4 * (2 * 2 + 4 * 4) * 16


def test_an_op_that_has_registered_its_flops() -> None:
    a = torch.ones(16, 32, dtype=torch.float8_e4m3fn)
    args = (a, a.t(), torch.ones(()), torch.ones(()))
    product = product_of(aten._scaled_mm.default, args, {}, torch.ones(16, 16))
    assert product is not None
    assert (product[:4], product.precision) == ((1, 16, 16, 32), "float8_e4m3fn")


@pytest.mark.parametrize("op", ["relu", "sum", "t"])
def test_other_ops(op: str) -> None:
    assert found(lambda: getattr(A, op)()) == []


def test_flops_of_a_network_are_those_of_torchs_counter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5))
    x = torch.ones(2, 3, 8, 8)
    report = audit_step(model, lambda: model(x).square().sum().backward())
    with FlopCounterMode(display=False) as counter:
        model(x).square().sum().backward()
    assert report.flops == counter.get_total_flops()
    assert_expected_inline(
        str(report),
        """\
module  product   M x N x K    precision  FLOPs
------  --------  -----------  ---------  -----
0       forward   18 x 8 x 27  fp32       39.1%
3       forward   2 x 5 x 72   fp32       7.2%
3       backward  2 x 72 x 5   fp32       7.2%
3       backward  5 x 72 x 2   fp32       7.2%
0       backward  18 x 8 x 27  fp32       39.1%
FP8: 0.0% of FLOPs; fp32: * 100.0%""",
    )


def test_ops_that_hide_their_products_are_named() -> None:
    model = nn.Sequential(nn.LSTM(8, 8))
    x = torch.ones(3, 2, 8)
    report = audit_step(model, lambda: torch.cond(x.sum() > 0, lambda x: x @ x.mT, torch.bmm, (x,)))
    assert report.notes == ("may run products that are not shown: cond in (model)",)
    with torch.no_grad():
        report = audit_step(model, lambda: (model(x), torch.mm(A, B)))
    assert [e.module for e in report.entries] == ["(model)"]
    assert_expected_inline(
        "\n".join(report.notes),
        """may run products that are not shown: aten.mkldnn_rnn_layer.default in 0""",
    )
