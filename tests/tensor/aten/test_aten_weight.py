"""Views and copies of a BlockwiseFP8Weight, its matrices, and what is computed from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.support.models import POWER_OF_TWO, RECIPES, SQUARE, complaint, linear, plain, randn
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


EVERY = torch.arange(256)
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda w: F.embedding(EVERY, w),
    "index": lambda w: w[EVERY],
    "index_select": lambda w: w.index_select(0, EVERY),
    "gather": lambda w: w.gather(0, EVERY.expand(256, 256)),
    "take": lambda w: w.take(EVERY.expand(256, 256)),
    **{
        name: lambda w, name=name: getattr(torch, name)(w)
        for name in ("zeros_like", "ones_like", "rand_like", "randn_like")
    },
    "full_like": lambda w: torch.full_like(w, 2),
    "new_empty": lambda w: w.new_empty(256, 256),
    "new_zeros": lambda w: w.new_zeros(256, 256),
    "new_ones": lambda w: w.new_ones(256, 256),
    "new_full": lambda w: w.new_full((256, 256), 2),
    "new_empty_strided": lambda w: w.new_empty_strided((256, 256), (1, 256)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_activations_as_large_as_the_weight_are_plain(name: str) -> None:
    """A matmul of two of them (attention, say) is one of activations."""
    w, run = linear(256, 256).weight, PLAIN[name]
    torch.manual_seed(0)
    made = run(w)
    torch.manual_seed(0)
    wanted = run(plain(w))
    assert type(made) is Tensor
    assert (made.dtype, made.stride()) == (wanted.dtype, wanted.stride())
    assert torch.equal(made, wanted) or "empty" in name


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


COMPUTED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w + 1,
    lambda w: 1 - w,
    lambda w: w * (w > 0),
    lambda w: w.tril(),
    lambda w: torch.where(w > 0, w, 0.0),
    F.normalize,
    lambda w: w.flip(0),
    lambda w: torch.sort(w, 1).values,
    lambda w: torch.cat([w[:100], w[100:]]),
    lambda w: torch.stack([w, w])[1],
]


@pytest.mark.parametrize("compute", COMPUTED)
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
    w, other = (linear(256, 256, dtype=torch.float32, recipe=recipe).weight for recipe in RECIPES)
    ids, zeros, double = torch.arange(256), torch.zeros_like, linear(64, 64).double().weight
    made = [
        w.sum(0),
        w.square().mean(),
        w > 0,
        w.detach() * 2,
        torch.cat([w, torch.ones(1, 256)]),
        zeros(w),
        zeros(w.detach()),
        w.new_zeros(w.shape),
        w.new_ones(w.shape),
        F.embedding(ids, w),
        w[ids],
        w[ids > -1],
        torch.cat([double, double]),
        torch.stack([w[None], w[None]]),
        *torch.histogram(plain(w).requires_grad_(), 4, weight=w),
    ]
    with torch.no_grad():
        made += [w * 2, w.detach().add(1), torch.cat([w, other]), torch.stack([w[0], w[1]])]
        assert type(torch.cat([w, w.t()])) is BlockwiseFP8Weight
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=0.1)
    w.square().sum().backward()
    optimizer.step()
    assert {type(x) for x in (*made, w.grad, optimizer.state[w]["momentum_buffer"])} == {Tensor}
    assert linear(128, 256).weight.new_zeros(2).dtype == torch.bfloat16


def test_high_precision_passes_the_gradient_on() -> None:
    w, x = linear(256, 256, dtype=torch.float32).weight, randn(3, 256, dtype=torch.float32)
    leaf, values = plain(w).requires_grad_(), w.high_precision()
    assert type(values) is Tensor
    assert values.data_ptr() == w.master.data_ptr()
    F.linear(x, values).sum().backward(), F.linear(x, leaf).sum().backward()
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


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: torch.linalg.svdvals(w).sum(),
        lambda w: torch.linalg.matrix_norm(w, "nuc"),
        lambda w: torch.linalg.inv(w[:, :128]).sum(),
        lambda w: torch.linalg.qr(w)[1].square().sum(),
    ],
)
def test_derivatives_of_decompositions_are_in_high_precision(penalty: Any) -> None:
    w = linear(128, 192, dtype=torch.float32).weight
    leaf = plain(w).requires_grad_()
    penalty(w).backward(), penalty(leaf).backward()
    torch.testing.assert_close(w.grad, leaf.grad)


# Stacks of weights


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
