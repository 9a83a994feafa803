"""Views and copies of a BlockwiseFP8Weight, and what is computed from one: weights or plain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, functional
from tests.support.models import POWER_OF_TWO, linear, plain, randn

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
    if name in PARTS:
        assert got.recipe == w.recipe
        assert got.main_grad is None
        cast = BlockwiseFP8Tensor.from_values(wanted, (128, 128)).dequantize()
        assert torch.equal(got._quantized().dequantize(), cast)
    assert got.data_ptr() == wanted.data_ptr()
    assert torch.equal(got, wanted)
    got.sum().backward()
    leaf = plain(w).requires_grad_()
    view(leaf).sum().backward()
    assert torch.equal(w.grad, leaf.grad)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:],
        lambda w: w.view(256, 256),
        lambda w: w.reshape(-1, 256),
        lambda w: w.view_as(w),
        lambda w: w.expand(256, 256),
        lambda w: w.narrow(0, 0, 256),
        lambda w: w.as_strided((256, 256), (256, 1)),
        lambda w: w.chunk(1)[0],
        lambda w: w[None].squeeze(0)[:],
    ],
)
def test_a_view_of_all_of_a_weight_is_the_weight(view: Callable[[Tensor], Tensor]) -> None:
    w = linear(256, 256).weight
    got = view(w)
    assert type(got) is BlockwiseFP8Weight
    assert got.master.data_ptr() == w.master.data_ptr()
    assert torch.equal(F.linear(randn(3, 256), got), F.linear(randn(3, 256), w))
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
    w = linear(256, 256, dtype=torch.float32).weight
    part = PARTS[name](w)
    x, alone = randn(5, part.shape[1], dtype=torch.float32, grad=True), plain(PARTS[name](w.master))
    alone.requires_grad_()
    other = x.detach().clone().requires_grad_()
    y, wanted = F.linear(x, part), functional.linear(other, alone)
    assert torch.equal(y, wanted)
    y.square().sum().backward(), wanted.square().sum().backward()
    assert torch.equal(x.grad, other.grad)
    leaf = plain(w).requires_grad_()
    PARTS[name](leaf).backward(alone.grad)
    assert torch.equal(w.grad, leaf.grad)


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w + 1,
        lambda w: 1 - w,
        lambda w: w * (w > 0),
        lambda w: torch.where(w > 0, w, 0.0),
        lambda w: w.tril(),
        lambda w: F.normalize(w),
        lambda w: w.flip(0),
        lambda w: torch.sort(w, 1).values,
        lambda w: torch.cat([w[:100], w[100:]]),
        lambda w: torch.stack([w, w])[1],
    ],
)
def test_what_autograd_computes_of_a_weight_is_a_weight(compute: Callable[..., Tensor]) -> None:
    w, x = linear(256, 256, dtype=torch.float32).weight, randn(3, 256, dtype=torch.float32)
    leaf = plain(w).requires_grad_()
    ours, theirs = compute(w), compute(leaf)
    assert type(ours) is BlockwiseFP8Weight
    assert ours.recipe == w.recipe
    y, wanted = F.linear(x, ours), functional.linear(x, theirs)
    assert torch.equal(y, wanted)
    y.square().sum().backward(), wanted.square().sum().backward()
    torch.testing.assert_close(w.grad, leaf.grad)


def test_what_is_computed_without_gradients_or_in_another_shape_is_plain() -> None:
    w = linear(256, 256, dtype=torch.float32).weight
    assert type(w.sum(0)) is type(w.square().mean()) is type(w > 0) is Tensor
    assert (
        type(torch.zeros_like(w))
        is type(w.new_zeros(w.shape))
        is type(w.new_ones(w.shape))
        is Tensor
    )
    ids = torch.arange(256)
    assert type(F.embedding(ids, w)) is type(w[ids]) is type(w[ids > -1]) is Tensor
    assert type(torch.zeros_like(w.detach())) is type(w.detach() * 2) is Tensor
    with torch.no_grad():
        assert type(w * 2) is type(w.detach().add(1)) is Tensor
    assert type(torch.cat([w, torch.ones(1, 256)])) is Tensor
    other = linear(256, 256, dtype=torch.float32, recipe=POWER_OF_TWO).weight
    with torch.no_grad():
        assert type(torch.cat([w, w.t()])) is BlockwiseFP8Weight
        assert type(torch.cat([w, other])) is type(torch.stack([w[0], w[1]])) is Tensor
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=0.1)
    w.square().sum().backward()
    optimizer.step()
    assert type(w.grad) is type(optimizer.state[w]["momentum_buffer"]) is Tensor


def test_high_precision_passes_the_gradient_on() -> None:
    w, x = linear(256, 256, dtype=torch.float32).weight, randn(3, 256, dtype=torch.float32)
    values = w.high_precision()
    assert type(values) is Tensor
    assert values.data_ptr() == w.master.data_ptr()
    F.linear(x, values).sum().backward()
    leaf = plain(w).requires_grad_()
    F.linear(x, leaf).sum().backward()
    assert torch.equal(w.grad, leaf.grad)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_of_a_checkpoint_are_no_values(dtype: torch.dtype, frozen: bool) -> None:
    module = linear(256, 256, frozen=frozen)
    before, state = module.weight.dequantize(), {"weight": randn(256, 256).to(dtype)}
    message = r"without the scales of a checkpoint in FP8: load that with blocktensor\.load_fp8"
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state)
    with pytest.raises(TypeError, match=rf"values, pass \.to\({torch.bfloat16}\)$"):
        module.weight.detach().copy_(state["weight"])
    assert torch.equal(module.weight.dequantize(), before)


def test_copies_and_casts_of_a_weight_are_weights() -> None:
    w = linear(128, 192, dtype=torch.float32, recipe=POWER_OF_TWO).weight
    x = randn(5, 192, dtype=torch.float32)
    for copied in (w.clone(), w.detach().clone(), w.bfloat16(), torch.empty_like(w), w.t().clone()):
        assert type(copied) is BlockwiseFP8Weight
        assert copied.recipe == POWER_OF_TWO
        assert "cache" not in vars(copied) or copied.cache is not w.cache
    assert torch.equal(x @ w.t().clone(), F.linear(x, w))
    assert type(w.double()) is type(w.detach() + 1) is Tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t_(),
        lambda w: w.transpose_(0, 1),
        lambda w: w.unsqueeze_(0),
        lambda w: w.squeeze_(),
        lambda w: w.as_strided_((2, 3), (1, 2)),
        lambda w: w.set_(torch.ones(3, 4, dtype=w.dtype)),
    ],
)
def test_a_new_layout_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    w = linear(128, 192).weight
    before = w.master.clone()
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"layout of an FP8 weight"):
        change(w)
    assert w.shape == w.master.shape == (128, 192)
    assert torch.equal(w.master, before)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: torch.linalg.svdvals(w).sum(),
        lambda w: torch.linalg.matrix_norm(w, "nuc"),
        lambda w: torch.linalg.inv(w[:, :128]).sum(),
        lambda w: torch.linalg.qr(w)[1].square().sum(),
    ],
)
def test_derivatives_of_decompositions_are_in_high_precision(
    penalty: Callable[[Tensor], Tensor],
) -> None:
    w = linear(128, 192, dtype=torch.float32).weight
    leaf = plain(w).requires_grad_()
    penalty(w).backward(), penalty(leaf).backward()
    torch.testing.assert_close(w.grad, leaf.grad)
