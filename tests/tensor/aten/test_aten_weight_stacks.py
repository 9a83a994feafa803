"""Stacks of weights: their matrices, slices, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.support.models import SQUARE, complaint, plain, randn


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
    whole, part = w if frozen else w._quantized(), one if frozen else one._quantized()
    for a, b in zip(whole.rowwise()[:2], part.rowwise()[:2], strict=True):
        assert torch.equal(a[1].view(torch.uint8), b.view(torch.uint8))
    x = randn(5, 130, dtype=torch.float32)
    if frozen:
        assert one.rowwise_data.data_ptr() == w.rowwise_data[1].data_ptr()
        return
    values = plain(w).requires_grad_()
    y, wanted = F.linear(x, one), functional.linear(x, values[1])
    assert torch.equal(y, wanted)
    y.square().sum().backward(), wanted.square().sum().backward()
    assert torch.equal(w.grad, values.grad)


@pytest.mark.parametrize("policy", ["backward", "step", False])
def test_a_loop_over_experts_casts_each_once_in_a_forward(policy: Any) -> None:
    w = stack(3, 128, 192, recipe=Recipe(cache_weight=policy))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(3):
        for _ in range(2):  # microbatches
            x = randn(5, 192, dtype=torch.float32, grad=True)
            y = [F.linear(x, w[e]) for e in (2, 0)]
            assert torch.equal(y[0], functional.linear(x, plain(w)[2]))
            held = 0 if policy is False else 2 * (128 * 192 + 2 * 4)
            assert w.cache.nbytes() == held
            sum(one.sum() for one in y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert w.cache.nbytes() == 0 or policy == "step"
        each = {"backward": 2, "step": 1, False: 4}[policy]
        casts = [w.cache.part(e).casts for e in range(3)]
        if policy == "step":  # the first step learns how many backwards follow
            assert casts == [casts[2], 0, step + 2]
        else:
            assert casts == [each * (step + 1), 0, each * (step + 1)]
    assert w.cache.casts == 0


@pytest.mark.parametrize("policy", ["backward", "step", False])
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
    ]
    if policy != "step":  # which does not promise to see it
        writes.append(lambda: w.master.view(-1).data.mul_(2))
    waiting = []
    for write in writes:
        waiting.append(F.linear(x, w[1]))
        with torch.no_grad():
            write()
        wanted = functional.linear(x, plain(w)[1])
        assert torch.equal(F.linear(x, w[1]), wanted)
        assert torch.equal(F.linear(x, w.unbind()[1]), wanted)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        waiting[0].sum().backward()


def test_parts_share_what_the_stack_is_told() -> None:
    w = stack(3, 128, 192, recipe=Recipe(cache_weight="step"))
    x = randn(5, 192, dtype=torch.float32, grad=True)
    F.linear(x, w[1]), F.linear(x, w[1])
    assert w.cache.part(1).casts == 1
    w.master.view(-1).data.mul_(2)
    w.invalidate()
    assert torch.equal(F.linear(x, w[1]), functional.linear(x, plain(w)[1]))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_slice_of_a_stack_is_a_stack(frozen: bool) -> None:
    w = stack(4, 200, 130, frozen=frozen)
    part = w[1:3]
    assert isinstance(part, BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight)
    assert part.shape == (2, 200, 130)
    values = w.dequantize() if frozen else w._quantized().dequantize()
    assert torch.equal((part if frozen else part._quantized()).dequantize(), values[1:3])


IDS = torch.tensor([2, 0, 2])
PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "w[ids]": lambda w: w[IDS],
    "w[[0, 1]]": lambda w: w[[0, 1]],
    "w[mask]": lambda w: w[torch.tensor([True, False, True])],
    "rows": lambda w: w[IDS, IDS],
    "index_select": lambda w: w.index_select(0, IDS),
    "gather": lambda w: w.gather(0, torch.zeros(1, 128, 192, dtype=torch.long)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", PICKS)
def test_an_index_that_copies_matrices_of_a_stack_is_refused(
    name: str, frozen: bool, mode: Callable[[], Any]
) -> None:
    w = stack(3, 128, 192, frozen=frozen)
    with mode():
        for weight in (w, w.detach()):
            with pytest.raises(NotImplementedError, match="experts_implementation='grouped_mm'"):
                PICKS[name](weight)
        values = w.dequantize() if frozen else w.high_precision()
        assert torch.equal(PICKS[name](values), PICKS[name](w.dequantize() if frozen else plain(w)))


def test_the_text_of_such_an_index() -> None:
    assert_expected_inline(
        complaint(NotImplementedError, lambda: stack(3, 4, 5)[IDS]),
        """\
aten.index.Tensor of a stack of FP8 weights [3, 4, 5] would copy matrices in high
precision, and products with them would run in it: multiply the whole stack by
groups (torch.nn.functional.grouped_mm; in transformers
experts_implementation='grouped_mm'), or one matrix at a time (w[i]); to read
values, index .high_precision()""",
    )


def test_single_values_of_a_stack_can_be_picked() -> None:
    w = stack(3, 4, 5)
    assert torch.equal(w[w > 0.5], plain(w)[plain(w) > 0.5])
    assert torch.equal(w[IDS, IDS, IDS], plain(w)[IDS, IDS, IDS])
