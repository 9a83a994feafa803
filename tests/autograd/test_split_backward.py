"""Hooks that change gradients, in a backward in two halves as zero-bubble schedules run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from blocktensor import convert, functional, fuse, share_inputs
from blocktensor.autograd.norm import normed
from tests.support.groups import ends
from tests.support.models import randn
from tests.support.numeric import assert_same

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="before 2.13 torch loses an autograd.Function between the halves (pytorch#166577)",
)

K = 128


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, 256), nn.Linear(K, 256)
        self.down_proj, self.act_fn = nn.Linear(256, K), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.q(x)) * self.k(x) + self.v(x)
        return y


class Calls(nn.Module):
    """A function of x and of weights of these shapes."""

    def __init__(self, run: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.weights = nn.ParameterList(randn(*s, dtype=torch.float32) / K**0.5 for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.weights)


def experts(x: Tensor, *weights: Tensor) -> Tensor:
    return functional.gated_experts(x, *weights, ends(30, 34))


def loss(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return functional.linear_cross_entropy(x, w, torch.arange(64).view(x.shape[:-1]), bias)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(K, K),
    "linear, no bias": lambda: nn.Linear(K, K, bias=False),
    "gated MLP": GatedMLP,
    "fused MLP": lambda: Calls(functional.gated_mlp, (256, K), (256, K), (K, 256)),
    "joint MLP": lambda: Calls(
        lambda x, w, down: functional.gated_mlp(x, w, None, down), (512, K), (K, 256)
    ),
    "experts": lambda: Calls(experts, (2, 256, K), (2, 256, K), (2, K, 256)),
    "shared inputs": QKV,
    "norm": lambda: Calls(lambda x, w: normed(x, w, 1e-6, "gemma"), (K,)),
    "loss": lambda: Calls(loss, (64, K), (64,)),
}

LEADING = {"1-D": (), "2-D": (64,), "3-D": (2, 32), "4-D": (2, 2, 16)}

# torch's own 2-D linear layers run hooks of their outputs in both halves, and so do ours
CASES = [
    *((part, rank) for part in PARTS for rank in ("3-D", "4-D") if part != "experts"),
    ("linear", "1-D"),
    ("linear, no bias", "1-D"),
    *((part, "2-D") for part in ("fused MLP", "joint MLP", "experts", "norm", "loss")),
]


def tensor_hook(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, x, y: y.register_hook(lambda g: g * 0.5) and None)


def prehook(part: nn.Module) -> None:
    def run(module: nn.Module, x: Any, y: Any) -> None:
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 0.5,))

    part.register_forward_hook(run)


def inner_hooks(part: nn.Module) -> None:
    for each in part.modules():
        if isinstance(each, nn.Linear):
            tensor_hook(each)


def in_place(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, x, y: y.mul_(2).mul_(0.25))


def backward_hook(part: nn.Module) -> None:
    part.register_full_backward_hook(lambda module, dx, g: (dx[0] * 0.5,))


def backward_pre_hook(part: nn.Module) -> None:
    part.register_full_backward_pre_hook(lambda module, g: (g[0] * 0.5,))


HOOKS = (tensor_hook, prehook, inner_hooks, in_place, backward_hook, backward_pre_hook)


def gradients(part: str, shape: tuple[int, ...], hook: Any, split: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    middle = PARTS[part]()
    model = nn.Sequential(nn.Linear(K, K), nn.Tanh(), middle)
    convert(model, skip_small=False)
    if part == "gated MLP" and hook is not inner_hooks:
        fuse(model)
    elif part == "shared inputs":
        share_inputs(model)
    hook(middle)
    x = randn(*shape, dtype=torch.float32, grad=True)
    y = model(x) * 1
    grad = randn(*y.shape, seed=3, dtype=y.dtype)
    if split:
        _, groups = stage_backward_input([y], [grad], [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
    else:
        y.backward(grad)
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize(("part", "rank"), CASES)
def test_a_hook_changes_each_gradient_once(part: str, rank: str, hook: Any) -> None:
    shape = (*LEADING[rank], K)
    whole, split = (gradients(part, shape, hook, each) for each in (False, True))
    for a, b in zip(whole, split, strict=True):
        assert a is not None and b is not None
        assert_same(b, a)


def test_a_matrix_behaves_as_in_torch() -> None:
    """There the node of the output is the node that both halves begin at."""

    def bias_gradients(converted: bool) -> list[float]:
        module = nn.Linear(K, K)
        if converted:
            convert(module, skip_small=False)
        x = randn(64, K, dtype=torch.float32, grad=True)
        y = F.linear(torch.tanh(x), module.weight, module.bias)
        y.register_hook(lambda g: g * 0.5)
        y = y * 1
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
        stage_backward_weight(module.parameters(), groups)
        assert module.bias.grad is not None
        return module.bias.grad.tolist()

    assert bias_gradients(True) == bias_gradients(False) == [16.0] * K
