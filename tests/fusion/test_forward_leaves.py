"""A module whose forward leaves something behind, or acts in backward, is left alone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor import fuse
from tests.support.fused_kinds import why_left_alone
from tests.support.mlps import MLP, X, converted

LIST: list[Any] = []


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    assert LIST == []


class Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        LIST.append(1)
        return grad


class Penalized(MLP):
    """Leaves an activation penalty in a list of its file."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        LIST.append(h.float().abs().mean())
        return self.down_proj(h)


class Caught(Penalized):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:
            return MLP.forward(self, x)


@pytest.mark.parametrize("make", [Penalized, Caught])
def test_a_penalty_outside_of_the_module_stays_in_the_loss(make: Callable[[], Any]) -> None:
    model = converted(make())
    assert why_left_alone(model) == f"its forward reads {__name__}.LIST, a list"
    y = model(X.bfloat16())
    (penalty,) = LIST
    LIST.clear()
    (y.float().square().mean() + 10 * penalty).backward()
    assert model.gate_proj.weight.grad.norm() > 0.1


def leaves_on_input(m: Any, x: Tensor) -> None:
    x.penalty = x.mean()  # type: ignore[attr-defined]


def leaves_on_weight(m: Any, x: Tensor) -> None:
    m.up_proj.weight.penalty = x.mean()


def nothing(m: Any, x: Tensor) -> None:
    pass


Does = Callable[[Any, Tensor], Any]
LEFT: dict[str, tuple[Does, Does, str]] = {
    "on its input": (leaves_on_input, nothing, "its forward changes penalty"),
    "on a weight": (leaves_on_weight, nothing, "its forward changes penalty"),
    "in its input": (
        nothing,
        lambda m, x: x.data.mul_(2),
        "differs in what it writes to its input",
    ),
    "in a weight": (
        lambda m, x: m.up_proj.weight.detach().clamp_(-0.1, 0.1),
        nothing,
        "its forward changes up_proj.weight",
    ),
    "in a weight, uncounted": (
        lambda m, x: m.up_proj.weight.data.mul_(0.5),
        nothing,
        "its forward changes up_proj.weight",
    ),
    "in a buffer of a linear layer": (
        lambda m, x: m.up_proj.calls.add_(1),
        nothing,
        "its forward reads up_proj.calls, a Tensor",
    ),
}
"""What a forward does before and after it computes, and the reason why it is left alone."""


@pytest.mark.parametrize("name", LEFT)
def test_what_a_forward_leaves_on_tensors(name: str) -> None:
    before, after, reason = LEFT[name]

    class Leaving(MLP):
        def forward(self, x: Tensor) -> Tensor:
            before(self, x)
            y = super().forward(x)
            after(self, x)
            return y

    model = Leaving()
    model.up_proj.register_buffer("calls", torch.zeros(()))
    assert why_left_alone(converted(model)) == reason


class ByTorch(MLP):
    """Calls a function in a wrapper of torch."""

    @torch.compiler.disable
    def track(self) -> None:
        LIST.append(1)

    def forward(self, x: Tensor) -> Tensor:
        self.track()
        return super().forward(x)


class Callable_:
    """A forward that is no function."""

    def __get__(self, m: Any, kind: Any) -> Any:
        return functools.partial(self, m)

    def __call__(self, m: Any, x: Tensor) -> Tensor:
        LIST.append(1)
        return MLP.forward(m, x)


def test_a_forward_that_is_no_function() -> None:
    model = converted(type("Other", (MLP,), {"forward": Callable_()})())
    assert why_left_alone(model) == "its forward is no function"


class Hooking(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if h.requires_grad:
            h.register_hook(lambda grad: None)
        return self.down_proj(h)


class OfGradients(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return Hooked.apply(super().forward(x))


class WithoutGradients(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.is_grad_enabled() else 2)


class OfTable(MLP):
    """Has functions of which one is called by a name in a table."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Counter(a=1)["a"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Hooking, "its forward uses register_hook"),
        (ByTorch, f"its forward reads {__name__}.LIST, a list"),
        (OfGradients, f"its forward reads {__name__}.LIST, a list"),
        (WithoutGradients, "differs in its output without gradients"),
    ],
)
def test_what_shows_in_backward_or_without_it(make: Callable[[], Any], reason: str) -> None:
    assert why_left_alone(converted(make())) == reason


def test_constants_that_are_made_in_a_forward_are_no_state() -> None:
    assert fuse(converted(OfTable())).left_alone == ()
