"""Random programs: gradients as with rounded tensors, and errors as in plain torch.

``BLOCKTENSOR_PROGRAMS=600`` runs others, for some 600 seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from blocktensor import saved_tensors_in_fp8
from tests.support.models import randn
from tests.support.saved import rounding

T, K = 64, 384
SECONDS = int(os.environ.get("BLOCKTENSOR_PROGRAMS", "0"))

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(2, -1, K),
    lambda x: x.view(T, 3, 128).transpose(0, 1),  # kept: as heads of attention
    lambda x: x.view(8, -1, K).transpose(0, 1),
    lambda x: x.view(-1),
    lambda x: x.t(),
    lambda x: x[16:48],
    lambda x: x[:, 128:],
    lambda x: x[8:40, :128],
    lambda x: x.view(4, -1, K)[:, 1:],
    lambda x: x.unsqueeze(1).expand(-1, 3, -1),
    lambda x: x.detach(),
]

SAVES: list[Callable[[Tensor], Tensor]] = [
    torch.sin,  # saves its input
    torch.exp,  # saves its result
    F.silu,
    torch.square,
    lambda x: x * x,
    lambda x: x.softmax(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: torch.where(x > 0, x, 0.5 * x),
    lambda x: x / (1 + x.square()),
]

CHANGES: list[Callable[[Tensor], Any]] = [
    lambda x: x.mul_(0.5),
    lambda x: x.relu_(),
    lambda x: x[:8].zero_(),
    lambda x: x.add_(x),
    lambda x: x.detach().add_(1),
    lambda x: x.copy_(x.flip(0)),
    lambda x: setattr(x, "data", x.data * 2),
]


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "checkpoint": lambda x, w: checkpoint(_block, x, w, use_reentrant=False),
    "reentrant checkpoint": lambda x, w: checkpoint(_block, x, w, use_reentrant=True),
}


def _block(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x.sin() @ w) * x


def steps(**functions: Any) -> Any:
    """Steps of these kinds: which tensor they take, and a function."""
    return st.one_of(
        st.tuples(st.just(kind), st.integers(0, 9), st.sampled_from(of))
        for kind, of in functions.items()
    )


STEPS = steps(
    way=[*WAYS.values()],
    save=SAVES,
    view=VIEWS,
    change=CHANGES,
    no_grad=CHANGES,
    drop=[None],
    twice=SAVES,
    hook=[lambda g: g * 0.5, lambda g: g.clone()],
    offloaded=SAVES,
    excluded=SAVES,
)


class Way(NamedTuple):
    """The contexts in which a program saves tensors: one, and another inside of it."""

    context: Callable[[], Any]
    excluded: Callable[[], Any]


PLAIN = Way(nullcontext, nullcontext)
ROUNDED = Way(rounding, lambda: rounding(lambda x: False))
PACKED = Way(saved_tensors_in_fp8, lambda: saved_tensors_in_fp8(enabled=False))


class Program(nn.Module):
    """A program, which takes the same course every time.

    It has tensors ``[T, K]``, which it computes, views, changes in place and drops.
    """

    def __init__(self, drawn: list[Any], saver: Any, dtype: torch.dtype, backwards: int) -> None:
        super().__init__()
        self.steps, self.saver, self.dtype, self.backwards = drawn, saver, dtype, backwards
        self.excluded: Any = nullcontext

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Run the program; return the sum of what all its parts computed."""
        tensors, outputs = [x @ w], []
        for kind, which, function in self.steps:
            chosen = tensors[which % len(tensors)]
            if kind == "way":
                tensors.append(function(chosen, w))
            elif kind == "save":
                tensors.append(function(chosen))
            elif kind == "view":
                outputs.append(self.saver(function(chosen)).sum())
            elif kind == "twice":
                outputs += [function(chosen).sum(), chosen.view(-1).sin().sum()]
            elif kind == "hook":
                chosen.register_hook(function)
            elif kind == "offloaded":
                with save_on_cpu():
                    outputs.append(function(chosen).sum())
            elif kind == "excluded":
                with self.excluded():
                    outputs.append(function(chosen).sum())
            elif kind == "drop":
                if len(tensors) > 1:
                    del tensors[which % len(tensors)], chosen
            else:
                with torch.set_grad_enabled(kind == "change"):
                    function(chosen)
        return torch.stack([*outputs, *(each.sum() for each in tensors)]).float().sum()

    def run(self, way: Way, registers: bool = False) -> list[Tensor] | str:
        """The gradients of the input and the weight; or the beginning of an error."""
        x = randn(T, K, seed=0, dtype=self.dtype).requires_grad_()
        w = nn.Parameter((randn(K, K, seed=1, dtype=torch.float32) / 16).to(self.dtype))
        self.excluded, context = way.excluded, way.context()
        handle = context.register(self) if registers else None
        try:
            with nullcontext() if registers else context:
                loss = self(x, w)
            for _ in range(self.backwards):
                loss.backward(retain_graph=self.backwards > 1)
        except RuntimeError as error:
            return str(error)[:80]
        finally:
            if handle is not None:
                handle.remove()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]


def test_random_programs() -> None:
    refused = []

    @settings(max_examples=150 + 10 * SECONDS, deadline=None, derandomize=SECONDS == 0)
    @given(
        drawn=st.lists(STEPS, min_size=3, max_size=14),
        saver=st.sampled_from(SAVES),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
        backwards=st.integers(1, 2),
        registers=st.booleans(),
    )
    def check(registers: bool, **program: Any) -> None:
        made = Program(**program)
        plain, packed = made.run(PLAIN), made.run(PACKED, registers)
        refused.append(isinstance(plain, str))
        if isinstance(plain, str):
            assert packed == plain
            return
        assert not isinstance(packed, str), packed
        for a, b in zip(packed, made.run(ROUNDED), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    check()
    assert 0.05 < sum(refused) / len(refused) < 0.6  # both kinds are tested
