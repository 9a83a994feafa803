"""Gated MLPs of torch's own functions, to compare fused ones with; and their operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.ops.producers.activations import ActivationName
from tests.support.groups import GROUPS, ends
from tests.support.models import FP32_SCALES, randn
from tests.support.steps import assert_bits as assert_bits

K, HIDDEN, N = 192, 320, 136

EAGER: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
"""All activations, as models write them."""


def results(
    run: Callable[..., Tensor], x: Tensor, operands: list[Any], again: bool = False
) -> list[Tensor | None]:
    """The output, the gradients of x and of all operands; ``again``: x has another use."""
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    for t in operands:
        t.grad = None
    y = run(leaf * 1.5 if again else leaf, *operands)
    if y.requires_grad:  # of a loss only ones keep all bits, see linear_cross_entropy.py
        y.backward(randn(*y.shape, seed=77, dtype=y.dtype, device=y.device) if y.ndim else None)
    return [y.detach(), leaf.grad, *(t.grad for t in operands)]


@dataclass(frozen=True)
class Kind:
    """A gated MLP of matrices or of experts, as one function and one product at a time.

    Attributes:
        joint: one weight makes gate, then up.
        hidden: the features of h.
        groups: those of the rows of experts, a name in ``GROUPS``; empty for matrices.
    """

    joint: bool = False
    hidden: int = HIDDEN
    groups: str = ""

    def weights(
        self,
        recipe: Recipe = FP32_SCALES,
        frozen: tuple[int, ...] = (),
        transposed: str = "",
        **options: Any,
    ) -> list[Any]:
        """Gate, up and down in FP8, or both in one and down; ``transposed``: which lie so."""
        firsts = [(2 * self.hidden, K)] if self.joint else [(self.hidden, K)] * 2
        experts = (len(GROUPS[self.groups][1]),) if self.groups else ()
        made = []
        for i, shape in enumerate((*firsts, (N, self.hidden))):
            w = randn(*experts, *shape, seed=i, **options) / 14
            w = w.mT.contiguous() if str(i) in transposed else w
            made.append(nn.Parameter(BlockwiseFP8Weight(w, recipe), i not in frozen))
        return made

    def biases(self, **options: Any) -> list[Tensor]:
        """A bias for each weight of matrices."""
        firsts = [2 * self.hidden] if self.joint else [self.hidden] * 2
        return [randn(n, seed=9 + i, **options) for i, n in enumerate((*firsts, N))]

    def inputs(self, *shape: int, grad: bool = True, **options: Any) -> Tensor:
        """x, of ``shape`` or of the rows of the groups; NaN in the rows of no group."""
        if not self.groups:
            return randn(*(shape or (2, 75)), K, seed=5, grad=grad, **options)
        rows, sizes = GROUPS[self.groups]
        x = randn(rows, K, **options)
        x[sum(sizes) :] = float("nan")
        return x.requires_grad_(grad)

    def fused(self, x: Tensor, *operands: Tensor, **options: Any) -> Tensor:
        """Run the one function of weights, then any biases."""
        (gate, *up, down), biases = self._split(operands)
        ws = gate, up[0] if up else None, down
        if self.groups:
            return functional.gated_experts(x, *ws, self._offs(x), **options)
        if biases and self.joint:
            biases = biases[0], None, biases[1]
        return functional.gated_mlp(x, *ws, *biases, **options)

    def unfused(self, x: Tensor, *operands: Tensor, activation: ActivationName = "silu") -> Tensor:
        """Return what :meth:`fused` is to equal."""
        ws, biases = self._split(operands)
        bs = biases or (None,) * len(ws)
        firsts = [self.product(x, w, b) for w, b in zip(ws[:-1], bs[:-1], strict=True)]
        gate, up = firsts if len(firsts) == 2 else firsts[0].chunk(2, -1)
        return self.product(EAGER[activation](gate) * up, ws[-1], bs[-1])

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by one weight."""
        if self.groups:
            return torch._grouped_mm(x, w.transpose(1, 2), self._offs(x))
        return F.linear(x, w, bias)

    def assert_same_bits(
        self, x: Tensor, operands: list[Any], activation: ActivationName = "silu", **options: Any
    ) -> None:
        """Compare outputs and gradients, also of an x with another use."""
        runs = (
            functools.partial(self.fused, activation=activation, **options),
            functools.partial(self.unfused, activation=activation),
        )
        for again in (False, True):
            assert_bits(*(results(run, x, operands, again) for run in runs))

    def _split(self, operands: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        count = 2 if self.joint else 3
        return operands[:count], operands[count:]

    def _offs(self, x: Tensor) -> Tensor:
        return ends(*GROUPS[self.groups][1], device=x.device)


KINDS = {
    "MLP": Kind(),
    "joint": Kind(joint=True, hidden=256),  # gate and up share no block
    "joint, ragged": Kind(joint=True),
    "experts": Kind(groups="ragged"),
    "joint experts": Kind(joint=True, groups="rows of no group"),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
whether_recomputed = pytest.mark.parametrize("recompute", [False, True])
unfused = KINDS["MLP"].unfused


def weights(kind: str = "weight", frozen: tuple[int, ...] = (), **options: Any) -> list[Any]:
    """gate, up and down in FP8; with ``kind`` "tensor" the frozen ones as BlockwiseFP8Tensor."""
    made = KINDS["MLP"].weights(frozen=frozen, **options)
    return [w._quantized() if kind == "tensor" and not w.requires_grad else w for w in made]


class WeightShapes(TorchFunctionMode):
    """The shapes of the weights and stacks that products read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch._grouped_mm):
            self.seen.add(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Any) -> None:
    """Call ``note`` with the arguments of a function before it runs."""
    function = getattr(owner, name)

    def run(*args: Any, **options: Any) -> Any:
        note(*args)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, run)
