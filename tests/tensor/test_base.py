"""What all FP8 types inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import POWER_OF_TWO, linear, quantized


def test_a_weights_gradient_is_a_tensors() -> None:
    w = linear(256, 384).weight
    assert w.grad is None
    w.grad = grad = torch.ones(256, 384, dtype=w.dtype)
    assert w.grad is grad
    with pytest.raises(RuntimeError, match="size"):
        w.grad = torch.ones(3, dtype=w.dtype)
    del w.grad
    assert w.grad is None


WRITES_FROM: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda to, of: to.copy_(of),
    "lerp_": lambda to, of: to.lerp_(of, 0.5),
    "out=": lambda to, of: torch.add(of, of, out=to),
    "_foreach_add_": lambda to, of: torch._foreach_add_([to], [of]),
}


@pytest.mark.parametrize("write", WRITES_FROM)
def test_a_weight_that_is_read_as_another_is_written_has_not_changed(write: str) -> None:
    to, of = linear(256, 384).weight, linear(256, 384).weight
    versions = to._counted._version, of._counted._version
    with torch.no_grad():
        WRITES_FROM[write](to.detach(), of.detach())
    assert to._counted._version > versions[0]
    assert of._counted._version == versions[1]


def test_what_the_keys_of_compile_caches_tell_apart() -> None:
    """Structure and layouts; not values."""
    w = linear(256, 384).weight
    with_buffer = linear(256, 384).weight
    with_buffer.main_grad = torch.zeros(256, 384)
    others = [
        w.detach(),
        w.t(),
        w[:128],
        linear(256, 384, dtype=torch.float16).weight,
        linear(256, 384, recipe=POWER_OF_TWO).weight,
        linear(256, 384, frozen=True).weight,
        linear(256, 384, frozen=True).weight.t(),
        quantized(256, 384),
        quantized(256, 384, columnwise=False),
        with_buffer,
    ]
    keys = [x._stable_hash_for_caching() for x in (w, *others)]
    assert len(set(keys)) == len(keys)
    for other in (linear(256, 384).weight * 2, linear(256, 384).weight):
        assert other.detach().requires_grad_()._stable_hash_for_caching() == keys[0]
