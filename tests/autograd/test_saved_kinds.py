"""What is an activation, among all that a forward saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from blocktensor import convert
from blocktensor.autograd.saved_kinds import mark_activations, why_kept
from tests.support.models import randn

T, K = 64, 256
SMALL, NO_GRADIENT = "less than 4096 elements", "needs no gradient"
HEADS = "in heads, for attention"
OTHER_DTYPE = "not bf16, fp16 or fp32"


def reasons(forward: Callable[..., Any], *inputs: Any) -> list[tuple[Any, str | None]]:
    """The shape of each tensor that is saved, and why it is kept; None for an activation."""
    found: list[tuple[Any, str | None]] = []

    def pack(x: Tensor) -> Tensor:
        found.append((tuple(x.shape), why_kept(x)))
        return x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        forward(*inputs)
    return found


def hidden(*shape: int, **options: Any) -> Tensor:
    """An activation: the output of a matmul of data."""
    x = randn(*(shape or (T, K)), **{"dtype": torch.float32, **options})
    w = nn.Parameter(torch.eye(x.shape[-1], dtype=x.dtype))
    return x @ w


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations(dtype: torch.dtype) -> None:
    x = hidden(dtype=dtype)
    assert reasons(torch.exp, x) == [((T, K), None)]
    assert reasons(torch.exp, x.view(-1)) == [((T * K,), None)]
    assert reasons(F.silu, nn.Embedding(10, K, dtype=dtype)(torch.arange(T) % 10))[0][1] is None
    leaf = randn(T, K, dtype=dtype).requires_grad_()  # of frozen embeddings
    assert reasons(torch.exp, leaf * 2) == [((T, K), None)]


def test_data_and_parameters() -> None:
    linear = nn.Linear(K, K)
    x = randn(T, K, dtype=torch.float32)
    assert reasons(linear, x) == [((T, K), NO_GRADIENT)]
    assert set(reasons(linear, hidden())) == {((T, K), None), ((K, K), "parameter")}
    found = reasons(torch.mul, hidden(), linear.weight[:T])
    assert {reason for _, reason in found} == {None, "parameter"}
    leaf = randn(T, K, dtype=torch.float32).requires_grad_()
    assert reasons(torch.exp, leaf) == [((T, K), None)]  # the result
    assert reasons(F.silu, leaf) == [((T, K), "a leaf, which its owner holds")]
    assert reasons(F.silu, leaf.view(-1)) == [((T * K,), "a leaf, which its owner holds")]


@pytest.mark.parametrize("of", [weight_norm, spectral_norm, "autocast", "adapter", "mask"])
def test_weights_that_are_computed(of: Any) -> None:
    linear = nn.Linear(K, K, bias=False)
    a, b, x = nn.Parameter(torch.zeros(K, 8)), nn.Parameter(torch.zeros(8, K)), hidden()
    forwards = {
        "autocast": linear,
        "adapter": lambda x: F.linear(x, linear.weight + 0.5 * (a @ b)),
        "mask": lambda x: F.linear(x, linear.weight * torch.ones(K, K)),
    }
    forward = forwards.get(of) or of(linear)
    with torch.autocast("cpu", torch.bfloat16, enabled=of == "autocast"):
        found = reasons(forward, x)
    assert found[-1][0] == (T, K) or found[-2][0] == (T, K)
    of_weights = {reason for shape, reason in found if shape == (K, K)}
    assert None not in of_weights
    assert ((T, K), None) in found


def test_what_does_not_depend_on_parameters() -> None:
    x = hidden()
    cos, mask = torch.ones(T, K), torch.ones(T, K, dtype=torch.bool)
    assert reasons(torch.mul, x, cos) == [((T, K), NO_GRADIENT)]
    assert reasons(torch.where, mask, x, 0.0) == [((T, K), OTHER_DTYPE)]
    found = dict(reasons(lambda: F.layer_norm(x, (K,))))
    assert found == {(T, K): None, (T, 1): NO_GRADIENT}
    assert dict(reasons(lambda: F.rms_norm(x, (K,)))) == {(T, K): None, (T, 1): SMALL}


def test_attention() -> None:
    """What it saves is kept: its backward takes the exponential of q k."""
    q = hidden(1, 4, 1024, K)
    found = dict(reasons(lambda: F.scaled_dot_product_attention(q, q, q)))
    assert found == {(1, 4, 1024, K): HEADS, (1, 4, 1024): NO_GRADIENT}  # logsumexp
    assert reasons(torch.sin, hidden(32, 4, 256))[0][1] == HEADS  # of tokens of several sequences
    assert reasons(torch.sin, hidden(32, 4, 384))[0][1] is None
    assert reasons(torch.sin, hidden(32, 256))[0][1] is None


def test_logarithms_of_probabilities() -> None:
    found = reasons(F.cross_entropy, hidden(), torch.zeros(T, dtype=torch.int64))
    assert {reason for shape, reason in found if shape == (T, K)} == {"logarithms of probabilities"}
    assert reasons(lambda x: x.softmax(-1), hidden()) == [((T, K), None)]


def test_small_tensors() -> None:
    assert reasons(torch.exp, hidden(15, K)) == [((15, K), SMALL)]
    assert reasons(torch.exp, hidden(16, K)) == [((16, K), None)]


def test_other_types() -> None:
    linear = nn.Linear(K, K, bias=False).bfloat16()
    convert(linear, skip_small=False)
    found = reasons(linear, hidden(dtype=torch.bfloat16))
    assert [reason for _, reason in found] == [OTHER_DTYPE, NO_GRADIENT, "parameter"]
    half: Any = linear.weight.chunk(2)[0]
    assert reasons(F.linear, hidden(dtype=torch.bfloat16), half)[-1][1] == "parameter"
    assert reasons(torch.exp, hidden(dtype=torch.float64)) == [((T, K), OTHER_DTYPE)]


def test_intermediates_of_functions() -> None:
    x = torch.zeros(T, K)
    assert why_kept(x) == NO_GRADIENT
    mark_activations(x, None)
    assert why_kept(x) is None
    mark_activations(small := torch.zeros(8))
    assert why_kept(small) == SMALL
