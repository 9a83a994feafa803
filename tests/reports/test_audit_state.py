"""An audit leaves a model as it was, whether the run ends or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, audit, convert
from blocktensor.reports.audit import left_as_it_is
from tests.support.models import assert_same_bytes, inner, linear, randn


class Stateful(nn.Module):
    """Everything that a run may change: buffers, random numbers, modes, gradients."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(48), nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("absent", None)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.register_buffer("added", torch.ones(2))
        self.absent = torch.ones(2)
        self.norm.train(not self.norm.training)
        y = self.down(self.drop(self.norm(self.up(x)).relu()))
        if self.fails:
            y.register_hook(lambda grad: 1 / 0)
        return y


X = randn(6, 32, dtype=torch.float32)


def prepared(fails: bool, device: torch.device) -> Stateful:
    """A converted model in the middle of its training."""
    model = Stateful(fails).to(device)
    convert(model, skip_small=False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2)
    model.down.weight.main_grad = torch.full((32, 48), 3.0, device=device)
    model.norm.eval()
    model.up(X.to(device))  # a form is held for the backward that has not come
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that an audit must not change, tensors by identity and by value."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    for name, module in model.named_modules():
        found[f"{name} mode"] = module.training
        found[f"{name} hooks"] = len(module._forward_hooks), len(module._forward_pre_hooks)
        found[f"{name} flags"] = len(module._forward_hooks_always_called)
        found[f"{name} buffers"] = list(module._buffers)
        for key, buffer in module._buffers.items():
            found[f"{name}.{key}"] = buffer, None if buffer is None else buffer.clone()
    for name, p in model.named_parameters():
        found[name] = p, (p.master if isinstance(p, BlockwiseFP8Weight) else p).detach().clone()
        found[f"{name} grad"] = p.grad, p.grad.clone()
        found[f"{name} hooks"] = dict(p._backward_hooks or {})
        if isinstance(p, BlockwiseFP8Weight):
            cache = p.cache
            found[f"{name} cache"] = cache, cache.casts
            found[f"{name} held"] = [form and id(form.data) for form in cache.held()]
            main_grad = p.main_grad
            found[f"{name} main_grad"] = main_grad, None if main_grad is None else main_grad.clone()
    return found


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, tuple) and not isinstance(value[0], int):
            assert value[0] is b[name][0], name  # the same object, of the same values
            value, b[name] = value[1], b[name][1]
        if isinstance(value, Tensor):
            assert_same_bytes(value, b[name])
        else:
            assert value == b[name], name


@pytest.mark.parametrize("fails", [False, True])
def test_state_is_restored(fails: bool, device: torch.device) -> None:
    model = prepared(fails, device)
    before = state_of(model)
    if fails:
        with pytest.raises(ZeroDivisionError):
            audit(model, X.to(device))
    else:
        audit(model, X.to(device))
    assert_same_state(before, state_of(model))


def test_restored_main_grad_is_the_one_that_backward_adds_to() -> None:
    model = prepared(False, torch.device("cpu"))
    buffer = model.down.weight.main_grad
    audit(model, X)
    assert torch.equal(buffer, torch.full_like(buffer, 3))
    model(X).sum().backward()
    assert not torch.equal(buffer, torch.full_like(buffer, 3))


def test_products_are_those_of_training_with_main_grad() -> None:
    """The weight gradient is added to a buffer of its own, and no ``.grad`` is made."""
    model = prepared(False, torch.device("cpu"))
    seen: list[bool] = []
    with left_as_it_is(model):
        model(X).sum().backward()
        seen.append(model.down.weight.grad is None)
        seen.append(bool(model.down.weight.main_grad.any()))
    assert seen == [True, True]


@pytest.mark.parametrize(
    "register",
    [
        lambda p, hook: p.register_hook(hook),
        lambda p, hook: p.register_post_accumulate_grad_hook(hook),
    ],
    ids=["hook", "post-accumulate"],
)
@pytest.mark.parametrize("name", ["up.weight", "up.bias"])
def test_hooks_on_parameters_do_not_run_and_stay(register: Callable[..., Any], name: str) -> None:
    model = prepared(False, torch.device("cpu"))
    calls: list[int] = []
    handle = register(model.get_parameter(name), lambda *_: calls.append(1))
    audit(model, X)
    assert calls == []
    model(X).sum().backward()
    assert calls == [1]
    handle.remove()
    model(X).sum().backward()
    assert calls == [1]


def test_frozen_weights_keep_their_forms() -> None:
    module = linear(48, 32, frozen=True)
    assert isinstance(module.weight, BlockwiseFP8Tensor)
    before = inner(module.weight)
    audit(module, randn(6, 32, grad=True))
    after = inner(module.weight)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_same_bytes(tensor, after[name])


def test_a_buffer_that_did_not_change_is_not_written() -> None:
    """A write would invalidate the graphs that have saved it."""
    model = nn.Module()
    model.register_buffer("table", torch.ones(3))
    version = model.table._version
    with left_as_it_is(model):
        pass
    assert model.table._version == version
    with left_as_it_is(model):
        model.table.data.fill_(2)  # unseen by version counters
    assert torch.equal(model.table, torch.ones(3))


def test_a_backward_that_waits_still_runs() -> None:
    plain, audited = (prepared(False, torch.device("cpu")) for _ in range(2))
    results = []
    for model in (plain, audited):
        model.drop.p = 0.0
        y = model.up(X)
        if model is audited:
            audit(model, X)
        y.sum().backward()
        results.append(model.up.weight.grad)
    assert torch.equal(*results)


def test_weights_cast_for_autocast_are_forgotten() -> None:
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        audit(model, torch.ones(2, 8))
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        assert not model(torch.ones(2, 8)).any()  # autocast sees no writes to what it has cast


def test_ddp_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            assert entered == [1]
            return self.module(x)

        def no_sync(self) -> Any:
            entered.append(1)
            return torch.enable_grad()

    report = audit(Wrapped(linear(48, 32, dtype=torch.float32)), X)
    assert {e.module for e in report.entries} == {"module"}
