"""Forward and backward of anything: results from scratch, the ops that run, losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Trace, randn

Results = Sequence[Tensor | None]


def step(run: Any, *inputs: Any, of: Iterable[nn.Module | Tensor] = ()) -> list[Tensor | None]:
    """Return the output and the gradients of the first input and of all leaves, from scratch.

    ``of``: the leaves, and modules whose parameters are leaves; by default those of ``run``.
    """
    leaves = leaves_of(*(list(of) or [run]))
    for leaf in leaves:
        leaf.grad = None
    x = inputs[0].detach().clone().requires_grad_()
    y = run(x, *inputs[1:])
    if y.requires_grad:
        y.backward(randn(*y.shape, seed=7, dtype=y.dtype, device=y.device))
    found = (y.detach(), x.grad, *(leaf.grad for leaf in leaves))
    return [None if t is None else t.clone() for t in found]  # CUDA graphs reuse their memory


def leaves_of(*owners: Any) -> list[Tensor]:
    """Return the tensors, and the parameters of the modules, among ``owners``."""
    leaves: list[Tensor] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            leaves += owner.parameters()
        elif isinstance(owner, Tensor):
            leaves.append(owner)
    return leaves


def assert_bits(actual: Results, wanted: Results) -> None:
    """The same bits, and the same are missing."""
    assert len(actual) == len(wanted)
    for a, b in zip(actual, wanted, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.isfinite().all()
        assert torch.equal(a, b)


def losses_of(loss: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train for some steps, and return the loss before each."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimizer.step()
    return [x.item() for x in losses]


Ops = Sequence[str] | Mapping[str, int] | None


def assert_trace(run: Any, *inputs: Any, forward: Ops = None, backward: Ops = None) -> None:
    """Check the ops of a forward and of its backward, with gradients of the first input.

    A list is compared with the names of the package's ops, without ``blocktensor.``; a mapping says
    how many ops have each part in their names. Without ``backward`` only a forward runs.
    """
    x = inputs[0].detach().clone().requires_grad_(backward is not None)
    with Trace() as trace:
        y = run(x, *inputs[1:])
    _assert_ops(trace, forward)
    if backward is not None:
        with Trace() as trace:
            y.backward(randn(*y.shape, seed=7, dtype=y.dtype, device=y.device))
        _assert_ops(trace, backward)


def ours(trace: Trace) -> list[str]:
    """Return the names of the package's ops, without ``blocktensor.``."""
    return [x.removeprefix("blocktensor.") for x in trace.ops if x.startswith("blocktensor.")]


def _assert_ops(trace: Trace, wanted: Ops) -> None:
    if isinstance(wanted, Mapping):
        assert {part: trace.count(part) for part in wanted} == dict(wanted), trace.ops
    elif wanted is not None:
        assert ours(trace) == list(wanted)
