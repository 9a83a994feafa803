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
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, functional
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from blocktensor.tensor import weight_cache
from tests.support.models import Trace, assert_same_bytes, complaint, linear, plain, randn

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)
FP8_BYTES = N * K + 4 * 2  # two blocks
POLICIES = pytest.mark.parametrize("policy", ["backward", "step", False])
MODIFIED = r"modified by an in-?place operation"


def fp32(policy: Any = "backward") -> Any:
    return linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=policy))


def leaf() -> Tensor:
    return X.clone().requires_grad_()


# What a forward casts, and what its graph holds


@pytest.mark.parametrize("waiting", [1, 3])
def test_every_forward_casts_and_those_that_wait_share_one_form(waiting: int) -> None:
    module = fp32()
    cache = module.weight.cache
    for step in range(1, 3):
        outputs = [module(leaf()) for _ in range(waiting)]
        for y in outputs:
            assert cache.nbytes() == FP8_BYTES
            y.sum().backward()
        assert (cache.casts, cache.nbytes()) == (step * waiting, 0)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_graph_holds_the_form_that_its_dgrad_reads(is_transposed: bool) -> None:
    """Of a weight's transpose, dgrad reads the rowwise form."""
    weight = linear(N, K).weight
    x = randn(5, N if is_transposed else K, grad=True)
    with Trace() as trace:
        y = F.linear(x, weight.t() if is_transposed else weight)
    assert trace.count("quantize_with_transpose") == 1
    held = weight.cache.held()
    wanted = reference.quantize_with_transpose(plain(weight), BLOCKS_128X128)
    for form, want in zip(held, wanted, strict=True):
        if form is not None:
            assert_same_bytes(form.data, want.data)
    assert [form is None for form in held] == [not is_transposed, is_transposed]
    with Trace() as trace:
        y.sum().backward()
    assert trace.count("transpose") == 0


