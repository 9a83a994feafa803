"""Products that should have been FP8: those of an FP8 weight's master or dequantized values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, audit, convert, freeze, quantize
from tests.support.models import randn

X, ONES = randn(6, 32, dtype=torch.float32, grad=True), torch.ones(32, 32)


class Uses(nn.Module):
    """Adds ``lin``, in FP8, and what ``use`` makes of its master's memory."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(32, 32, bias=False)
        self.use = use
        convert(self, skip_small=False)

    @property
    def plain(self) -> Tensor:
        """The master as a plain leaf that requires a gradient: no rule of the weight sees it."""
        return self.lin.weight.master.detach().requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.use(self, x)


WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "master": (lambda m, x: F.linear(x, m.plain), "the master"),
    "transpose": (lambda m, x: x @ m.plain, "the master"),
    "view": (lambda m, x: (x @ m.plain[:16].t()).repeat(1, 2), "the master"),
    "copy": (lambda m, x: x @ m.plain.t().contiguous(), "aten.clone"),
    "batched": (lambda m, x: torch.bmm(x[None], m.plain[None])[0], "the master"),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_misread_a_weight(way: str) -> None:
    use, reads = WAYS[way]
    marked = audit(Uses(use), X).marked
    # the gradient of the weight does not read it, but belongs to the product that does
    assert [e.kind for e in marked] == ["forward", "backward", "backward"]
    assert {e.reason for e in marked} == {f"reads {reads} of lin.weight"}
    assert not any(e.attention for e in marked)


def test_casts_and_dequantized_values_of_a_weight_are_told() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (first, *_) = audit(Uses(lambda m, x: F.linear(x, m.plain)), X).marked
    assert (first.reason, first.precision) == ("reads aten._to_copy of lin.weight", "bf16")
    frozen = Uses(lambda m, x: F.linear(x, m.lin.weight.dequantize()))
    freeze(frozen)
    marked = [(e.kind, e.reason) for e in audit(frozen, X).marked]
    reason = "reads blocktensor.dequantize of lin.weight"
    assert marked == [("forward", reason), ("backward", reason)]
    other = BlockwiseFP8Weight(randn(32, 32, dtype=torch.float32))  # no parameter of the model
    model = Uses(lambda m, x: F.linear(x, other.t().t().master))
    assert {e.reason for e in audit(model, X).marked} == {"reads the master of an FP8 weight"}


NOT_MISREAD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "norm of a weight": lambda m, x: x * m.plain.norm(),
    "no column of it": lambda m, x: x[:, :0] @ m.plain[:, :0].t(),
    "dequantized activations": lambda m, x: quantize(x).view(6, 32).dequantize() @ ONES,
    "a sparse matrix": lambda m, x: x.detach().to_sparse() @ ONES,
    "row of it": lambda m, x: (x + m.plain[:1]) @ torch.ones(32, 32),
    "activations scaled by it": lambda m, x: (x * m.plain[:6]) * m.plain.sum(),
    "embedding": lambda m, x: F.embedding(torch.arange(32), m.plain)[:6] @ torch.ones(32, 32),
}


@pytest.mark.parametrize("way", NOT_MISREAD)
def test_other_uses_of_a_weight(way: str) -> None:
    assert audit(Uses(NOT_MISREAD[way]), X).marked == ()


def test_neighbours_in_one_storage_are_told_apart() -> None:
    model = Uses(lambda m, x: F.linear(x, m.head))
    flat = torch.randn(2 * 32 * 32)
    model.lin.weight.data = flat[: 32 * 32].view(32, 32)
    model.head = nn.Parameter(flat[32 * 32 :].view(32, 32))
    assert audit(model, X).marked == ()
    model.head = nn.Parameter(flat[31 * 32 : 63 * 32].view(32, 32))  # one row is the weight's
    assert len(audit(model, X).marked) == 3


def test_a_product_without_a_graph_takes_no_mark_away() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        y = F.linear(x, m.plain)
        with torch.no_grad():
            torch.mm(x, torch.ones(32, 32))
        return y

    kinds = [(e.kind, bool(e.reason)) for e in audit(Uses(use), X).entries if e.precision != "FP8"]
    assert kinds == [("forward", True), ("forward", False), ("backward", True), ("backward", True)]


def test_batched_products_of_a_parameter_are_no_attention() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(4, 16, 8))
            self.register_buffer("table", torch.randn(4, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.bmm(x, self.stack.clone())
            z = torch.bmm(y, self.table)
            return torch.bmm(z, y @ y.mT)

    report = audit(Experts(), torch.randn(4, 16, 16))
    assert "  4 x (16 x 8 x 16)  " in str(report)
    assert [(e.kind, e.batch, e.m, e.n, e.k, e.attention) for e in report.entries] == [
        ("forward", 4, 16, 8, 16, False),
        ("forward", 4, 16, 16, 8, False),
        ("forward", 4, 16, 16, 8, True),
        ("forward", 4, 16, 16, 16, True),
        *[("backward", 4, 16, 16, 16, True)] * 2,
        ("backward", 4, 8, 16, 16, True),
        ("backward", 4, 16, 8, 16, True),
        *[("backward", 4, 16, 8, 16, False)] * 2,
    ]
