"""Small models, and what their users change: forwards, classes, hooks, linears, attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from tests.support.mlps import MLP, K
from tests.support.models import randn
from tests.support.moe_models import GroupedExperts, TitanMoE
from tests.support.norms import Attention, Block, Norm

Model = Any


class Layers(nn.Module):
    """Layers one after another; with ``checkpointed``, backward runs each again."""

    def __init__(self, *layers: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(layers), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def layers(kind: str, checkpointed: bool) -> Model:
    """A model: one block, two, a block and experts, or transformers' Llama."""
    if kind == "llama":
        return pytest.importorskip("tests.support.pretrained").llama()
    more: list[nn.Module] = []
    if kind != "block":
        more = [Block() if kind == "blocks" else TitanMoE(k=K, n=K)]
    return Layers(Block(), *more, checkpointed=checkpointed)


def scaled(values: Any, by: float) -> Any:
    """All floating-point tensors in ``values``, times a number."""
    return tree_map(
        lambda x: x * by if isinstance(x, Tensor) and x.is_floating_point() else x, values
    )


class Adapter(nn.Module):
    """A linear and a low-rank product beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, dtype = base, base.weight.dtype
        self.a = nn.Linear(base.in_features, 8, bias=False, dtype=dtype)
        self.b = nn.Linear(8, base.out_features, bias=False, dtype=dtype)
        for seed, p in enumerate((self.a.weight, self.b.weight)):
            p.data = randn(*p.shape, seed=seed, dtype=dtype) / 8

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class OtherLinear(nn.Linear):
    """Computes what a linear computes."""


class TwiceLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwiceMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwiceNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class TwiceAttention(Attention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class TwiceExperts(GroupedExperts):
    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return 2 * super().forward(x, sizes)


_TWICE: Any = TwiceLinear, TwiceMLP, TwiceNorm, TwiceAttention, TwiceExperts

CLASS_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: lambda self, x: 2 * F.linear(x, self.weight, self.bias),
    MLP: lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)),
    Norm: lambda self, x: self.weight * x,
}
"""Replacements for the forward of a class."""


def twice(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return scaled(forward(*args, **kwargs), 2)


def _wrap_forward(model: Model, name: str) -> None:
    module = model.get_submodule(name)
    module.forward = functools.partial(twice, module.forward)


def _unwrap_forward(model: Model, name: str) -> None:
    vars(model.get_submodule(name)).pop("forward", None)


def _derive_class(model: Model, name: str) -> None:
    """Set a derived class; a fused module then no longer has the class that ``fuse`` gave it."""
    module = model.get_submodule(name)
    for kind in _TWICE:
        if isinstance(module, kind.__base__) and not isinstance(module, (*_TWICE, OtherLinear)):
            module.__class__ = kind


def _restore_class(model: Model, name: str) -> None:
    module = model.get_submodule(name)
    if type(module) in _TWICE:
        module.__class__ = type(module).__base__


def _replace(kind: type[nn.Linear], model: Model, name: str) -> None:
    old = model.get_submodule(name)
    new = kind(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype)
    new.weight = old.weight
    model.set_submodule(name, new)


def _adapt(model: Model, name: str) -> None:
    if not name.endswith(("gate", "lm_head")):  # whose weights are read by name
        model.set_submodule(name, Adapter(model.get_submodule(name)))


def _set_attribute(epsilon: float, act: type[nn.Module], model: Model, name: str) -> None:
    module = model.get_submodule(name)
    if hasattr(module, "variance_epsilon"):
        module.variance_epsilon = epsilon
    if hasattr(module, "act_fn"):
        module.act_fn = act()


def _forward_hook(module: nn.Module, args: Any, y: Any) -> Any:
    return scaled(y, 1.5)


def _forward_prehook(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return scaled(args, 0.75), scaled(kwargs, 0.75)


def _backward_hook(module: nn.Module, given: Any, got: Any) -> Any:
    return scaled(given, 3)


def _tensor_hook(grad: Tensor) -> Tensor:
    return grad * 5


def _accumulated_hook(parameter: Any) -> None:
    parameter.grad = parameter.grad * 7


def _hook(how: str, model: Model, name: str) -> Any:
    module = model.get_submodule(name)
    if how == "forward":
        return module.register_forward_hook(_forward_hook)
    if how == "prehook":
        return module.register_forward_pre_hook(_forward_prehook, with_kwargs=True)
    if how == "backward":
        return module.register_full_backward_hook(_backward_hook)
    for p in module.parameters():
        if p.requires_grad and how == "tensor":
            return p.register_hook(_tensor_hook)
        if p.requires_grad:
            return p.register_post_accumulate_grad_hook(_accumulated_hook)
    return None


_ANY, _LINEAR = (nn.Module,), (nn.Linear,)
_PATCHED = nn.Linear, MLP, Norm, Attention, GroupedExperts, nn.SiLU

CHANGES: dict[str, tuple[tuple[type[nn.Module], ...], Callable[[Model, str], Any]]] = {
    "wrap forward": (_PATCHED, _wrap_forward),
    "unwrap forward": (_PATCHED, _unwrap_forward),
    "derive class": (_PATCHED, _derive_class),
    "restore class": (_PATCHED, _restore_class),
    "replace": (_LINEAR, functools.partial(_replace, OtherLinear)),
    "replace by twice": (_LINEAR, functools.partial(_replace, TwiceLinear)),
    "adapt": (_LINEAR, _adapt),
    "other attributes": (_ANY, functools.partial(_set_attribute, 0.5, nn.GELU)),
    "attributes": (_ANY, functools.partial(_set_attribute, 1e-5, nn.SiLU)),
    "train": (_ANY, lambda model, name: model.get_submodule(name).train()),
    "eval": (_ANY, lambda model, name: model.get_submodule(name).eval()),
    **{
        f"{how} hook": (_ANY, functools.partial(_hook, how))
        for how in ("forward", "prehook", "backward", "tensor", "accumulated")
    },
}
"""By name: the classes of modules that a change applies to, and the change (hooks: a handle)."""
