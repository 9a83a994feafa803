"""Sequences of ops: recorded as a whole where they only allocate and launch, else one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocktensor.ops import backends, fused, library
from blocktensor.ops.fused import Sequence
from blocktensor.ops.pinned import Pinned
from blocktensor.ops.triton.replay import Replay
from tests.models import randn
from tests.ops.triton.fake_driver import Kernel, axpy, axpy_body, draw, fake_driver

__all__ = ["fake_driver"]

M, N, K = 6, 256, 384


class Ops:
    """A sequence of two launches, and what it was given to find its ops in."""

    def __init__(self) -> None:
        self.kernel = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])
        self.given: list[Any] = []

    def twice(self, ops: Any, x: Tensor, y: Tensor) -> Tensor:
        self.given.append(ops)
        return axpy(self.kernel, axpy(self.kernel, x, y, 2), y, 3)


@pytest.fixture
def recording(fake_driver: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "recorder", lambda device: Replay)


@pytest.mark.usefixtures("recording")
def test_launches_are_replayed_as_one() -> None:
    ops = Ops()
    sequence = Sequence(ops.twice, 1)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(sequence.run(x, y), 6 * x + 4 * y)
    assert (len(ops.given), ops.kernel.ordinary, len(ops.kernel.direct)) == (1, 2, 4)


@pytest.mark.usefixtures("recording")
def test_arguments_at_one_address_do_not_decide_for_the_rest() -> None:
    ops = Ops()
    sequence = Sequence(ops.twice, 1)
    x, y = draw(2, 8)
    assert torch.equal(sequence.run(x, x), 10 * x)
    for _ in range(2):
        assert torch.equal(sequence.run(x, y), 6 * x + 4 * y)
    assert len(ops.kernel.direct) == 2


@pytest.mark.usefixtures("recording")
def test_what_cannot_be_replayed_runs_one_by_one() -> None:
    given: list[Any] = []

    def added(ops: Any, others: Any, x: Tensor) -> Tensor:
        given.append((ops, others))
        return x + 1

    sequence, x = Sequence(added, 2), draw(8)
    for _ in range(3):
        assert torch.equal(sequence.run(x), x + 1)
    plain, (ops, others), last = given
    assert not isinstance(plain[0], Pinned)
    assert isinstance(ops, Pinned) and isinstance(others, Pinned) and ops is not others
    assert last == (ops, others)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_forward_and_backward_are_their_ops(
    bias: bool, columnwise: bool, plain: bool, device: torch.device
) -> None:
    """On a GPU recorded the first time; with the functions of modules, as a recording has them."""
    x, grad = randn(M, K, device=device), randn(M, N, seed=1, device=device)
    w = library.quantize_square(randn(N, K, seed=2, device=device), False)
    b = randn(N, seed=3, device=device) if bias else None
    row, row_scale, *col = library.quantize_both(x, False)
    g = library.quantize_both(grad, False)
    wanted = (
        library.gemm_forms((row, row_scale), w, b, torch.bfloat16),
        library.gemm_forms(g[:2], library.transpose_square(*w), None, torch.bfloat16),
        library.gemm_forms(g[2:], tuple(col), None, torch.float32),
    )
    forward, backward = Sequence(fused.forward, 1), Sequence(fused.backward, 2)
    for _ in range(3):
        arguments = x, *w, b, False, torch.bfloat16, columnwise
        y, *saved = fused.forward(fused._PLAIN, *arguments) if plain else forward.run(*arguments)
        assert torch.equal(y, wanted[0])
        if not columnwise:
            assert saved == [None, None]
            continue
        given = grad, *saved, *w, False, torch.bfloat16, torch.float32
        ops = 2 * [fused._PLAIN]
        grads = fused.backward(*ops, *given) if plain else backward.run(*given)
        assert torch.equal(grads[0], wanted[1])
        assert torch.equal(grads[1], wanted[2])
