"""``weight.to(dtype)``: products read the weight's FP8 form, all other ops the values then."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from blocktensor.tensor.fp8_tensor import Generation
from tests.support.compiling import afresh, assert_as_eager, graphs, instantiates, reads_grad
from tests.support.models import SQUARE, complaint, in_a_layer, linear, plain, randn

__all__ = ["afresh"]

N, K = 128, 192
X = randn(5, K)

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda w: w.bfloat16(),
    "to": lambda w: w.to(torch.bfloat16),
    "to device and dtype": lambda w: w.to(w.device, torch.bfloat16, non_blocking=True),
    "type_as": lambda w: w.type_as(X),
    "before a transpose": lambda w: w.bfloat16().transpose(-2, -1).mT,
    "after a transpose": lambda w: w.transpose(-2, -1).bfloat16().mT,
    "of a view": lambda w: w[:].bfloat16().view_as(w),
}


def fp32_weight(recipe: Recipe | None = None) -> Any:
    return linear(N, K, dtype=torch.float32, recipe=recipe or Recipe()).weight


def from_fp32(w: Any, x: Tensor) -> Tensor:
    """``x wᵀ`` in x's dtype, with the weight cast from its own values."""
    with torch.autocast("cpu", x.dtype):
        return functional.linear(x, plain(w) if isinstance(w, BlockwiseFP8Weight) else w)


def from_copy(w: Tensor, x: Tensor) -> Tensor:
    """``x wᵀ`` with the weight cast from a copy in x's dtype."""
    return functional.linear(x, w.to(x.dtype))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("policy", ["backward", False])
def test_a_product_reads_the_cast_of_the_weight_and_copies_nothing(how: str, policy: Any) -> None:
    w = fp32_weight(Recipe(cache_weight=policy))
    assert not torch.equal(from_fp32(w, X), from_copy(plain(w), X))  # they differ at all
    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    values = plain(w).requires_grad_()
    for step in range(1, 3):
        late = COPIES[how](w)
        assert (type(late), late.dtype, late.shape) == (BlockwiseFP8Weight, torch.bfloat16, w.shape)
        y, wanted = F.linear(ours, late), from_fp32(values, theirs)
        assert torch.equal(y, wanted)
        y.square().sum().backward(), wanted.square().sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
        assert "master" not in late.__dict__
        assert late._late._copy is None
        # a product under autocast returns the gradient of an fp32 weight in fp32
        torch.testing.assert_close(w.grad, values.grad, rtol=2**-7, atol=0)
        assert w.grad.dtype == torch.float32
        casts = step * (2 if policy is False else 1)
        assert (w.cache.casts, w.cache.nbytes()) == (casts, 0)
        w.grad = values.grad = None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_the_bits_of_training(mode: Callable[[], Any]) -> None:
    w = fp32_weight()
    trained = F.linear(X, w.bfloat16())
    with mode():
        for each in (w, fp32_weight()):  # in inference mode no write is counted
            for product in (lambda w: F.linear(X, w.bfloat16()), lambda w: X @ w.bfloat16().t()):
                assert torch.equal(in_a_layer(product)(each), trained)
            apart = F.linear(X, each.bfloat16())  # of a copy, which may be kept
            assert torch.equal(apart, from_copy(plain(each), X))


def test_a_wider_copy_has_the_same_bytes() -> None:
    w = linear(N, K).weight
    wide, x = w.float(), X.float()
    assert wide.dtype == torch.float32
    assert torch.equal(F.linear(x, wide), functional.linear(x, plain(w).float()))
    assert wide._late._copy is None


def test_other_ops_see_the_values_and_products_stay_as_they_were() -> None:
    w = fp32_weight()
    late, values = w.bfloat16(), plain(w).bfloat16()
    before = F.linear(X, late)
    torch.inference_mode()(late.sum)()  # an evaluation reads them first
    for read in (torch.sum, lambda w: w * 1, lambda w: w.t().clone(), lambda w: w.sum(1)):
        assert torch.equal(read(late), read(values))
    assert torch.equal(F.linear(X, late), before)
    (late.sum() + late.high_precision().square().sum()).backward()
    assert torch.equal(w.grad, (1 + 2 * values).float())


HANDED_OUT: dict[str, Callable[[Any], Tensor]] = {
    "detach": lambda c: c.detach(),
    "data": lambda c: c.data,
    "master": lambda c: c.master,
    "high precision": lambda c: c.high_precision().detach(),
    "flat": lambda c: c.view(-1).detach(),
    "numpy": lambda c: torch.from_dlpack(c.detach()),
    "itself": lambda c: c,
    "transposed": lambda c: c.t().detach(),
    "a row": lambda c: c[3].detach(),
    "rows": lambda c: c[:64].detach(),
    "diagonal": lambda c: c.diagonal().detach(),
}


