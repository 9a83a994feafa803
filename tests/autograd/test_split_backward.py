"""Backwards in halves, as zero-bubble schedules of torch's pipelining run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import Recipe
from blocktensor.autograd import pipelining
from tests.support.models import linear, randn
from tests.support.split_backward import backward, needs_halves
from tests.support.wgrad_inputs import HIGH

M, K = 40, 300
USES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "a linear": F.linear,
    "a view": lambda x, w, bias: x @ w + bias,
    "a linear and a view": lambda x, w, bias: F.linear(x, w, bias) @ w,
    "a linear and a penalty": lambda x, w, bias: (
        F.linear(x, w, bias) + w.high_precision().square().mean()
    ),
    "two linears": lambda x, w, bias: F.linear(torch.tanh(F.linear(x, w)), w, bias),
    "two linears of a copy": lambda x, w, bias: F.linear(
        F.linear(x.float(), w.float()), w.float(), bias.float()
    ),
}


@needs_halves
@pytest.mark.parametrize("recipe", [Recipe(), HIGH], ids=str)
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_a_whole_backward(use: str, recipe: Recipe) -> None:
    found = []
    for split in (False, True):
        module, x = linear(K, K, bias=True, recipe=recipe), randn(M, K, grad=True)
        parameters: list[Any] = [module.weight, module.bias]
        for step in range(2):
            y = USES[use](x, *parameters)
            grad = randn(M, K, seed=step, dtype=y.dtype)
            backward(y, grad, x, parameters, in_halves=split)
        found.append([x.grad, *(p.grad for p in parameters)])
    for whole, halves in zip(*found, strict=True):
        assert torch.equal(whole, halves)


def test_an_input_half_that_raises_runs_no_more() -> None:
    def original(*_: Any) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        pipelining._watched(original)([])
    assert not pipelining._input_halves
