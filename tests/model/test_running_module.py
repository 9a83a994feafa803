"""The modules that products belong to, in the forward and in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import audit, convert
from blocktensor.model.running_module import ModuleTracker
from blocktensor.reports import AuditReport
from tests.support.models import randn

X = randn(6, 32, dtype=torch.float32, grad=True)


def linear() -> nn.Linear:
    return nn.Linear(32, 32, bias=False)


def names(report: AuditReport) -> dict[str, int]:
    """How many products each module has."""
    modules = [e.module for e in report.entries]
    return {name: modules.count(name) for name in dict.fromkeys(modules)}


class Names(nn.Module):
    """Modules under every kind of name, and products in none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([linear(), nn.Sequential(linear(), nn.ReLU())])
        self.named = nn.ModuleDict({"key": linear()})
        self.shared = linear()
        self.again = self.shared
        self.own = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.listed:
            x = module(x)
        x = self.again(self.named["key"](self.shared(x)))
        return F.linear(x, self.own) + F.linear(x, self.named["key"].weight)


def test_names() -> None:
    for model in (Names(), Names()):
        if model.named["key"].weight is not None:
            convert(model, skip_small=False)
        assert names(audit(model, X)) == {
            "listed.0": 3,
            "listed.1.0": 3,
            "shared": 6,
            "named.key": 3,
            "(model)": 6,
        }


def test_wrappers_have_no_name() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(linear())), linear())
    assert names(audit(model, X)) == {"0.0": 4 - 1, "1": 3}


def test_a_backward_inside_of_a_forward() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(self.a(x).tanh().sum(), x, create_graph=True)
            return self.b(g)

    report = audit(Penalty(), X)
    kinds = [(e.module, e.kind) for e in report.entries]
    # the gradient of the gradient belongs to the module whose gradient it is
    assert kinds[:3] == [("a", "forward"), ("a", "backward"), ("b", "forward")]
    assert names(report)["b"] == 3
    assert names(report)["a"] > 3
    assert not any(e.recomputed for e in report.entries)


def test_exceptions_that_a_model_catches() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.a(x[:, :3])
            except RuntimeError:
                return self.b(x) + x @ x.detach().t() @ x.detach()
            raise AssertionError

    assert names(audit(Tries(), X)) == {"b": 3, "(model)": 4}


def test_hooks_of_a_module_belong_to_it() -> None:
    model = nn.Sequential(linear())
    model[0].register_forward_pre_hook(lambda m, args: args[0] @ torch.ones(32, 32))
    assert names(audit(model, X)) == {"0": 5}


def test_a_forward_that_a_function_runs_again_in_its_backward() -> None:
    inner = linear()

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return inner(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = inner(x)
            return torch.autograd.grad(y, x, grads)[0]

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return Again.apply(x)

    kinds = [(e.module, e.kind, e.recomputed) for e in audit(Runs(), X).entries]
    assert kinds == [
        ("inner", "forward", False),
        ("inner", "forward", True),
        ("inner", "backward", False),
    ]


def test_modules_made_in_a_forward_belong_to_who_called_them() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential()
            self.inner.register_forward_hook(lambda m, args, y: linear()(y))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    assert names(audit(Makes(), X)) == {"inner": 3}


def test_hooks_are_removed_where_one_cannot_be_registered() -> None:
    model = nn.Sequential(linear(), linear())

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no hooks here")

    model[1].register_forward_hook = fails
    try:
        with ModuleTracker(model):
            raise AssertionError
    except RuntimeError:
        pass
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