@pytest.mark.parametrize("how", HANDED_OUT)
def test_a_write_to_a_copy_reaches_its_products_and_not_the_weight(how: str) -> None:
    w = fp32_weight()
    before, late, values = plain(w), w.bfloat16(), plain(w).bfloat16()
    F.linear(X, late)
    with torch.no_grad():
        alias, of_values = HANDED_OUT[how](late), HANDED_OUT[how](BlockwiseFP8Weight(values))
        assert torch.equal(alias.clone(), of_values.clone())
        alias.add_(1), of_values.add_(1)
    assert torch.equal(late.detach().clone(), values)
    assert torch.equal(F.linear(X, late), functional.linear(X, values))
    assert torch.equal(w, before)
    assert torch.equal(F.linear(X, w.bfloat16()), from_fp32(w, X))


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(randn(N, K, seed=9)),
    "of a view": lambda w: w.t().add_(1),
    "init": nn.init.ones_,
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "new data": lambda w: setattr(w, "data", randn(N, K, seed=9, dtype=torch.float32)),
    "SGD": lambda w: torch.optim.SGD([w], lr=1.0).step(),
    "AdamW": lambda w: torch.optim.AdamW([w], lr=1.0, fused=True).step(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grads", [True, False])
def test_a_copy_keeps_the_values_of_its_moment(write: str, grads: bool) -> None:
    """An fp32 copy that an optimizer or an average keeps, say."""
    w, values = fp32_weight(), plain(fp32_weight()).bfloat16()
    w.grad = torch.ones(N, K)
    with torch.set_grad_enabled(grads):
        late, transposed = w.bfloat16(), w.t().bfloat16()
    with torch.no_grad():
        WRITES[write](w)
    assert not torch.equal(plain(w).bfloat16(), values)
    assert torch.equal(late.detach(), values)
    assert torch.equal(transposed.detach(), values.t())
    product = F.linear(X, late)
    assert torch.equal(product, functional.linear(X, values)) or write == "new data"


UNCOUNTED: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w.data[3].add_(1),
    "rows": lambda w: w.data.chunk(2)[0].add_(1),
    "flat": lambda w: w.data.view(-1).add_(1),
    "foreach": lambda w: torch._foreach_add_([w.data.view(-1)], 1.0),
    "a diagonal": lambda w: w.data.diagonal().add_(1),
    "numpy": lambda w: w.detach().numpy().__iadd__(1),
    "the master": lambda w: w.high_precision().detach().add_(1),
}
"""Writes, of which torch counts few as writes to the weight: below autograd views have counters."""


@pytest.mark.parametrize("write", UNCOUNTED)
@pytest.mark.parametrize("detached", [False, True])
def test_a_snapshot_keeps_its_values_after_any_write(write: str, detached: bool) -> None:
    """A copy that no graph records: the weights of an old policy, of an average."""
    w, values = fp32_weight(), plain(fp32_weight()).bfloat16()
    if detached:
        copied = w.detach().bfloat16()
    else:
        with torch.no_grad():
            copied = w.bfloat16()
    UNCOUNTED[write](w)
    assert not torch.equal(plain(w).bfloat16(), values)
    assert torch.equal(F.linear(X, copied), functional.linear(X, values))
    assert torch.equal(copied, values)


def test_values_that_changed_unseen_before_they_were_read_raise() -> None:
    module = linear(N, K, dtype=torch.float32)
    late = module.weight.bfloat16()
    module.state_dict()["weight"].add_(1)
    for read in (lambda: F.linear(X, late), late.detach):
        assert "was changed (it is at version" in complaint(RuntimeError, read)
    assert_expected_inline(
        complaint(RuntimeError, late.sum),
        """\
the FP8 weight [128, 192] was changed (it is at version 3) after .to(torch.bfloat16)
at version 2 and before the values of that were read: call
.to(torch.bfloat16).detach(), which copies them at once""",
    )


def test_a_module_in_another_dtype_holds_weights_of_its_own() -> None:
    module = linear(N, K, dtype=torch.float32)
    weight, values = module.weight, plain(module.weight).bfloat16()
    module.to(torch.bfloat16)
    assert module.weight is weight
    assert type(weight.cache).__name__ == "FP8Cache"
    assert torch.equal(weight.__dict__["master"], values)
    assert torch.equal(module(X), functional.linear(X, values))


