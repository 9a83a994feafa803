"""What a run keeps of an input: as long as it is of use, whatever the forward goes through."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from blocktensor import BlockwiseFP8Weight, functional, share_inputs
from blocktensor.autograd import matmuls
from blocktensor.autograd.shared_cast import SharedCasts, this_thread
from blocktensor.ops import reference
from blocktensor.ops.formats import BlockFormat, Quantized
from tests.support.backends import replace_op
from tests.support.groups import ends
from tests.support.linear_ways import storage_is_gone
from tests.support.models import randn
from tests.support.siblings import Casts, K, Mlp, Qkv, X, assert_same, casts, converted, results

__all__ = ["casts"]


def pair(make: Callable[[], nn.Module] = Qkv) -> tuple[Any, Any]:
    """A model to share inputs in, and its twin."""
    return converted(make()), converted(make())


class Two(nn.Module):
    """Two linears; ``of`` is the forward."""

    def __init__(self, of: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.of = nn.Linear(K, K), nn.Linear(K, K), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self, x)


def test_a_view_of_the_other_sign_has_its_own_cast() -> None:
    """It is the same view of the same memory."""
    shared, unshared = pair(lambda: Two(lambda m, z: m.a(z.imag) + m.b(z.conj().imag)))
    share_inputs(shared)
    z = torch.randn(9, K, dtype=torch.complex64)
    assert torch.equal(shared(z), unshared(z))


def test_views_of_a_tensor_share_its_cast_and_aliases_do_not() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        alias = x.detach()  # of the same memory and another tensor
        m.a(x), m.b(alias)
        m.a(x[:]), m.b(x.view(1, -1, K))
        m.a(x[1:]), m.b(x[:-1])  # other rows
        return x

    model = converted(Two(forward))
    report = share_inputs(model)
    model(X)
    assert (report.casts, report.saved) == (5, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, casts: Casts) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    shared, unshared = pair(lambda: nn.Sequential(Qkv(), Mlp()))
    report = share_inputs(shared)
    for step in range(1, 3):
        wanted = results(unshared, X, run)
        casts.clear()
        assert_same(results(shared, X, run), wanted)
        assert report.casts == 8 * step  # two a module and pass
        assert len(casts) == 8 + 7  # and those of gradients
        assert casts.alive() == 0


def test_selective_checkpointing_gets_what_it_kept() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "quantize" in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(model: nn.Module, x: Tensor) -> Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    shared, unshared = pair()
    share_inputs(shared)
    shared(X)
    for model in (shared, unshared):
        model.between = model.q
    assert_same(results(shared, X, run), results(unshared, X, run))


def test_threads_share_no_input(casts: Casts) -> None:
    shared, unshared = pair()
    inputs = [randn(4, K, seed=i, dtype=torch.float32) for i in range(4)]
    wanted = [unshared(x) for x in inputs]
    barrier = threading.Barrier(4, timeout=60)
    shared.between = lambda x: barrier.wait()
    share_inputs(shared)
    casts.clear()
    with ThreadPoolExecutor(4) as pool:
        outputs = pool.map(lambda x: [shared(x) for _ in range(5)], inputs)
    for made, want in zip(outputs, wanted, strict=True):
        assert all(torch.equal(each, want) for each in made)
    assert len(casts) == 4 * 5 * 2


def test_the_cast_and_the_input_go_with_the_forward(casts: Casts) -> None:
    model = converted(Qkv())
    share_inputs(model)
    inputs: list[weakref.ref[Tensor]] = []
    model.between = lambda x: inputs.append(weakref.ref(x))
    alive = []
    model.v.register_forward_hook(lambda *_: alive.append(casts.alive()))
    model.o.register_forward_pre_hook(lambda *_: alive.append(casts.alive()))
    for _ in range(2):
        with torch.no_grad():
            model(X)
        assert inputs[-1]() is None
        assert casts.alive() == 0
        y = model(X.clone().requires_grad_())
        assert casts.alive() == 0  # the rowwise bytes
        y.sum().backward()
        del y
        assert casts.alive() == 0
        assert inputs[-1]() is None
    assert alive == [1, 1] * 4


def test_nothing_outlives_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    columnwise, cast = [], reference.quantize_both

    def watched(x: Tensor, *formats: BlockFormat) -> tuple[Quantized, Quantized]:
        made = cast(x, *formats)
        columnwise.append(storage_is_gone(made[1].data))
        return made

    replace_op(monkeypatch, "quantize_both", watched)
    model = converted(Qkv())
    share_inputs(model)
    for _ in range(2):
        columnwise.clear()
        y = model(X.clone().requires_grad_())
        assert [is_gone() for is_gone in columnwise] == [False, False]
        y.sum().backward()
        assert [is_gone() for is_gone in columnwise] == [True] * 6  # with those of four gradients


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(error: type[BaseException], casts: Casts) -> None:
    held: list[Tensor] = []

    def fail(x: Tensor) -> None:
        held.append(x)
        raise error

    model = converted(Qkv(between=fail))
    report = share_inputs(model)
    with pytest.raises(error):
        model(X)
    model.between, before = None, len(casts)
    model.q(held[0]), model.k(held[0]), model.v(held[0])
    assert len(casts) == before + 3  # outside of the forward nothing is shared
    assert casts.alive() == 0
    casts.clear(), model(X)
    assert (len(casts), report.saved) == (2, 2)


def test_a_module_that_calls_itself_shares_in_each_forward() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if len(x) == 1:
            return m.a(x) + m.b(x)
        inner = m(x[:1])
        return m.a(x) + m.b(x) + inner

    shared, unshared = pair(lambda: Two(forward))
    report = share_inputs(shared)
    assert torch.equal(shared(X), unshared(X))
    assert (report.casts, report.saved) == (2, 2)


def test_an_input_that_dies_takes_its_cast_along(casts: Casts) -> None:
    alive: list[int] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x + 1)
        alive.append(casts.alive())
        return y + m.b(x + 2)  # in the place of the first

    model = converted(Two(forward))
    with torch.no_grad():
        wanted = model(X)
        share_inputs(model)
        assert torch.equal(model(X), wanted)
    assert alive == [0, 0]


def test_a_model_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = converted(Qkv())
        report = share_inputs(model)
        model(X)
        weight = weakref.ref(model.q)
        del model
        assert weight() is None
        assert report.casts == 2
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "trains"),
    [
        (lambda x: x.mul_(2), True),
        (lambda x: x[1:].zero_(), True),
        (lambda x: setattr(x, "data", x.data * 2), True),
        (lambda x: x.t_().t_().neg_(), True),
        (lambda x: setattr(x, "data", x.data[:1]), False),  # of another layout in the same place
        (lambda x: setattr(x, "data", x.data.as_strided(x.shape, (0, 1))), False),
    ],
)
def test_an_input_that_changes_is_cast_again(change: Callable[[Tensor], Any], trains: bool) -> None:
    shared, unshared = pair(lambda: Qkv(between=torch.no_grad()(change)))
    share_inputs(shared)
    with torch.no_grad():
        assert torch.equal(shared(X), unshared(X))
    for _ in range(2 if trains else 0):
        assert_same(results(shared, X), results(unshared, X))


def test_new_memory_of_an_input_is_not_where_the_old_was() -> None:
    gone: list[Callable[[], bool]] = []

    def replace(x: Tensor) -> None:
        gone.append(storage_is_gone(x))
        x.data = x.data * 2
        assert not gone[-1]()

    shared, unshared = pair()
    share_inputs(shared)
    shared.between = replace
    unshared.between = lambda x: setattr(x, "data", x.data * 2)
    with torch.no_grad():
        assert torch.equal(shared(X), unshared(X))
    assert gone[-1]()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.data.mul_(2),
        lambda x: x.view(-1).data.mul_(2),
        lambda x: x.detach().numpy().__imul__(2),
        lambda x: torch.from_dlpack(x.detach()).mul_(2),
        lambda x: x.untyped_storage().fill_(1),
    ],
    ids=["data", "data of a view", "numpy", "dlpack", "storage"],
)
def test_a_write_that_is_not_counted_is_told(write: Callable[[Tensor], Any]) -> None:
    def told(x: Tensor) -> None:
        write(x)
        torch.autograd.graph.increment_version(x)

    shared, unshared = pair(lambda: Qkv(between=torch.no_grad()(told)))
    share_inputs(shared)
    with torch.no_grad():
        assert torch.equal(shared(X), unshared(X))


def test_inference_tensors_whose_changes_are_not_counted() -> None:
    model = converted(Qkv(between=lambda x: x.mul_(2)))
    with torch.inference_mode():
        wanted = model(X)
        share_inputs(model)
        assert torch.equal(model(X), wanted)
        offs, casts = [ends(len(X)), ends(len(X))], SharedCasts()
    offs[1] = ends(len(X)).as_subclass(type("Other", (Tensor,), {}))
    casts.begin()
    with torch.no_grad():
        for each in offs:
            functional.grouped_linear(X.clone(), model.q.weight[None], each)
    casts.end()
    assert casts.casts == 0


def test_group_ends_that_change_are_read_again() -> None:
    x = randn(512, 256)
    first, second = (
        BlockwiseFP8Weight(randn(2, 128, 256, seed=seed)).requires_grad_() for seed in (1, 2)
    )

    def wgrad(shares: bool) -> Tensor:
        offs, casts = torch.tensor([100, 512], dtype=torch.int32), SharedCasts()
        if shares:
            casts.begin()
        functional.grouped_linear(x, first, offs)
        offs.copy_(torch.tensor([300, 512]))
        y = functional.grouped_linear(x, second, offs)
        if shares:
            casts.end()
        (grad,) = torch.autograd.grad(y.float().square().sum(), [second])
        return grad

    assert torch.equal(wgrad(True), wgrad(False))


def test_a_run_that_ends_ends_those_within_it() -> None:
    runs = [SharedCasts() for _ in range(3)]
    for run in runs:
        run.begin()
    try:
        SharedCasts().end()  # which has not begun
        assert this_thread.running.shared is runs[2]
        runs[0].end(), runs[1].end()
        assert this_thread.running is None
    finally:
        this_thread.running = None


@pytest.mark.gpu
def test_casts_of_rows_within_a_step_share_a_recording() -> None:
    shared, unshared = (model.to("cuda") for model in pair())
    share_inputs(shared)
    table = matmuls._cast_of_rows.table
    table.forget()
    for rows in (131, 150, 190, 129):
        x = randn(rows, K, dtype=torch.float32, device="cuda")
        assert_same(results(shared, x), results(unshared, x))
    assert len(table) == 2  # of the input of q, k and v, and of the input of o
