"""What a linear saves for backward: FP8 bytes and the weight, which hooks may give back changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor
from tests.support.linear_ways import assert_all_equal, grads_of, way_of_linears
from tests.support.models import (
    assert_matches,
    composed,
    linear,
    plain,
    randn,
    unaligned,
)

__all__ = ["way_of_linears"]

N, K = 128, 192


def saved_by(run: Callable[[], Any]) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved


@pytest.mark.parametrize("frozen", [False, True])
def test_saves_fp8_columnwise_x_and_nothing_of_its_size(frozen: bool, device: torch.device) -> None:
    module = linear(256, 384, bias=True, frozen=frozen, device=device)
    x = randn(2, 150, 384, device=device, grad=True)
    saved = saved_by(lambda: module(x * 1)[0])
    seen = [(type(t).__name__, t.dtype, tuple(t.shape)) for t in saved]
    if frozen:  # no wgrad, so no x; dgrad reads the bytes of the weight
        wanted = [("Tensor", torch.float8_e4m3fn, (256, 384)), ("Tensor", torch.float32, (2, 3))]
    else:
        wanted = [
            ("Tensor", torch.float8_e4m3fn, (384, 304)),  # tokens in whole vectors
            ("Tensor", torch.float32, (384, 3)),
            ("BlockwiseFP8Weight", torch.bfloat16, (256, 384)),
        ]
        data, scale, weight = saved
        assert weight is module.weight or weight.master is module.weight.master
        want = BlockwiseFP8Tensor.from_values(x.detach(), rowwise=False).columnwise()
        assert torch.equal(data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(scale, want.scale)
        assert data.untyped_storage().nbytes() == 384 * 304
        assert scale.untyped_storage().nbytes() == 4 * 384 * 3 + (0 if 384 % 4 == 0 else 12)
    assert seen == wanted


def test_saves_no_x_without_wgrad_and_no_weight_without_dgrad() -> None:
    module = linear(256, 384)
    assert [t.dtype for t in saved_by(lambda: module(randn(4, 384)))] == [
        torch.float8_e4m3fn,
        torch.float32,
    ]
    module.weight.requires_grad_(False)
    assert saved_by(lambda: module(randn(4, 384, grad=True))) == [module.weight]
    assert saved_by(lambda: module(randn(4, 384))) == []


def test_a_saved_weight_may_come_back_plain() -> None:
    """As from hooks that move what is saved to another device and back."""
    module, x = linear(N, K, dtype=torch.float32), randn(5, K, dtype=torch.float32)
    gradients = []
    for pack in (lambda tensor: tensor, lambda tensor: plain(tensor).clone()):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = module(leaf)
        gradients.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0])
    assert torch.equal(*gradients)


def test_a_frozen_weight_may_come_back_laid_out_anew(device: torch.device) -> None:
    """On a GPU, a run for one layout would read another's bytes in the wrong place."""
    module, x = linear(N, K, device=device, frozen=True), randn(6, K, device=device)
    grads = []
    for hook in (lambda t: t, unaligned, lambda t: t):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, hook=hook: hook(t.view(torch.int8)).view(t.dtype)
            if t.element_size() == 1 else hook(t),
            lambda t: t,
        ):  # fmt: skip
            y = module(leaf)
        grads += torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K)])
def test_an_fp8_weight_that_requires_a_gradient(
    shape: tuple[int, ...], device: torch.device
) -> None:
    """As FSDP2 gathers one: a BlockwiseFP8Tensor, of which inner tensors are saved."""
    module = linear(N, K, device=device)
    gathered = nn.Linear(K, N, bias=False, device=device, dtype=module.weight.dtype)
    gathered.weight = nn.Parameter(module.weight._quantized())
    x, grad = randn(*shape, device=device), randn(*shape[:-1], N, seed=1, device=device)
    for _ in range(3):
        assert_all_equal(grads_of(gathered, x, grad), grads_of(module, x, grad))


def test_a_transposed_weight(device: torch.device) -> None:
    """``x @ w``: forward reads the columnwise form, and dgrad the rowwise one."""
    weight = linear(N, K, device=device).weight
    x, grad = randn(5, N, device=device, grad=True), randn(5, K, seed=1, device=device)
    for _ in range(2):
        y = x @ weight
        wanted_y, wanted_dx, wanted_dw = composed(x.detach(), plain(weight).t(), grad)
        assert_matches(y.detach(), wanted_y)
        dx, dw = torch.autograd.grad(y, (x, weight), grad)
        assert_matches(dx, wanted_dx)
        assert_matches(dw, wanted_dw.t())
