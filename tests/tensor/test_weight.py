"""BlockwiseFP8Weight: a plain parameter to all but products, cast once per version."""

from __future__ import annotations

import copy
import functools
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, functional
from tests.support.models import POWER_OF_TWO, assert_twins, linear, pair, plain, quantized, randn
from tests.support.steps import assert_bits, step

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
    "SGD foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "RMSprop foreach": (torch.optim.RMSprop, {"foreach": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adafactor": (torch.optim.Adafactor, {"foreach": False}),
    "Adafactor foreach": (torch.optim.Adafactor, {"foreach": True}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "Adadelta foreach": (torch.optim.Adadelta, {"foreach": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "Muon": (torch.optim.Muon, {}),  # of matrices alone
    "LBFGS": (torch.optim.LBFGS, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_a_plain_parameter(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("SGD fused", torch.bfloat16):
        return  # torch 2.13's own reads garbage on the CPU
    kind, options = OPTIMIZERS[name]
    twins = pair(N, K, dtype=dtype, bias=True)
    parameters = [[p for p in m.parameters() if p.ndim == 2 or name != "Muon"] for m in twins]
    optimizers = [kind(each, lr=0.1, **options) for each in parameters]
    start = plain(twins[0].weight)
    for n in range(3):
        for module, optimizer in zip(twins, optimizers, strict=True):
            for i, p in enumerate(module.parameters()):
                p.grad = randn(*p.shape, seed=10 * n + i, dtype=dtype)
            optimizer.step(lambda: torch.zeros(()))
            optimizer.zero_grad()
        assert_twins(*twins)
    assert not torch.equal(twins[0].weight, start)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for a, b in zip(states[0].values(), states[1].values(), strict=True):
        for key, value in a.items():
            assert not isinstance(value, Tensor) or torch.equal(value, b[key])


INITS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(nn.init, name) for name in ("xavier_uniform_", "kaiming_normal_", "normal_",
       "orthogonal_", "trunc_normal_", "eye_", "ones_")},
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("init", INITS)
def test_initialisation(init: str) -> None:
    twins = pair(N, K)
    for module in twins:
        module(X)
        torch.manual_seed(3)
        INITS[init](module.weight)
    assert_twins(*twins)


def test_a_weights_gradient_is_a_tensors() -> None:
    w, grad = linear(N, K).weight, torch.ones(N, K, dtype=torch.bfloat16)
    assert w.grad is None
    w.grad = grad
    assert w.grad is grad
    with pytest.raises(RuntimeError, match="size"):
        w.grad = grad[:3]
    del w.grad
    assert w.grad is None


@pytest.mark.parametrize("shape", [(N, K), (3, N, K)])
def test_the_values_of_views_lie_as_the_views_do(shape: tuple[int, ...]) -> None:
    w = BlockwiseFP8Weight(randn(*shape))
    for view in (w, w.mT, w.mT.mT, w[1:], w[1:].mT):
        cast, values = view._quantized(), view.dequantize()
        assert cast.stride() == values.stride()
        assert values.is_contiguous() == cast.is_contiguous() == (not view.transposed)
        assert torch.equal(values.mT, view.mT.dequantize())


@pytest.mark.parametrize("strides", ["of the view", "of its own"])
def test_a_transpose_takes_other_values(strides: str) -> None:
    """As ``.data =`` gives them to a weight; the weight that it is a view of keeps its own."""
    w = linear(N, K).weight
    before, view, new = plain(w).clone(), w.detach().t(), randn(N, K, seed=5).t()
    new = new if strides == "of the view" else new.contiguous()
    view.data = new
    assert torch.equal(plain(view), new)
    assert torch.equal(plain(w), before)
    other = BlockwiseFP8Weight(new.contiguous())
    results = []
    for weight in (view, other):
        weight.requires_grad_()
        x = randn(5, N, grad=True)
        y = F.linear(x, weight) @ weight
        y.backward(randn(5, N, seed=6))
        results.append((y, x.grad, weight.grad))
    assert all(map(torch.equal, *results))


WRITES_FROM: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda to, of: to.copy_(of),
    "lerp_": lambda to, of: to.lerp_(of, 0.5),
    "out=": lambda to, of: torch.add(of, of, out=to),
    "_foreach_add_": lambda to, of: torch._foreach_add_([to], [of]),
}


@pytest.mark.parametrize("write", WRITES_FROM)
def test_a_weight_that_is_read_as_another_is_written_has_not_changed(write: str) -> None:
    to, of = linear(N, K).weight, linear(N, K).weight
    before = to._counted._version, of._counted._version
    with torch.no_grad():
        WRITES_FROM[write](to.detach(), of.detach())
    assert (to._counted._version > before[0], of._counted._version) == (True, before[1])


def test_what_the_keys_of_compile_caches_tell_apart() -> None:
    w, frozen = (linear(N, K, frozen=i == 1).weight for i in range(2))
    different = [
        w,
        w.detach(),
        w.t(),
        w[:64],
        frozen,
        frozen.t(),
        quantized(N, K),
        quantized(N, K, columnwise=False),
        linear(N, K, dtype=torch.float16).weight,
        linear(N, K, recipe=POWER_OF_TWO).weight,
    ]
    keys = [x._stable_hash_for_caching() for x in different]
    assert len(set(keys)) == len(keys)
    for other in (linear(N, K).weight * 2, linear(N, K).weight):
        assert other.detach().requires_grad_()._stable_hash_for_caching() == keys[0]


@pytest.mark.parametrize("transposed", [False, True])
def test_flatten_and_unflatten(transposed: bool) -> None:
    w = linear(N, K, dtype=torch.float32).weight
    w = w.t() if transposed else w
    names, context = w.__tensor_flatten__()
    assert names == ["master"]
    hash(context)
    again = type(w).__tensor_unflatten__({"master": w.master}, context, w.shape, w.stride())
    assert (again.shape, again.stride()) == (w.shape, w.stride())
    x = randn(4, w.shape[1], dtype=torch.float32)
    assert torch.equal(F.linear(x, again), F.linear(x, w))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "rebuilt", "copied"], ids=str)
def test_a_transposed_weight_stays_transposed(kind: Any) -> None:
    """``[K, N]``, of a master that is multiplied as ``[N, K]``; also with new data of a dtype."""
    module = linear(N, K, dtype=torch.float32, recipe=POWER_OF_TWO)
    weight: Any = nn.Parameter(module.weight.detach().t())
    if isinstance(kind, torch.dtype):
        weight.data = randn(K, N, seed=4, dtype=kind)
    elif kind == "rebuilt":
        weight = type(weight.detach())(weight, requires_grad=True)
    else:
        weight = copy.deepcopy(weight)
        assert weight.master.data_ptr() != module.weight.master.data_ptr()
        assert weight.cache.master.data_ptr() == weight.master.data_ptr()
        assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, BlockwiseFP8Weight)
    assert (weight.requires_grad, weight.recipe) == (True, POWER_OF_TWO)
    x, values = randn(5, K, dtype=weight.dtype), plain(weight).requires_grad_()
    product = functools.partial(functional.linear, recipe=POWER_OF_TWO)
    wanted = step(lambda x: product(x, values.t()), x, of=[values])
    assert_bits(step(lambda x: x @ weight, x, of=[weight]), wanted)