def test_new_data_of_a_copy_are_its_own() -> None:
    w, new = fp32_weight(), randn(N, K, seed=9)
    with torch.no_grad():
        late = w.bfloat16()
        late.data = new
        for view in (late, late.t().t(), late[:]):
            assert torch.equal(F.linear(X, view), functional.linear(X, new))
    assert torch.equal(F.linear(X, w.bfloat16()), from_fp32(w, X))


def test_copies_of_a_copy_have_values_of_their_own() -> None:
    w = fp32_weight()
    values, file = plain(w).bfloat16(), io.BytesIO()
    with torch.no_grad():
        late = w.bfloat16()
    torch.save(late, file)
    file.seek(0)
    wide, loaded = late.float(), torch.load(file, weights_only=True)
    assert torch.equal(loaded, values)
    for made in (copy.deepcopy(late), late.clone(), loaded, nn.Parameter(w.bfloat16())):
        assert isinstance(made, BlockwiseFP8Weight)
        with torch.no_grad():
            late.mul_(1)
            made.mul_(2)
        assert torch.equal(made, 2 * values)
        assert torch.equal(F.linear(X, made), functional.linear(X, 2 * values))
        assert torch.equal(late.detach(), values)
    assert torch.equal(wide, values.float())
    assert type(late.double()) is Tensor
    wide = late.detach().float()
    with torch.no_grad():
        late.add_(1)
    assert torch.equal(wide.detach(), values.float())


def test_a_wider_copy_of_a_copy_has_its_rounded_values() -> None:
    w, x = fp32_weight(), X.float()
    wide, values = w.bfloat16().float(), plain(w).bfloat16().float()
    assert torch.equal(wide, values)
    assert torch.equal(F.linear(x, wide), functional.linear(x, values))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_on_another_device_is_there(frozen: bool) -> None:
    w = linear(N, K, dtype=torch.float32, frozen=frozen).weight
    made = w.to("meta", torch.bfloat16)
    assert made.is_meta and w.to("meta").is_meta
    assert made.dtype == torch.bfloat16


def test_what_is_not_a_copy_in_one_block_is_copied_at_once() -> None:
    w = linear(N, 2 * K, dtype=torch.float32).weight
    late = w[:, :K].bfloat16()
    assert "master" in late.__dict__
    assert torch.equal(F.linear(X, late), functional.linear(X, plain(w)[:, :K].bfloat16()))


PARTS: dict[str, Callable[[Any], Any]] = {
    "index": lambda w: w[1],
    "unbind": lambda w: w.unbind(0)[1],
    "of a transpose": lambda w: w.mT[-2].mT,
    "of a slice": lambda w: w[1:][0],
}


