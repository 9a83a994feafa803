"""The FP8 form of a trainable weight: cast in every forward, held for the backwards that wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from blocktensor.tensor import weight_cache
from tests.support.models import Trace, assert_same_bytes, complaint, linear, plain, randn

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)
FP8_BYTES = N * K + 4 * 2  # two blocks
policies = pytest.mark.parametrize("policy", ["backward", False])
MODIFIED = r"modified by an in-?place operation"


def fp32(policy: Any = "backward") -> Any:
    return linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=policy))


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def casts_and_bytes(weight: Any) -> tuple[int, int]:
    return weight.cache.casts, weight.cache.nbytes()


@pytest.mark.parametrize("waiting", [1, 3])
def test_every_forward_casts_and_those_that_wait_share_one_form(waiting: int) -> None:
    module = fp32()
    for step in range(1, 3):
        for y in [module(leaf()) for _ in range(waiting)]:
            assert casts_and_bytes(module.weight) == (step * waiting, FP8_BYTES)
            y.sum().backward()
        assert casts_and_bytes(module.weight) == (step * waiting, 0)


@pytest.mark.parametrize(
    ("is_transposed", "one_read"), [(False, True), (True, True), (False, False)]
)
def test_a_graph_holds_the_form_that_its_dgrad_reads(
    is_transposed: bool, one_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, of a large weight, that of fprop, so that a layer does not hold both."""
    monkeypatch.setattr(weight_cache, "ONE_READ_BYTES", N * K - (not one_read))
    weight = linear(N, K).weight
    x = randn(5, N if is_transposed else K, grad=True)
    with Trace() as trace:
        y = F.linear(x, weight.t() if is_transposed else weight)
    assert trace.count("quantize_with_transpose") == one_read
    held, columnwise = weight.cache.held(), one_read and not is_transposed
    assert [form is None for form in held] == [columnwise, not columnwise]
    wanted = reference.quantize_with_transpose(plain(weight), BLOCKS_128X128)
    assert_same_bytes(held[columnwise].data, wanted[columnwise].data)
    with Trace() as trace:
        y.sum().backward()
    assert trace.count("transpose") == (not one_read)
    assert casts_and_bytes(weight) == (1, 0)


def test_graphs_of_a_weight_and_of_its_transpose_share_the_form_of_the_latest() -> None:
    weight, inputs = linear(N, K).weight, [randn(5, K, grad=True), randn(7, N, seed=1, grad=True)]

    def run(i: int) -> Tensor:
        return F.linear(inputs[i], weight.t() if i else weight).sum()

    wanted = [torch.autograd.grad(run(i), inputs[i])[0] for i in (0, 1)]
    for ours, theirs in zip(weight.t().columnwise()[:2], weight.rowwise()[:2], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    for first in (0, 1):
        outputs = {i: run(i) for i in (first, 1 - first)}
        for i in (0, 1):
            assert torch.equal(torch.autograd.grad(outputs[i], inputs[i])[0], wanted[i])
        assert weight.cache.nbytes() == 0


@pytest.mark.parametrize("n", [128, 130])
def test_without_a_cache_backward_casts_the_form_that_it_reads(n: int) -> None:
    module = linear(n, K, recipe=Recipe(cache_weight=False))
    y = module(randn(5, K, grad=True)).sum()
    assert casts_and_bytes(module.weight) == (1, 0)
    with Trace() as trace:
        y.backward()
    casts = [op for op in trace.ops if "128x128" in op and "gemm" not in op]
    assert casts == ["blocktensor.quantize_transpose 128x128"]
    assert casts_and_bytes(module.weight) == (2, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.detach(), lambda w: w.t().t()])
def test_without_gradients_nothing_is_held(mode: Callable[[], Any], view: Any) -> None:
    module = fp32()
    with mode():
        F.linear(X, view(module.weight))
    assert casts_and_bytes(module.weight) == (1, 0)


def test_only_a_dgrad_that_may_come_holds_the_form() -> None:
    module = fp32()
    y = module(leaf())
    assert casts_and_bytes(module.weight) == (1, FP8_BYTES)
    del y
    for casts in range(2, 4):
        y = module(X)
        assert (*casts_and_bytes(module.weight), y.requires_grad) == (casts, 0, True)
        y.sum().backward()


@policies
def test_a_transposed_view_is_cast_once_a_use(policy: Any) -> None:
    weight = fp32(policy).weight
    y = randn(5, N, dtype=torch.float32) @ weight
    assert weight.cache.casts == 1
    y.sum().backward()  # wgrad alone, which does not read the weight
    assert weight.cache.casts == 1


