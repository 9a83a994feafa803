"""BlockwiseFP8Weight: a plain parameter to all but products, cast once per version."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Weight,
    functional,
)
from tests.support.models import (
    POWER_OF_TWO,
    assert_twins,
    linear,
    pair,
    plain,
    quantized,
    randn,
)

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)


# Optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=False),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


CASES = [
    (name, dtype)
    for name in OPTIMIZERS
    for dtype in (torch.float32, torch.bfloat16)
    if (name, dtype) != ("SGD fused", torch.bfloat16)  # torch 2.13's own reads garbage on the CPU
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_optimizers_step_as_on_a_plain_parameter(name: str, dtype: torch.dtype) -> None:
    twins = pair(N, K, dtype=dtype, bias=True)
    optimizers = [OPTIMIZERS[name](module.parameters()) for module in twins]
    start = plain(twins[0].weight)
    for step in range(3):
        for module, optimizer in zip(twins, optimizers, strict=True):
            for i, p in enumerate(module.parameters()):
                p.grad = randn(*p.shape, seed=10 * step + i, dtype=dtype)
            optimizer.step(lambda: torch.zeros(()))
            optimizer.zero_grad()
        assert_twins(*twins)
    assert not torch.equal(twins[0].weight, start)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for a, b in zip(states[0].values(), states[1].values(), strict=True):
        for key, value in a.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, b[key])


@pytest.mark.parametrize(
    "init",
    [
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.eye_,
        nn.init.ones_,
        lambda w: nn.init.sparse_(w, 0.5),
    ],
)
def test_initialisation(init: Callable[[Tensor], Tensor]) -> None:
    twins = pair(N, K)
    for module in twins:
        module(X)
        torch.manual_seed(3)
        init(module.weight)
    assert_twins(*twins)


# What all FP8 types inherit


def test_a_weights_gradient_is_a_tensors() -> None:
    w = linear(N, K).weight
    assert w.grad is None
    w.grad = grad = torch.ones(N, K, dtype=w.dtype)
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
    to, of = linear(N, K).weight, linear(N, K).weight
    versions = to._counted._version, of._counted._version
    with torch.no_grad():
        WRITES_FROM[write](to.detach(), of.detach())
    assert to._counted._version > versions[0]
    assert of._counted._version == versions[1]


def test_what_the_keys_of_compile_caches_tell_apart() -> None:
    """Structure and layouts; not values."""
    w = linear(N, K).weight
    with_buffer = linear(N, K).weight
    with_buffer.main_grad = torch.zeros(N, K)
    others = [
        w.detach(),
        w.t(),
        w[:64],
        linear(N, K, dtype=torch.float16).weight,
        linear(N, K, recipe=POWER_OF_TWO).weight,
        linear(N, K, frozen=True).weight,
        linear(N, K, frozen=True).weight.t(),
        quantized(N, K),
        quantized(N, K, columnwise=False),
        with_buffer,
    ]
    keys = [x._stable_hash_for_caching() for x in (w, *others)]
    assert len(set(keys)) == len(keys)
    for other in (linear(N, K).weight * 2, linear(N, K).weight):
        assert other.detach().requires_grad_()._stable_hash_for_caching() == keys[0]


# Copies


def test_deepcopy_shares_nothing() -> None:
    module = linear(N, K, bias=True, dtype=torch.float32, recipe=POWER_OF_TWO)
    before = module(X)
    twin = copy.deepcopy(module)
    w = twin.weight
    assert isinstance(w, BlockwiseFP8Weight)
    assert isinstance(w, nn.Parameter)
    assert (w.requires_grad, w.recipe) == (True, POWER_OF_TWO)
    assert w.master.data_ptr() != module.weight.master.data_ptr()
    assert w.cache is not module.weight.cache
    assert w.cache.master.data_ptr() == w.master.data_ptr()
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(module(X), before)
    assert torch.equal(twin(X), functional.linear(X, plain(w), twin.bias, recipe=POWER_OF_TWO))


def test_flatten_and_unflatten() -> None:
    for w in (
        linear(N, K, dtype=torch.float32).weight,
        linear(N, K, dtype=torch.float32).weight.t(),
    ):
        names, context = w.__tensor_flatten__()
        assert names == ["master"]
        hash(context)
        again = type(w).__tensor_unflatten__({"master": w.master}, context, w.shape, w.stride())
        assert (again.shape, again.stride()) == (w.shape, w.stride())
        x = randn(4, w.shape[1], dtype=torch.float32)
        assert torch.equal(F.linear(x, again), F.linear(x, w))


@pytest.mark.parametrize("kind", ["new data", "new data of another dtype", "rebuilt", "copied"])
def test_a_transposed_weight_stays_transposed(kind: str) -> None:
    """``[K, N]``, of a master that is multiplied as ``[N, K]``."""
    weight = nn.Parameter(linear(N, K, dtype=torch.float32).weight.detach().t())
    if kind == "new data":
        weight.data = randn(K, N, seed=4, dtype=torch.float32)
    elif kind == "new data of another dtype":
        weight.data = randn(K, N, seed=4)
    elif kind == "rebuilt":
        weight = type(weight.detach())(weight, requires_grad=True)
    else:
        weight = copy.deepcopy(weight)
    assert weight.requires_grad
    x = randn(5, K, dtype=weight.dtype, grad=True)
    grad = randn(5, N, seed=3, dtype=weight.dtype)
    y = x @ weight
    leaf, values = x.detach().requires_grad_(), plain(weight).requires_grad_()
    wanted = functional.linear(leaf, values.t())
    assert torch.equal(y, wanted)
    y.backward(grad), wanted.backward(grad)
    assert torch.equal(x.grad, leaf.grad)
    assert torch.equal(weight.grad, values.grad)


def test_repr() -> None:
    shown = linear(N, K).weight, linear(N, K, recipe=POWER_OF_TWO).weight.detach().t()
    text = "\n".join(textwrap.fill(repr(w), 84) for w in shown)
    assert_expected_inline(
        text,
        """\
BlockwiseFP8Weight(shape=[128, 192], dtype=torch.bfloat16, scale='fp32',
device='cpu', requires_grad=True)
BlockwiseFP8Weight(shape=[192, 128], dtype=torch.bfloat16, scale='power_of_two',
device='cpu')""",
    )


def test_on_a_gpu_a_moved_module_casts_anew(device: torch.device) -> None:
    module = linear(N, K, bias=True)
    module(X.bfloat16())
    module.to(device)
    x = X.bfloat16().to(device)
    assert module.weight.master.device == x.device
    wanted = functional.linear(x, plain(module.weight), plain(module.bias))
    assert torch.equal(module(x), wanted)