def test_a_copy_of_a_parameter_has_no_gradient() -> None:
    """A copy of a plain parameter has none: its first backward adds to nothing."""
    for module in pair(N, K):
        tied = nn.ModuleList([module, nn.Linear(K, N, bias=False)])
        tied[1].weight = module.weight
        module(X).sum().backward()
        copied = copy.deepcopy(tied)
        assert module.weight.grad is not None and copied[0].weight.grad is None
        assert copied[0].weight is copied[1].weight is not module.weight
        copied[0](X).sum().backward()
        assert torch.equal(copied[0].weight.grad, module.weight.grad)


def test_repr() -> None:
    shown = linear(N, K).weight, linear(N, K, recipe=POWER_OF_TWO).weight.detach().t()
    assert_expected_inline(
        "\n".join(textwrap.fill(repr(w), 84) for w in shown),
        """\
BlockwiseFP8Weight(shape=[128, 192], dtype=torch.bfloat16, scale='fp32',
device='cpu', requires_grad=True)
BlockwiseFP8Weight(shape=[192, 128], dtype=torch.bfloat16, scale='power_of_two',
device='cpu')""",
    )


def test_on_a_gpu_a_moved_module_casts_anew(device: torch.device) -> None:
    module, x = linear(N, K, bias=True), X.bfloat16()
    module(x)
    module.to(device)
    x = x.to(device)
    assert module.weight.master.device == x.device
    assert torch.equal(module(x), functional.linear(x, plain(module.weight), plain(module.bias)))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^the master is a int: expected a tensor$"):
        BlockwiseFP8Weight(5)  # type: ignore[arg-type]
