"""An audit leaves a model as it was, whether the run ends or raises."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, audit, convert
from blocktensor.reports.audit import left_as_it_is
from tests.support.models import assert_same, linear, plain, randn


class Stateful(nn.Module):
    """Everything that a run may change: buffers, random numbers, modes, gradients."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(48), nn.Dropout(0.5)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("absent", None)
        self.register_buffer("resized", torch.zeros(0))
        self.register_buffer("moved", torch.zeros(2))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.register_buffer("added", torch.ones(2))
        self.absent = torch.ones(2)
        self.resized.resize_(3).fill_(1)
        self.moved.data = torch.ones(2, dtype=torch.int64)
        self.norm.train(not self.norm.training)
        y = self.down(self.drop(self.norm(self.up(x)).relu()))
        if self.fails:
            y.register_hook(lambda grad: 1 / 0)
        return y


X = randn(6, 32, dtype=torch.float32)


def prepared(fails: bool = False, device: torch.device | str = "cpu") -> Stateful:
    """A converted model in the middle of its training."""
    model = Stateful(fails).to(device)
    convert(model, skip_small=False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2)
    model.norm.eval()
    model.up(X.to(device))  # a form is held for the backward that has not come
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor | None]:
    """All buffers and gradients, and the values of parameters."""
    found = {
        f"{name}.{key}": buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
    }
    for name, p in model.named_parameters():
        found |= {name: plain(p), f"{name} grad": p.grad}
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    """All else that an audit must not change; tensors by identity."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state().tolist()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().tolist()
    for name, module in model.named_modules():
        kinds = ("forward_hooks", "forward_pre_hooks", "forward_hooks_always_called")
        hooks = [len(getattr(module, f"_{kind}")) for kind in kinds]
        buffers = [(key, id(buffer)) for key, buffer in module._buffers.items()]
        found[name] = module.training, hooks, buffers
    for name, p in model.named_parameters():
        found[name] = id(p), id(p.grad), dict(p._backward_hooks or {})
        if isinstance(p, BlockwiseFP8Weight):
            forms = [form and id(form.data) for form in p.cache.held()]
            found[f"{name} cache"] = id(p.cache), p.cache.casts, forms
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_state_is_restored(fails: bool, device: torch.device) -> None:
    model = prepared(fails, device)
    before = state_of(model)
    held = tensors_of(model), [*model.parameters()]  # so that no id is used again
    values = copy.deepcopy(held[0])
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        audit(model, X.to(device))
    assert state_of(model) == before
    for name, value in tensors_of(model).items():
        assert value is values[name] is None or torch.equal(value, values[name]), name


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("name", ["up.weight", "up.bias"])
def test_hooks_on_parameters_do_not_run_and_stay(register: str, name: str) -> None:
    model = prepared()
    calls: list[int] = []
    handle = getattr(model.get_parameter(name), register)(lambda *_: calls.append(1))
    audit(model, X)
    assert calls == []
    model(X).sum().backward()
    assert calls == [1]
    handle.remove()
    model(X).sum().backward()
    assert calls == [1]


def test_frozen_weights_keep_their_forms() -> None:
    module, before = linear(48, 32, frozen=True), linear(48, 32, frozen=True)
    audit(module, randn(6, 32, grad=True))
    assert_same(module.weight.detach(), before.weight.detach())


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
    with left_as_it_is(model.to("meta")):
        pass


def test_a_backward_that_waits_still_runs() -> None:
    results = []
    for is_audited in (False, True):
        model = prepared()
        model.drop.p = 0.0
        y = model.up(X)
        if is_audited:
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


def test_ddp_reduces_nothing() -> None:
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
            return nullcontext()

    report = audit(Wrapped(linear(48, 32, dtype=torch.float32)), X)
    assert {e.module for e in report.entries} == {"module"}
