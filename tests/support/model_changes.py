"""Small models, and what their users change: forwards, classes, hooks, linears, attributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


class Twice:
    """Derived from before a module's class: returns twice what that returns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)  # type: ignore[misc]


_DERIVED = nn.Linear, MLP, Norm, Attention, GroupedExperts
_TWICE: Any = [
    type(f"Twice{kind.__name__}", (Twice, kind), {"__module__": __name__}) for kind in _DERIVED
]
TwiceLinear, TwiceMLP, TwiceNorm, TwiceAttention, TwiceGroupedExperts = _TWICE  # for pickles

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
    module.forward = partial(twice, module.forward)


def _unwrap_forward(model: Model, name: str) -> None:
    vars(model.get_submodule(name)).pop("forward", None)


def _derive_class(model: Model, name: str) -> None:
    """Set a derived class; a fused module then no longer has the class that ``fuse`` gave it."""
    module = model.get_submodule(name)
    for kind, twice in zip(_DERIVED, _TWICE, strict=True):
        if isinstance(module, kind) and not isinstance(module, (Twice, OtherLinear)):
            module.__class__ = twice


def _restore_class(model: Model, name: str) -> None:
    module = model.get_submodule(name)
    if type(module) in _TWICE:
        module.__class__ = type(module).__bases__[1]


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


def _scale(by: float, at: int | slice, *given: Any) -> Any:
    return scaled(given[at], by)


def _scale_grad(parameter: Any) -> None:
    parameter.grad = parameter.grad * 7


def _register(register: str, hook: Any, **options: Any) -> Callable[[Model, str], Any]:
    """Return a change: a hook of a module, or of the first of its parameters that is trained."""

    def change(model: Model, name: str) -> Any:
        module = model.get_submodule(name)
        trained = (p for p in module.parameters() if p.requires_grad)
        owner = module if hasattr(module, register) else next(trained, None)
        return owner is not None and getattr(owner, register)(hook, **options)

    return change


_ANY, _LINEAR = (nn.Module,), (nn.Linear,)
_PATCHED = nn.Linear, MLP, Norm, Attention, GroupedExperts, nn.SiLU

CHANGES: dict[str, tuple[tuple[type[nn.Module], ...], Callable[[Model, str], Any]]] = {
    "wrap forward": (_PATCHED, _wrap_forward),
    "unwrap forward": (_PATCHED, _unwrap_forward),
    "derive class": (_PATCHED, _derive_class),
    "restore class": (_PATCHED, _restore_class),
    "replace": (_LINEAR, partial(_replace, OtherLinear)),
    "replace by twice": (_LINEAR, partial(_replace, TwiceLinear)),
    "adapt": (_LINEAR, _adapt),
    "other attributes": (_ANY, partial(_set_attribute, 0.5, nn.GELU)),
    "attributes": (_ANY, partial(_set_attribute, 1e-5, nn.SiLU)),
    "train": (_ANY, lambda model, name: model.get_submodule(name).train()),
    "eval": (_ANY, lambda model, name: model.get_submodule(name).eval()),
    "forward hook": (_ANY, _register("register_forward_hook", partial(_scale, 1.5, -1))),
    "prehook": (
        _ANY,
        _register(
            "register_forward_pre_hook", partial(_scale, 0.75, slice(1, None)), with_kwargs=True
        ),
    ),
    "backward hook": (_ANY, _register("register_full_backward_hook", partial(_scale, 3, 1))),
    "tensor hook": (_ANY, _register("register_hook", partial(_scale, 5, -1))),
    "accumulated hook": (_ANY, _register("register_post_accumulate_grad_hook", _scale_grad)),
}
"""By name: the classes of modules that a change applies to, and the change (hooks: a handle)."""
