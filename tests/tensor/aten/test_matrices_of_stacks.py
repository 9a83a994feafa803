"""Matrices of a stack of weights have the bytes of the stack; indices that would copy raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.support.models import SQUARE, complaint, linear, plain, randn
from tests.support.steps import assert_bits, step


def stack(*shape: int, recipe: Recipe | None = None, frozen: bool = False) -> Any:
    values = randn(*shape, dtype=torch.float32)
    if frozen:
        return nn.Parameter(BlockwiseFP8Tensor.from_values(values, SQUARE), requires_grad=False)
    return nn.Parameter(BlockwiseFP8Weight(values, recipe or Recipe()))


MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "w[1]": lambda w: w[1],
    "w[-2]": lambda w: w[-2],
    "of an index in a tensor": lambda w: w[torch.tensor(1)],
    "select": lambda w: w.select(0, 1),
    "unbind": lambda w: w.unbind()[1],
    "iterated": lambda w: list(w)[1],
    "of the transpose": lambda w: w.transpose(-2, -1)[1].t(),
    "of a slice": lambda w: w[1:3][0],
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_of_a_stack_is_an_fp8_weight_with_the_bytes_of_the_stack(
    name: str, frozen: bool
) -> None:
    w = stack(3, 200, 130, frozen=frozen)
    one = MATRICES[name](w)
    assert isinstance(one, BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight)
    assert one.shape == (200, 130)
    whole, part = (t if frozen else t._quantized() for t in (w, one))
    for a, b in zip(whole.rowwise()[:2], part.rowwise()[:2], strict=True):
        assert torch.equal(a[1].view(torch.uint8), b.view(torch.uint8))
    if frozen:
        assert one.rowwise_data.data_ptr() == w.rowwise_data[1].data_ptr()
        return
    x, values = randn(5, 130, dtype=torch.float32), plain(w).requires_grad_()
    wanted = step(lambda x: functional.linear(x, values[1]), x, of=[values])
    assert_bits(step(lambda x: F.linear(x, MATRICES[name](w)), x, of=[w]), wanted)


@pytest.mark.parametrize("policy", ["backward", False])
def test_a_loop_over_experts_casts_each_once_in_a_forward(policy: Any) -> None:
    w = stack(3, 128, 192, recipe=Recipe(cache_weight=policy))
    x, optimizer = randn(5, 192, dtype=torch.float32, grad=True), torch.optim.SGD([w], lr=0.1)
    for n in range(1, 4):
        for _ in range(2):  # microbatches
            y = [F.linear(x, w[e]) for e in (2, 0)]
            assert torch.equal(y[0], functional.linear(x, plain(w)[2]))
            assert w.cache.nbytes() == (0 if policy is False else 2 * (128 * 192 + 2 * 4))
            sum(one.sum() for one in y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert w.cache.nbytes() == 0
        casts = 2 * n if policy else 4 * n
        assert [w.cache.part(e).casts for e in range(3)] == [casts, 0, casts]
    assert w.cache.casts == 0


@pytest.mark.parametrize("policy", ["backward", False])
def test_a_write_to_a_stack_is_seen_by_its_matrices(policy: Any) -> None:
    w = stack(3, 128, 192, recipe=Recipe(cache_weight=policy))
    x = randn(5, 192, dtype=torch.float32, grad=True)
    writes: list[Callable[[], Any]] = [
        lambda: w.mul_(2),
        lambda: w[1].mul_(2),
        lambda: w.mT[1].mul_(2),
        lambda: w.unbind()[1].mul_(2),
        lambda: w.detach().view(-1).mul_(2),
        lambda: setattr(w, "data", plain(w) * 2),
        lambda: w.master.view(-1).data.mul_(2),
    ]
    waiting = []
    for write in writes:
        waiting.append(F.linear(x, w[1]))
        with torch.no_grad():
            write()
        for one in (w[1], w.unbind()[1]):
            assert torch.equal(F.linear(x, one), functional.linear(x, plain(w)[1]))
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        waiting[0].sum().backward()


IDS = torch.tensor([2, 0, 2])


COPYING: dict[str, Callable[[Tensor], Tensor]] = {
    "w[ids]": lambda w: w[IDS],
    "w[[0, 1]]": lambda w: w[[0, 1]],
    "w[mask]": lambda w: w[torch.tensor([True, False, True])],
    "rows": lambda w: w[IDS, IDS],
    "index_select": lambda w: w.index_select(0, IDS),
    "gather": lambda w: w.gather(0, torch.zeros(1, 128, 192, dtype=torch.long)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", COPYING)
def test_an_index_that_copies_matrices_of_a_stack_is_refused(
    name: str, frozen: bool, mode: Callable[[], Any]
) -> None:
    w = stack(3, 128, 192, frozen=frozen)
    with mode():
        for weight in (w, w.detach()):
            with pytest.raises(NotImplementedError, match="experts_implementation='grouped_mm'"):
                COPYING[name](weight)
        values = w.dequantize() if frozen else w.high_precision()
        assert torch.equal(
            COPYING[name](values), COPYING[name](w.dequantize() if frozen else plain(w))
        )


def test_the_text_of_such_an_index() -> None:
    assert_expected_inline(
        complaint(NotImplementedError, lambda: stack(3, 4, 5)[IDS]),
        """\
aten.index.Tensor of a stack of FP8 weights [3, 4, 5] would copy matrices in high
precision, and matmuls with them would run in it: multiply the whole stack by groups
(torch.nn.functional.grouped_mm; in transformers
experts_implementation='grouped_mm'), or one matrix at a time (w[i]); to read
values, index .high_precision()""",
    )


def test_parts_of_a_stack_along_other_dimensions_and_none_beyond_it() -> None:
    w, matrix = stack(3, 200, 130), linear(4, 5, frozen=True).weight
    for part in (lambda w: w[:, 5], lambda w: w.select(2, -1), lambda w: w.unbind(1)[5]):
        assert torch.equal(part(w), part(plain(w)))
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"index {index} of a stack of 3 matrices"):
            w.select(0, index)
    for x, ids in ((matrix, IDS), (randn(3, 4, 5), matrix)):
        with pytest.raises(
            NotImplementedError, match=r"aten\.index\.Tensor is not implemented for"
        ):
            x[ids]


def test_single_values_of_a_stack_can_be_picked() -> None:
    w = stack(3, 4, 5)
    assert torch.equal(w[w > 0.5], plain(w)[plain(w) > 0.5])
    assert torch.equal(w[IDS, IDS, IDS], plain(w)[IDS, IDS, IDS])
