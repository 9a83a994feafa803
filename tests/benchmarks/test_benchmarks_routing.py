"""Rows that go to experts and come back: as by indexing, forward and gradients."""

from __future__ import annotations

import torch

from benchmarks.routing import combined, inverse, on_host, permuted, rows_of_tokens
from blocktensor import BlockwiseFP8Tensor, Recipe
from tests.support.numeric import assert_same

TOKENS, TOP_K, DIM = 9, 3, 256


def test_rows_and_their_way_back() -> None:
    order = torch.randperm(TOKENS * TOP_K)
    back = inverse(order)
    assert torch.equal(back[order], torch.arange(TOKENS * TOP_K))
    found, wanted = (torch.randn(TOKENS, DIM).requires_grad_() for _ in "ab")
    with torch.no_grad():
        found.copy_(wanted)
    grad = torch.randn(TOKENS * TOP_K, DIM)

    rows = rows_of_tokens(found, order, back, TOP_K, None)
    assert torch.equal(rows, wanted[order // TOP_K])
    permuted(rows, back, order).backward(grad)
    wanted[order // TOP_K][back].backward(grad)
    torch.testing.assert_close(found.grad, wanted.grad)
    assert torch.equal(permuted(rows, back, order), found.repeat_interleave(TOP_K, 0))


def test_rows_that_are_cast_before_they_are_picked() -> None:
    recipe, order = Recipe(scale="power_of_two"), torch.randperm(TOKENS * TOP_K)
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16).requires_grad_()
    rows = rows_of_tokens(x, order, inverse(order), TOP_K, recipe)
    assert isinstance(rows, BlockwiseFP8Tensor)
    wanted = BlockwiseFP8Tensor.from_values(x[order // TOP_K].detach(), recipe=recipe)
    assert_same(rows.dequantize(), wanted.dequantize())
    picked = permuted(rows, inverse(order), order)
    picked.backward(torch.ones(TOKENS * TOP_K, DIM, dtype=torch.bfloat16))
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, TOP_K))


def test_the_weighted_sum_of_a_tokens_rows() -> None:
    order = torch.randperm(TOKENS * TOP_K)
    operands = torch.randn(TOKENS * TOP_K, DIM), torch.rand(TOKENS, TOP_K)
    found = [x.clone().requires_grad_() for x in operands]
    wanted = [x.double().requires_grad_() for x in operands]
    grad = torch.randn(TOKENS, DIM)
    got = combined(*found, order, inverse(order))
    y, weights = wanted
    reference = (y[inverse(order)].view(TOKENS, TOP_K, DIM) * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(got, reference.float())
    got.backward(grad)
    reference.backward(grad.double())
    for a, b in zip(found, wanted, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad.float())


def test_numbers_on_the_host() -> None:
    assert on_host(torch.tensor([[1, 2], [3, 4]]))() == [[1, 2], [3, 4]]
