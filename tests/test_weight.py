"""BlockwiseFP8Weight: a plain parameter to all but products, cast once per version."""

from __future__ import annotations

import copy
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    functional,
)
from tests.models import POWER_OF_TWO, linear, plain, randn

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)


def pair(dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[nn.Linear, nn.Linear]:
    """A plain linear and its converted twin."""
    converted = linear(N, K, dtype=dtype, **kwargs)
    ordinary = nn.Linear(K, N, bias=converted.bias is not None, dtype=dtype)
    with torch.no_grad():
        ordinary.weight.copy_(plain(converted.weight))
        if converted.bias is not None:
            ordinary.bias.copy_(converted.bias)
    return ordinary, converted


def assert_twins(ordinary: nn.Linear, converted: nn.Linear) -> None:
    """Equal values, and products of the FP8 one from these values."""
    w = converted.weight
    assert isinstance(w, BlockwiseFP8Weight)
    assert isinstance(w, nn.Parameter)
    assert torch.equal(w.master, ordinary.weight)
    assert w.cache.master.data_ptr() == w.master.data_ptr()
    x = X.to(w.dtype)
    wanted = functional.linear(x, plain(ordinary.weight), converted.bias, recipe=w.recipe)
    assert torch.equal(converted(x), wanted)


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
    twins = pair(dtype, bias=True)
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


def test_clipping_and_gradient_scaling() -> None:
    twins = pair(bias=True)
    norms = []
    for module in twins:
        for i, p in enumerate(module.parameters()):
            p.grad = randn(*p.shape, seed=i, dtype=torch.float32)
        nn.utils.clip_grad_value_(module.parameters(), 1.5)
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        torch._foreach_mul_([p.grad for p in module.parameters()], 0.5)
    assert torch.equal(*norms)
    for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    "init",
    [
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.eye_,
        nn.init.ones_,
        lambda w: nn.init.sparse_(w, 0.5),
    ],
)
def test_initialisation(init: Callable[[Tensor], Tensor]) -> None:
    twins = pair()
    for module in twins:
        module(X)
        torch.manual_seed(3)
        init(module.weight)
    assert_twins(*twins)


# Every way to change the values makes the next use cast again

NEW = randn(N, K, seed=11, dtype=torch.float32)


def no_grad(change: Callable[[nn.Linear], Any]) -> Callable[[nn.Linear], Any]:
    def run(module: nn.Linear) -> None:
        with torch.no_grad():
            change(module)

    return run


def inference(change: Callable[[nn.Linear], Any]) -> Callable[[nn.Linear], Any]:
    def run(module: nn.Linear) -> None:
        with torch.inference_mode():
            change(module)

    return run


def held(view: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], Any]:
    """Change through a view taken before the forward that fills the cache."""

    def run(module: nn.Linear) -> None:
        taken = view(module.weight)
        module(X)
        with torch.no_grad():
            taken.mul_(2)

    return run


def in_thread(module: nn.Linear) -> None:
    thread = threading.Thread(target=lambda: module.weight.data.mul_(2))
    thread.start()
    thread.join()


def as_vector(module: nn.Linear) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(2 * vector, module.parameters())


def set_data(module: nn.Linear) -> None:
    module.weight.data = NEW.clone()


def swap(module: nn.Linear) -> None:
    wrap = BlockwiseFP8Weight if isinstance(module.weight, BlockwiseFP8Weight) else Tensor.detach
    torch.utils.swap_tensors(module.weight, nn.Parameter(wrap(NEW.clone())))


def of_master(module: nn.Linear) -> None:
    getattr(module.weight, "master", module.weight.detach()).mul_(2)