@pytest.mark.parametrize("write", [None, "whole", "part", "weight"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_copy_are_copies_of_the_parts(write: str | None, name: str) -> None:
    part, of_copy = PARTS[name], write in ("whole", "part")
    if of_copy and name == "unbind":
        return  # torch refuses writes to what it returns
    w: Any = nn.Parameter(BlockwiseFP8Weight(randn(3, N, K, dtype=torch.float32)))
    late, values = w.bfloat16(), plain(w).bfloat16()
    got, wanted = part(late), from_fp32(plain(w)[1], X)
    assert isinstance(got, BlockwiseFP8Weight)
    assert got._late._copy is None
    if write is not None:
        with torch.no_grad():
            {"whole": late, "part": got, "weight": w}[write].add_(1)
        values[1] += of_copy
        wanted = functional.linear(X, values[1])
    for view in (got, part(late)):
        assert torch.equal(F.linear(X, view), wanted)
    for view in (got, late[1]):
        assert torch.equal(view.detach(), values[1])
    part(w.bfloat16()).sum().backward()
    assert torch.equal(w.grad, torch.zeros(3, N, K).index_fill_(0, torch.tensor(1), 1))


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_copies_writes_reads_and_products(seed: int) -> None:
    choice = random.Random(seed)
    w = fp32_weight()
    held: list[tuple[Any, Tensor, Tensor]] = []  # copies, values then in fp32 and in bf16
    for _ in range(25):
        what = choice.choice(["copy", "write", "write to copy", "read", "product", "product"])
        with torch.no_grad():
            if what == "copy" or not held:
                with torch.set_grad_enabled(choice.random() < 0.5):
                    view = choice.choice([lambda w: w.bfloat16(), lambda w: w.t().bfloat16().t()])
                    held.append((view(w), plain(w), plain(w).bfloat16()))
                continue
            late, exact, values = choice.choice(held)
            if what == "write":
                w.mul_(1 + choice.random())
            elif what == "write to copy":
                late.detach().mul_(2)
                values.mul_(2)
                exact.fill_(torch.nan)
            elif what == "read":
                assert torch.equal(late * 1, values)
            else:
                allowed = [from_copy(values, X), from_fp32(exact, X)]
                assert any(torch.equal(F.linear(X, late), one) for one in allowed)
                now = in_a_layer(lambda: F.linear(X, w.bfloat16()))()
                assert torch.equal(now, from_fp32(w, X))


@instantiates
@pytest.mark.parametrize("how", ["bfloat16", "before a transpose", "after a transpose"])
def test_compiled_products_have_eager_s_bits(how: str) -> None:
    w = fp32_weight()
    assert_as_eager(lambda x: F.linear(x, COPIES[how](w)), X, of=[w])
    assert graphs() == 1


@instantiates
@reads_grad
@pytest.mark.parametrize("how", ["bfloat16", "before a transpose", "after a transpose", "a part"])
def test_a_copy_that_a_graph_returns_is_what_products_cast(how: str) -> None:
    """It has been written by then; no longer is it known whether its memory is handed out."""
    w, copied = fp32_weight(), COPIES.get(how, lambda w: w.bfloat16()[:100])
    values = plain(w).requires_grad_()

    def broken(x: Tensor) -> Tensor:
        late = copied(w)
        torch._dynamo.graph_break()
        return F.linear(x, late)

    y, wanted = torch.compile(broken, backend="aot_eager")(X), functional.linear(X, copied(values))
    assert torch.equal(y, wanted)
    y.sum().backward(), wanted.sum().backward()
    assert torch.equal(w.grad, values.grad)


COPIES_OF_PARTS: dict[str, Callable[[Any], Any]] = {
    "a matrix": lambda w: w[1].bfloat16(),
    "rows": lambda w: w[1][64:].bfloat16(),
    "a transposed matrix": lambda w: w[1].t().bfloat16().t(),
    "of matrices": lambda w: w[1:].bfloat16()[1],
    "of a copy": lambda w: w.bfloat16()[2],
}


@instantiates
@reads_grad
@pytest.mark.parametrize("name", COPIES_OF_PARTS)
def test_a_copy_of_a_part_begins_where_its_memory_does(name: str) -> None:
    """Compilers, which get it as an input, compare both; so does ``as_strided``."""
    copied = COPIES_OF_PARTS[name]
    w: Any = nn.Parameter(BlockwiseFP8Weight(randn(3, N, K, dtype=torch.float32)))
    values = plain(w).requires_grad_()
    late = copied(w)
    assert late._late._copy is None
    place = late.shape, late.stride(), late.storage_offset()
    made = copied(w).detach().master
    assert place == (made.shape, made.stride(), made.storage_offset())
    assert torch.equal(copied(w).as_strided(*place), copied(values))
    y = torch.compile(F.linear, backend="aot_eager")(X, late)
    wanted = functional.linear(X, copied(values))
    assert torch.equal(y, wanted)
    y.sum().backward(), wanted.sum().backward()
    assert torch.equal(w.grad, values.grad)


def test_a_frozen_weight_shares_its_bytes_in_a_layer() -> None:
    frozen = BlockwiseFP8Tensor.from_values(randn(3, N, K, dtype=torch.float32), SQUARE)
    frozen.generation = Generation()  # as of a weight that FSDP2 has gathered
    narrow = in_a_layer(lambda: frozen.bfloat16())()
    assert narrow.generation is frozen.generation
    narrow = narrow.transpose(-2, -1)
    assert (narrow.dtype, narrow.shape) == (torch.bfloat16, (3, K, N))
    assert narrow.columnwise_data.data_ptr() == frozen.rowwise_data.data_ptr()
    assert torch.equal(narrow.dequantize(torch.float32), frozen.dequantize().mT)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_that_a_compiled_function_returns_keeps_its_values(frozen: bool, grad: bool) -> None:
    w: Any = linear(256, K, dtype=torch.float32, frozen=frozen).weight
    zeros = BlockwiseFP8Weight(torch.zeros(256, K), w.recipe)
    run = torch.compile(lambda w: w.bfloat16().mT, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        kept = run(w)
    values = kept.detach().dequantize()
    with torch.no_grad():
        w.copy_(zeros._quantized() if frozen else zeros)
    assert not w.detach().dequantize().any()
    assert torch.equal(kept.detach().dequantize(), values)