@pytest.mark.parametrize("write", ["none", "state_dict", "half"])
def test_a_second_backward_of_a_retained_graph_reads_the_values_of_its_forward(write: str) -> None:
    module, x = fp32(), leaf()
    cache, y = module.weight.cache, module(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert cache.nbytes() == 0
    if write == "state_dict":
        module.state_dict()["weight"].add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED):
            torch.autograd.grad(y, x)
        return
    if write == "half":
        module.half()
    assert torch.equal(*first, *torch.autograd.grad(y, x))
    assert cache.casts == 2


READ_AND_WRITTEN: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "the weight": (lambda w: w, lambda w, read: w.view(-1).add_(1)),
    "rows, the master": (lambda w: w[:64], lambda w, read: w.master.add_(1)),
    "rows": (lambda w: w[:64], lambda w, read: read.detach().add_(1)),
    "rows of a copy, the weight": (lambda w: w.bfloat16()[:64], lambda w, read: w.add_(1)),
    "a matrix, the master": (lambda w: w[1], lambda w, read: w.master.add_(1)),
}


@policies
@pytest.mark.parametrize("name", READ_AND_WRITTEN)
def test_a_counted_write_between_forward_and_backward_raises(name: str, policy: Any) -> None:
    """By every route that counts: ``tests/end_to_end/test_staleness.py``."""
    part, write = READ_AND_WRITTEN[name]
    shape = (2, N, K) if "matrix" in name else (N, K)
    values = randn(*shape, dtype=torch.float32)
    weight: Any = nn.Parameter(BlockwiseFP8Weight(values, Recipe(cache_weight=policy)))
    read = part(weight)
    y = F.linear(leaf().to(read.dtype), read).sum()
    with torch.no_grad():
        write(weight, read)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.backward()
    del y
    assert weight.cache.nbytes() == 0


def test_the_text_of_such_a_write_and_that_without_dgrad_it_does_not_raise() -> None:
    """As in plain PyTorch, whose wgrad does not read the weight either."""
    module = fp32()
    y, without_dgrad = module(leaf()).sum(), module(X).sum()
    module.state_dict()["weight"].add_(1)
    without_dgrad.backward()
    assert module.weight.grad is not None
    assert_expected_inline(
        complaint(RuntimeError, y.backward),
        """\
the FP8 weight [128, 192] was modified by an in-place operation between a forward
and its backward, whose data gradient needs it: it is at version 3; expected version
2. Run backward before the weight changes, or forward again after""",
    )


@policies
def test_dgrad_reads_the_values_of_its_forward_after_new_data(policy: Any) -> None:
    """As in plain PyTorch, where F.linear saves a view of the old values."""
    for module in (fp32(policy), nn.Linear(K, N)):
        new, x = randn(N, K, seed=5, dtype=torch.float32), leaf()
        y, of_old = module(x).sum(), module.weight.detach()
        (wanted,) = torch.autograd.grad(module(x).sum(), x)
        (other,) = torch.autograd.grad(functional.linear(x, new).sum(), x)
        module.weight.data = new
        y.backward(retain_graph=True)
        assert torch.equal(x.grad, wanted)
        assert not torch.equal(x.grad, other)
        of_old.add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED):
            y.backward()


@policies
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_forwards_backwards_evaluations_and_steps_is_right(
    seed: int, policy: Any
) -> None:
    choice, uses, module = random.Random(seed), 0, fp32(policy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(6):
        values = plain(module.weight).requires_grad_()
        waiting: list[tuple[Tensor, Tensor]] = []
        for _ in range(choice.randrange(12)):
            what = choice.choice(["forward", "forward", "backward", "evaluation", "drop"])
            uses += 1 if what != "backward" else 2
            if what == "forward":
                x, needs_dx = X * choice.random(), choice.random() < 0.7
                a, b = (x.clone().requires_grad_(needs_dx) for _ in range(2))
                waiting.append((module(a), functional.linear(b, values)))
                assert torch.equal(*waiting[-1])
            elif what == "evaluation":
                with choice.choice([torch.no_grad, torch.inference_mode])():
                    assert torch.equal(module(X), functional.linear(X, values.detach()))
            elif waiting:
                taken = waiting.pop(choice.randrange(len(waiting)))
                again = what == "backward" and choice.random() < 0.2
                for output in taken if what == "backward" else ():
                    output.sum().backward(retain_graph=again)
                    if again:
                        output.sum().backward()
        if values.grad is not None:
            assert torch.equal(module.weight.grad, values.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert module.weight.cache.casts <= uses


class Tagged(torch.Tensor):
    """Linears of another type's inputs run as those that are traced."""


def test_inputs_of_another_type_hold_nothing() -> None:
    module = fp32()
    for step in range(1, 3):
        y = module(X.as_subclass(Tagged).detach().requires_grad_())
        assert torch.equal(y, functional.linear(X, plain(module.weight)))
        assert casts_and_bytes(module.weight) == (step, 0)
        y.sum().backward()
        with torch.no_grad():
            module.weight.mul_(1.5)