@pytest.mark.parametrize("most", [N * K - 1, N * K])
def test_forms_of_large_weights_are_made_one_by_one(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a layer does not hold both during its forward."""
    monkeypatch.setattr(weight_cache, "ONE_READ_BYTES", most)
    module = linear(N, K)
    with Trace() as trace:
        y = module(randn(5, K, grad=True))
    held, both = module.weight.cache.held(), most == N * K
    assert [form is None for form in held] == [both, not both]
    assert trace.count("quantize_with_transpose") == both
    with Trace() as trace:
        y.sum().backward()
    assert trace.count("blocktensor.transpose") == (not both)
    assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (1, 0)


def test_graphs_of_a_weight_and_of_its_transpose_share_the_form_of_the_latest() -> None:
    weight, x, z = linear(N, K).weight, randn(5, K, grad=True), randn(7, N, seed=1, grad=True)
    runs = [lambda: F.linear(x, weight), lambda: F.linear(z, weight.t())]
    wanted = [torch.autograd.grad(runs[i]().sum(), (x, z)[i])[0] for i in (0, 1)]
    for first in (0, 1):
        outputs = {i: runs[i]() for i in (first, 1 - first)}
        for i in (0, 1):
            (got,) = torch.autograd.grad(outputs[i].sum(), (x, z)[i])
            assert torch.equal(got, wanted[i])
        assert weight.cache.nbytes() == 0


@pytest.mark.parametrize("n", [128, 130])
def test_without_a_cache_backward_casts_the_form_that_it_reads(n: int) -> None:
    module = linear(n, K, recipe=Recipe(cache_weight=False))
    y = module(randn(5, K, grad=True)).sum()
    assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (1, 0)
    with Trace() as trace:
        y.backward()
    casts = [op for op in trace.ops if "128x128" in op and "gemm" not in op]
    assert casts == ["blocktensor.quantize_transpose 128x128"]
    assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (2, 0)


def test_a_graph_that_is_dropped_frees_the_form() -> None:
    module = fp32()
    y = module(leaf())
    assert module.weight.cache.nbytes() == FP8_BYTES
    del y
    assert module.weight.cache.nbytes() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.detach(), lambda w: w.t().t()])
def test_without_gradients_nothing_is_held(mode: Callable[[], Any], view: Any) -> None:
    module = fp32()
    with mode():
        F.linear(X, view(module.weight))
    assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (1, 0)


def test_only_a_dgrad_that_may_come_holds_the_form() -> None:
    module = fp32()
    for casts in range(1, 4):
        y = module(X)
        assert y.requires_grad
        assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (casts, 0)
        y.sum().backward()


@POLICIES
def test_a_transposed_view_is_cast_once_a_use(policy: Any) -> None:
    weight = fp32(policy).weight
    y = randn(5, N, dtype=torch.float32) @ weight
    assert weight.cache.casts == 1
    y.sum().backward()  # wgrad alone, which does not read the weight
    assert weight.cache.casts == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_casts_again_and_releases(reentrant: bool) -> None:
    module = fp32()
    cache = module.weight.cache
    y = checkpoint(module, leaf(), use_reentrant=reentrant)
    assert (cache.casts, cache.nbytes()) == (1, 0 if reentrant else FP8_BYTES)
    y.sum().backward()
    assert (cache.casts, cache.nbytes()) == (2, 0)


# What backward compares


@pytest.mark.parametrize("write", ["none", "state_dict", "half"])
def test_a_second_backward_of_a_retained_graph_reads_the_values_of_its_forward(write: str) -> None:
    module, x = fp32(), leaf()
    y = module(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert module.weight.cache.nbytes() == 0
    if write == "state_dict":
        module.state_dict()["weight"].add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED):
            torch.autograd.grad(y, x)
        return
    cache = module.weight.cache
    if write == "half":
        module.half()
    assert torch.equal(*first, *torch.autograd.grad(y, x))
    assert cache.casts == 2


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "weight": lambda m: m.weight.add_(1),
    "detach": lambda m: m.weight.detach().add_(1),
    "view": lambda m: m.weight.view(-1).add_(1),
    "part": lambda m: m.weight[:3].add_(1),
    "state_dict": lambda m: m.state_dict()["weight"].add_(1),
    "view of state_dict": lambda m: m.state_dict()["weight"].view(-1).add_(1),
    "master": lambda m: m.weight.master.add_(1),
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1.0).step(),
}


@POLICIES
@pytest.mark.parametrize("write", WRITES)
def test_a_counted_write_between_forward_and_backward_raises(write: str, policy: Any) -> None:
    module = fp32(policy)
    module.weight.grad = torch.ones(N, K)
    y = module(leaf()).sum()
    with torch.no_grad():
        WRITES[write](module)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.backward()
    del y
    assert module.weight.cache.nbytes() == 0 or policy == "step"


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


@pytest.mark.parametrize("of_part", [False, True])
def test_a_part_shares_the_counter_of_its_weight(of_part: bool) -> None:
    weight = linear(256, K, dtype=torch.float32).weight
    part = weight[:N]
    y = F.linear(leaf(), part).sum()
    with torch.no_grad():
        (part.detach() if of_part else weight.master).add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.backward()


@POLICIES
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


@POLICIES
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_forwards_backwards_evaluations_and_steps_is_right(
    seed: int, policy: Any
) -> None:
    choice, uses = random.Random(seed), 0
    module = fp32(policy)
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
                pair = module(a), functional.linear(b, values)
                assert torch.equal(*pair)
                waiting.append(pair)
            elif what == "evaluation":
                with choice.choice([torch.no_grad, torch.inference_mode])():
                    assert torch.equal(module(X), functional.linear(X, values.detach()))
            elif waiting:
                taken = waiting.pop(choice.randrange(len(waiting)))
                if what == "backward":
                    again = choice.random() < 0.2
                    for output in taken:
                        output.sum().backward(retain_graph=again)
                        if again:
                            output.sum().backward()
        if values.grad is not None:
            assert torch.equal(module.weight.grad, values.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert module.weight.cache.casts <= uses
