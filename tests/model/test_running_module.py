"""The modules that products belong to, in the forward and in the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from blocktensor import audit, convert
from blocktensor.model.running_module import ModuleTracker
from tests.support.models import randn

X = randn(6, 32, dtype=torch.float32, grad=True)


def linear() -> nn.Linear:
    return nn.Linear(32, 32, bias=False)


class Calls(nn.Module):
    """Runs a function of itself, of two linears ``a`` and ``b``, and of x."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in ({"a": linear(), "b": linear()} | modules).items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def names(model: nn.Module) -> dict[str, int]:
    return Counter(e.module for e in audit(model, X).entries)


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


def test_names_without_those_of_wrappers() -> None:
    model = Names()
    convert(model, skip_small=False)
    linears = {"listed.0": 3, "listed.1.0": 3, "shared": 6, "named.key": 3}
    assert names(model) == {**linears, "(model)": 6}
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(linear())), linear())
    assert names(wrapped) == {"0.0": 4 - 1, "1": 3}
    assert names(nn.Sequential(linear(), checkpoint_wrapper(linear()))) == {"0": 3, "1": 3}


def test_a_backward_inside_of_a_forward() -> None:
    def penalty(m: Any, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)
        return m.b(g)

    entries = audit(Calls(penalty), X).entries
    kinds = [(e.module, e.kind) for e in entries]
    # the gradient of the gradient belongs to the module whose gradient it is
    assert kinds[:3] == [("a", "forward"), ("a", "backward"), ("b", "forward")]
    of_each = Counter(e.module for e in entries)
    assert of_each["b"] == 3 and of_each["a"] > 3
    assert not any(e.recomputed for e in entries)


def test_exceptions_that_a_model_catches() -> None:
    def tries(m: Any, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError):
            m.a(x[:, :3])
        return m.b(x) + x @ x.detach().t() @ x.detach()

    assert names(Calls(tries)) == {"b": 3, "(model)": 4}


def test_hooks_of_a_module_belong_to_it_and_those_of_saved_tensors_recompute_nothing() -> None:
    model = nn.Sequential(linear())
    model[0].register_forward_pre_hook(lambda m, args: args[0] @ torch.ones(32, 32))
    assert names(model) == {"0": 5}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not any(e.recomputed for e in audit(nn.Sequential(linear()), X).entries)


def test_modules_made_in_a_forward_belong_to_who_called_them() -> None:
    inner = nn.Sequential()
    inner.register_forward_hook(lambda m, args, y: linear()(y))
    assert names(Calls(lambda m, x: m.inner(x), inner=inner)) == {"inner": 3}


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

    entries = audit(Calls(lambda m, x: Again.apply(x), inner=inner), X).entries
    wanted = [("inner", "forward", False), ("inner", "forward", True), ("inner", "backward", False)]
    assert [(e.module, e.kind, e.recomputed) for e in entries] == wanted


def test_hooks_are_removed_where_one_cannot_be_registered() -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no hooks here")

    model = nn.Sequential(linear(), linear())
    model[1].register_forward_hook = fails
    with pytest.raises(RuntimeError, match="no hooks here"), ModuleTracker(model):
        raise AssertionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