ROUTES: dict[str, Callable[[nn.Linear], Any]] = {
    "mul_": no_grad(lambda m: m.weight.mul_(2)),
    "data.mul_": lambda m: m.weight.data.mul_(2),
    "data.copy_": lambda m: m.weight.data.copy_(NEW),
    "data =": set_data,
    "detach().mul_": lambda m: m.weight.detach().mul_(2),
    "view(-1).mul_": no_grad(lambda m: m.weight.view(-1).mul_(2)),
    "[0].zero_": no_grad(lambda m: m.weight[0].zero_()),
    "[0] = 0": no_grad(lambda m: m.weight.__setitem__(0, 0.0)),
    "[:, 3:5] = 1": no_grad(lambda m: m.weight.__setitem__(slice(3, 5), 1.0)),
    "t().mul_": no_grad(lambda m: m.weight.t().mul_(2)),
    "t()[3].mul_": no_grad(lambda m: m.weight.t()[3].mul_(2)),
    "t().data.mul_": lambda m: m.weight.t().data.mul_(2),
    "T.copy_": no_grad(lambda m: m.weight.T.copy_(NEW.t())),
    "rows": no_grad(lambda m: [row.mul_(2) for row in m.weight]),
    "diagonal": no_grad(lambda m: m.weight.diagonal().fill_(9)),
    "as_strided": no_grad(lambda m: m.weight.as_strided((3, 3), (K, 1)).zero_()),
    "fill_diagonal_": no_grad(lambda m: m.weight.fill_diagonal_(9)),
    "index_put_": no_grad(lambda m: m.weight.index_put_((torch.tensor([1]),), torch.ones(()))),
    "masked_fill_": no_grad(lambda m: m.weight.masked_fill_(NEW > 0, 3)),
    "lerp_": no_grad(lambda m: m.weight.lerp_(NEW, 0.5)),
    "addcmul_": no_grad(lambda m: m.weight.addcmul_(NEW, NEW)),
    "clamp_": no_grad(lambda m: m.weight.clamp_(-0.01, 0.01)),
    "out=": no_grad(lambda m: torch.mul(NEW, 2, out=m.weight)),
    "data = of the master": lambda m: setattr(getattr(m.weight, "master", m.weight), "data", NEW),
    "set_": no_grad(lambda m: m.weight.set_(NEW.clone())),
    "_foreach_mul_": no_grad(lambda m: torch._foreach_mul_([m.weight], 2)),
    "_foreach_copy_": no_grad(lambda m: torch._foreach_copy_([m.weight], [NEW])),
    "vector_to_parameters": as_vector,
    "swap_tensors": swap,
    "of the master": of_master,
    "in a thread": in_thread,
    "reset_parameters": lambda m: (torch.manual_seed(5), m.reset_parameters()),
    "load_state_dict": lambda m: m.load_state_dict({"weight": NEW}),
    "to and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "half and back": lambda m: m.half().float(),
    "_apply": lambda m: m._apply(lambda t: t * 2),
    "held view": held(lambda w: w.detach().view(-1)),
    "held data": held(lambda w: w.data),
    "held view of data": held(lambda w: w.data.view(-1)),
    "held row": held(lambda w: w.detach()[3]),
    "held transpose": held(lambda w: w.detach().t()),
    "held chunk": held(lambda w: w.data.chunk(2)[1]),
    "inference mul_": inference(lambda m: m.weight.mul_(2)),
    "inference data.mul_": inference(lambda m: m.weight.data.mul_(2)),
    "inference detach().mul_": inference(lambda m: m.weight.detach().mul_(2)),
    "inference view.mul_": inference(lambda m: m.weight.view(-1).mul_(2)),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_change_is_noticed(route: str) -> None:
    twins = pair()
    before = twins[1](X)
    for module in twins:
        ROUTES[route](module)
    assert_twins(*twins)
    assert not torch.equal(twins[1](X), before)


def test_a_weight_made_in_inference_mode_is_cast_at_every_use() -> None:
    with torch.inference_mode():
        module = linear(N, K, dtype=torch.float32)
        for factor in (2, 3):
            module.weight.mul_(factor)
            assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
        assert module.weight.cache.nbytes() == 0


def test_what_happens_behind_pytorchs_back_needs_invalidate() -> None:
    module = linear(N, K, dtype=torch.float32)
    before = module(X)
    module.weight.master.numpy()[:] *= 2
    module.weight.invalidate()
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
    assert not torch.equal(module(X), before)


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


def test_copies_and_casts_of_a_weight_are_weights() -> None:
    w = linear(N, K, dtype=torch.float32, recipe=POWER_OF_TWO).weight
    for copied in (w.clone(), w.detach().clone(), w.bfloat16(), torch.empty_like(w), w.t().clone()):
        assert type(copied) is BlockwiseFP8Weight
        assert copied.recipe == POWER_OF_TWO
        assert copied.cache is not w.cache
    assert torch.equal(X @ w.t().clone(), F.linear(X, w))
    assert type(w.double()) is type(w.detach() + 1) is Tensor


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


def test_stacks_of_experts_are_held_and_cast() -> None:
    w = nn.Parameter(BlockwiseFP8Weight(randn(3, 200, 130)))
    assert tuple(w.quantized().rowwise_scale.shape) == (3, 2, 2)
    wanted = BlockwiseFP8Tensor.quantize(w.master, (128, 128))
    assert torch.equal(w.quantized().dequantize(), wanted.dequantize())
    assert torch.equal(w.mT.quantized().dequantize(), wanted.dequantize().mT)
    assert w.cache.casts == 1


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
