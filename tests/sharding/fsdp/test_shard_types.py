"""FP8Shard and FrozenShard by themselves: which results of ops are shards, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blocktensor import Recipe
from blocktensor.sharding.fsdp.shards import FP8Shard, FrozenShard
from tests.support.models import linear, plain

new_zeros = torch.ops.aten.new_zeros


@pytest.mark.parametrize(
    "zeros",
    [
        lambda w: new_zeros(w, (3, 192), dtype=torch.int64),
        lambda w: new_zeros(w, (3, 192), dtype=torch.float32),
        lambda w: new_zeros(w, (3, 192), device="meta"),
        lambda w: new_zeros(w, (192,)),
        lambda w: new_zeros(w, (1, 3, 192)),
    ],
)
def test_only_zeros_that_a_shard_could_be_made_of_are_shards(zeros: Callable[..., Tensor]) -> None:
    weight, frozen = linear(128, 192).weight, linear(128, 192, frozen=True).weight
    assert type(new_zeros(weight, (3, 192))) is FP8Shard
    assert type(new_zeros(frozen, (3, 192))) is FrozenShard
    wanted, got = zeros(plain(weight)), zeros(weight)
    assert type(got) is Tensor
    assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
    with pytest.raises(NotImplementedError, match="new_zeros"):
        zeros(frozen)
    for w in (weight, frozen):  # called by anyone but FSDP
        made = w.new_zeros(3, 192)
        assert (type(made), made.dtype, made.any().item()) == (Tensor, w.dtype, False)


def test_which_tensors_are_shards_with_the_same_rows() -> None:
    master = torch.ones(3, 192)
    rows = FP8Shard(master, Recipe())
    for same in (rows.detach(), torch.ops.aten.alias(rows)):
        assert type(same) is FP8Shard
        assert same.master is master
    copies = (rows.clone(), torch.empty_like(rows), rows.new_zeros(3, 192), rows.bfloat16())
    for other in (*copies, rows[:2], rows.cfloat()):  # of model.to(torch.complex64)
        assert type(other) is FP8Shard
        assert other.master is not master
    stack = FP8Shard(torch.ones(2, 3, 192), Recipe())
    for part in (rows.t(), *rows.split(2), rows.view(1, 3, 192), stack.transpose(1, 2), stack[0]):
        assert type(part) is FP8Shard  # with which products raise
    assert type(rows.view(-1)) is type(rows[0]) is type(rows.int()) is Tensor
    assert type(rows.new_zeros(1, 3, 192)) is type(stack.new_zeros(3, 192)) is Tensor


aten = torch.ops.aten


PRODUCTS: dict[str, Callable[[FP8Shard, FP8Shard, Tensor], Tensor]] = {
    "linear": lambda rows, stack, x: nn.functional.linear(x, rows),
    "mm": lambda rows, stack, x: torch.mm(x, rows),
    "mm from the left": lambda rows, stack, x: rows.mm(x),
    "matmul": lambda rows, stack, x: torch.matmul(x, rows),
    "@": lambda rows, stack, x: x @ rows,
    "@ from the left": lambda rows, stack, x: rows @ x,
    "addmm": lambda rows, stack, x: torch.addmm(x, x, rows),
    "x.addmm": lambda rows, stack, x: x.addmm(rows, x),
    "aten.mm": lambda rows, stack, x: aten.mm(x, rows),
    "aten.addmm": lambda rows, stack, x: aten.addmm(x, rows, x),
    "aten.bmm": lambda rows, stack, x: aten.bmm(x.expand(2, 4, 4), stack),
    "aten.baddbmm": lambda rows, stack, x: aten.baddbmm(x, stack, x.expand(2, 4, 4)),
    "aten.mv": lambda rows, stack, x: aten.mv(rows, x[0]),
    "aten.linear": lambda rows, stack, x: aten.linear(x, rows),
    "aten._grouped_mm": lambda rows, stack, x: aten._grouped_mm(
        x, stack, torch.tensor([2, 4], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("grad", [False, True])
def test_products_with_rows_are_refused(product: str, grad: bool) -> None:
    """By functions of torch, and by ops, which other code may call at once."""
    rows, stack = (
        FP8Shard(torch.ones(*shape, dtype=torch.bfloat16), Recipe()).requires_grad_(grad)
        for shape in ((4, 4), (2, 4, 4))
    )
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    for views in ((rows, stack), (rows.t(), stack.transpose(1, 2)), (rows.view(4, 4), stack)):
        with pytest.raises(NotImplementedError, match="shard of an FP8 weight: a matmul needs"):
            PRODUCTS[product](*views, x)
