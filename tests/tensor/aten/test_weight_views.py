"""Views of a BlockwiseFP8Weight share its master, and are weights where they are matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, functional
from tests.support.compiling import fresh
from tests.support.models import SQUARE, complaint, linear, plain, randn
from tests.support.steps import assert_bits, step

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w[:128],
    "rows off the grid": lambda w: w[5:77],
    "every third row": lambda w: w[::3],
    "none": lambda w: w[4:4],
    "columns": lambda w: w.chunk(2, 1)[1],
    "split": lambda w: w.split([100, 156])[1],
    "unsqueezed": lambda w: w[None],
    "expanded": lambda w: w.expand(2, 256, 256),
    "heads": lambda w: w.view(2, 128, 256),
    "swapped heads": lambda w: w.view(2, 128, 256).transpose(0, 1),
    "of the transpose": lambda w: w.t()[3:100],
    "unfolded": lambda w: w.unfold(0, 16, 16),
    "of other strides": lambda w: w.as_strided((256, 256), (1, 256)),
}


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda w: w[3],
    "flat": lambda w: w.view(-1),
    "flattened": lambda w: torch.flatten(w),
    "diagonal": lambda w: w.diagonal(),
    "four dimensions": lambda w: w.view(2, 2, 64, 256),
    "of a flat view": lambda w: w.view(-1).view(256, 256),
}


@pytest.mark.parametrize("name", [*PARTS, *OTHERS])
def test_views_of_a_weight_are_views_of_its_master(name: str) -> None:
    """Weights if they are matrices or stacks of them, with blocks that begin where they do."""
    w, view = linear(256, 256).weight, (PARTS | OTHERS)[name]
    got, wanted = view(w), view(w.master)
    assert type(got) is (BlockwiseFP8Weight if name in PARTS else Tensor)
    assert got.requires_grad
    assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
    assert got.data_ptr() == wanted.data_ptr()
    assert torch.equal(got, wanted)
    if name in PARTS:
        assert got.recipe == w.recipe
        cast = BlockwiseFP8Tensor.from_values(wanted, SQUARE).dequantize()
        assert torch.equal(got._quantized().dequantize(), cast)
    leaf = plain(w).requires_grad_()
    got.sum().backward(), view(leaf).sum().backward()
    assert torch.equal(w.grad, leaf.grad)


WHOLES: list[Callable[[Tensor], Tensor]] = [
    lambda w: w[:],
    lambda w: w.view(256, 256),
    lambda w: w.reshape(-1, 256),
    lambda w: w.view_as(w),
    lambda w: w.expand(256, 256),
    lambda w: w.narrow(0, 0, 256),
    lambda w: w.as_strided((256, 256), (256, 1)),
    lambda w: w.chunk(1)[0],
    lambda w: w[None].squeeze(0)[:],
]


@pytest.mark.parametrize("view", WHOLES)
def test_a_view_of_all_of_a_weight_is_the_weight(view: Callable[[Tensor], Tensor]) -> None:
    w, x = linear(256, 256).weight, randn(3, 256)
    got = view(w)
    assert type(got) is BlockwiseFP8Weight
    assert got.master.data_ptr() == w.master.data_ptr()
    assert torch.equal(F.linear(x, got), F.linear(x, w))
    with torch.no_grad():
        got.mul_(2)
    assert torch.equal(w.master, got.master)


COMPOSITE: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda w: w.to(torch.float32),
    "type_as": lambda w: w.type_as(torch.ones(1)),
    "mT": lambda w: w.mT,
    "T": lambda w: w.T,
    "chunk": lambda w: w.chunk(2)[1],
    "narrow": lambda w: w.narrow(0, 128, 128),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "movedim": lambda w: w.movedim(0, 1),
    "tensor_split": lambda w: w.tensor_split(2)[1],
    "view_as": lambda w: w.view_as(w),
}


@pytest.mark.parametrize("name", COMPOSITE)
@pytest.mark.parametrize("frozen", [False, True])
def test_ops_that_inference_mode_does_not_take_apart(name: str, frozen: bool) -> None:
    """They would return plain tensors, and products with those run in high precision."""
    w = linear(256, 256, frozen=frozen).weight
    with torch.no_grad():
        wanted = COMPOSITE[name](w)
    with torch.inference_mode():
        got = COMPOSITE[name](w)
        assert type(got) is type(wanted) is type(w.detach())
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        x = randn(3, got.shape[1], dtype=got.dtype)
        assert torch.equal(F.linear(x, got), F.linear(x, wanted))


@pytest.mark.parametrize("name", ["rows", "rows off the grid", "columns", "of the transpose"])
def test_a_product_with_a_part_is_that_of_the_part_alone(name: str) -> None:
    w, cut = linear(256, 256, dtype=torch.float32).weight, PARTS[name]
    leaf, alone = plain(w).requires_grad_(), plain(cut(w.master)).requires_grad_()
    x = randn(5, alone.shape[1], dtype=torch.float32)
    y, dx, dw = step(lambda x: F.linear(x, cut(w)), x, of=[w])
    wanted_y, wanted_dx, grad = step(lambda x: functional.linear(x, alone), x, of=[alone])
    cut(leaf).backward(grad)
    assert_bits([y, dx, dw], [wanted_y, wanted_dx, leaf.grad])


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t_(),
        lambda w: w.transpose_(0, 1),
        lambda w: w.unsqueeze_(0),
        lambda w: w.squeeze_(),
        lambda w: w.as_strided_((2, 3), (1, 2)),
        lambda w: w.data.resize_(192, 128),
        lambda w: w.data.resize_as_(torch.ones(3, 4)),
        lambda w: torch.randn(3, 4, dtype=w.dtype, out=w.data),
        lambda w: w.set_(torch.ones(3, 4, dtype=w.dtype)),
        lambda w: w.set_(torch.ones(192, 128, dtype=w.dtype).t()),
        lambda w: w.set_(torch.ones(128, 384, dtype=w.dtype)[:, ::2]),
        lambda w: w.set_(),
        lambda w: w.set_(torch.ones(128, 192, dtype=w.dtype).untyped_storage()),
    ],
)
def test_a_new_layout_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    w = linear(128, 192).weight
    before = plain(w)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"layout of an FP8 weight"):
        change(w)
    assert w.shape == w.master.shape == (128, 192)
    assert torch.equal(w.master, before)


FACTORIES: dict[str, Callable[..., Tensor]] = {
    "ones": lambda w: torch.ones(w.shape, out=w),
    "randn": lambda w: torch.randn(w.shape, out=w),
    "bernoulli": lambda w: torch.bernoulli(torch.full(w.shape, 0.5), out=w),
    "arange": lambda w: torch.arange(w.numel(), out=w),
    "resize_": lambda w: w.resize_(w.shape).mul_(2),
    "resize_as_": lambda w: w.resize_as_(torch.ones(w.shape)).mul_(2),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_values_are_made_in_a_weight_of_their_shape(name: str) -> None:
    """With ``out=``, which torch resizes first."""
    w, x = linear(128, 192, dtype=torch.float32).weight, randn(5, 192, dtype=torch.float32)
    values = plain(w)
    for each in (w.data, values):
        torch.manual_seed(0)
        assert FACTORIES[name](each) is each
    assert torch.equal(w.master, values)
    assert torch.equal(F.linear(x, w), functional.linear(x, values))


def test_results_in_a_weight_in_a_compiled_graph() -> None:
    def add(w: Tensor) -> Tensor:
        with torch.no_grad():
            torch.add(values, w, out=w.data)
        return w.data.sum()

    w, values = linear(128, 192).weight, randn(128, 192)
    wanted = plain(w) + values
    with fresh():
        total = torch.compile(add, backend="aot_eager", fullgraph=True)(w)
    assert torch.equal(w.master, wanted)
    assert torch.equal(total, wanted.sum())


INTO: dict[str, Callable[[Tensor], object]] = {
    "ones": lambda w: torch.ones(3, 4, dtype=w.dtype, out=w),
    "arange": lambda w: torch.arange(3, out=w),
    "add": lambda w: torch.add(w[:64], 1, out=w),
    "sum": lambda w: torch.sum(w, 1, out=w),
    "sort": lambda w: torch.sort(w[:3], out=(w, torch.empty(0, dtype=torch.long))),
}


@pytest.mark.parametrize("name", INTO)
def test_results_of_another_shape_change_nothing(name: str) -> None:
    """Torch would resize the master, and the weight would keep its shape."""
    w = linear(128, 192).weight.detach()
    before = plain(w)
    message = complaint(ValueError, lambda: INTO[name](w))
    assert "is an FP8 weight [128, 192]: expected" in message
    assert torch.equal(w.master, before)
