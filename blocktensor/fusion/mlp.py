"""Run gated MLPs as ``functional.gated_mlp``; the base class also serves experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import functional
from ..autograd.plan import autocast_dtype, difference_of
from ..model.running_module import is_watched
from ..model.weights import unsharded_class
from ..ops.producers.activations import ACTIVATIONS, ActivationName
from ..sharding.dtensor import fp8_part
from ..tensor.weight import FP8_TYPES
from .layer_names import GATED_MLPS
from .pattern import FEATURES, Drawn, Found, Pattern, Sample, held_by

_ACTS = ("act_fn", "act", "activation_fn", "activation", "hidden_act")
"""Names of attributes that hold an activation."""


@dataclass(frozen=True)
class Gated(Pattern):
    """``down(activation(gate(x)) * up(x))``, of linear layers or of stacks of experts.

    Attributes:
        gate, up, down: names of the linear layers; gate and up may be one, which makes gate, then
            up.
        activation, recompute: arguments of ``functional.gated_mlp``.
    """

    gate: str
    up: str
    down: str
    activation: ActivationName
    recompute: bool = False

    known: ClassVar[Sequence[tuple[str, str, str]]]
    """Names of gate, up and down."""

    noun: ClassVar[str] = "linear layers"
    """The matrices of a gated MLP: gate, up and down."""

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of its linear layers, each once."""
        return tuple(dict.fromkeys((self.gate, self.up, self.down)))

    def by_role(self, of_linears: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the values of gate, up and down, given one for each of ``linears``.

        The value of up is None if gate holds up.
        """
        gate, *up, down = of_linears
        return gate, up[0] if up else None, down

    @property
    def computes(self) -> str:
        """A formula for the report."""
        return self._formula((self.gate, self.up, self.down), self.activation)

    @staticmethod
    def _formula(names: tuple[str, str, str], activation: str) -> str:
        gate, up, down = names
        if gate == up:
            return f"{down}({activation}(gate) * up), both of {gate}(x)"
        return f"{down}({activation}({gate}(x)) * {up}(x))"

    def with_recompute(self, recompute: bool) -> Pattern:
        """Return the pattern with this argument of ``fuse``."""
        return replace(self, recompute=recompute)

    def most_inputs(self, name: str) -> int:
        """Return the most input features to draw; half as many for ``down`` if gate holds up."""
        is_half = self.gate == self.up and name.partition(".")[0] == self.down
        return FEATURES // 2 if is_half else FEATURES

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[Found]:
        """Yield modules with linear layers or stacks of the known names."""
        for name, module in model.named_modules():
            held = cls._parts(module)
            linears = next((x for x in cls.known if held.keys() >= set(x)), None)
            if linears is not None:
                yield cls._found(name, module, linears)

    @classmethod
    def _parts(cls, module: nn.Module) -> dict[str, Any]:
        """Return the linear layers or stacks that the module may compute with, by name."""
        raise NotImplementedError

    @classmethod
    def _weight(cls, module: nn.Module, name: str) -> Any:
        """Return the parameter of the linear layer or stack of this name."""
        raise NotImplementedError

    @classmethod
    def _found(cls, name: str, module: nn.Module, linears: tuple[str, str, str]) -> Found:
        attribute = _act_of(module)
        reason = cls._why_unlike(module, linears, attribute) or cls.why_unwatched(module)
        activations: Sequence[ActivationName] = list(ACTIVATIONS)
        if attribute is not None and not reason:
            activation = getattr(module, attribute)
            activations = _activations_like(activation, cls._weight(module, linears[0]))
            if not activations:
                label = getattr(activation, "__name__", type(activation).__name__)
                reason = f"its {attribute}, {label}, is none of {', '.join(ACTIVATIONS)}"
        shown = activations[0] if len(activations) == 1 else attribute or "?"
        computes = cls._formula(linears, shown)
        return Found(name, module, computes, cls._patterns(module, linears, activations), reason)

    @classmethod
    def _patterns(
        cls, module: nn.Module, linears: tuple[str, str, str], activations: Sequence[Any]
    ) -> Sequence[Pattern]:
        return [cls(*linears, activation) for activation in activations]

    @classmethod
    def _why_unlike(cls, module: nn.Module, linears: tuple[str, str, str], act: str | None) -> str:
        """Return why a module cannot match the pattern; empty if it may."""
        weights = {name: fp8_part(cls._weight(module, name)) for name in linears}
        if reason := cls._why_no_recipe(weights):
            return reason
        recipe = weights[linears[0]].recipe
        if recipe.backward != "fp8":
            return f"gradients are computed in high precision (backward={recipe.backward!r})"
        if recipe.wgrad_input_format is None:
            return f"weight gradients read high precision (wgrad_input={recipe.wgrad_input!r})"
        others = held_by(module, {*linears, act})
        activation: Any = module._modules.get(act or "")
        if activation is not None and any(
            True for _ in (*activation.parameters(), *activation.buffers())
        ):
            others.append(str(act))
        return f"has more than {cls.noun} and an activation: {', '.join(others)}" if others else ""

    @classmethod
    def _why_no_recipe(cls, weights: Mapping[str, Any]) -> str | None:
        """Return why these weights cannot share one FP8 function; None stands for plain weights."""
        for name, weight in weights.items():
            if weight is None:
                return f"{name} is not in FP8"
        difference = difference_of([weight.recipe for weight in weights.values()])
        return f"its {cls.noun} have {difference}" if difference else None

    def why_watched(self, module: nn.Module) -> str | None:
        """Return what may observe or change the modules in ``module``, if anything may."""
        for name, inner in module._modules.items():
            if inner is None:
                continue
            if "forward" in inner.__dict__:
                return f"{name} has a forward of its own"
            if is_watched(inner):
                return f"{name} has hooks"
        if torch.nn.modules.module._has_any_global_hook():
            return "there are hooks for all modules"
        return None


def _why_no_linear(name: str, module: Any) -> str:
    kind = unsharded_class(module) if isinstance(module, nn.Module) else type(module)
    label = f"{kind.__module__}.{kind.__name__}"
    if label.startswith("peft."):  # the class of an adapter may be called Linear too
        return f"{name} is wrapped by an adapter of peft, {label}"
    return f"{name} is a {label}, not an nn.Linear"


class MLP(Gated):
    """A gated MLP of linear layers."""

    known = GATED_MLPS

    @classmethod
    def _parts(cls, module: nn.Module) -> dict[str, Any]:
        return {name: x for name, x in module._modules.items() if x is not None}

    @classmethod
    def _weight(cls, module: nn.Module, name: str) -> Any:
        return module._modules[name]._parameters.get("weight")  # type: ignore[union-attr]

    @classmethod
    def _why_unlike(cls, module: nn.Module, linears: tuple[str, str, str], act: str | None) -> str:
        for name in linears:
            linear: Any = module._modules[name]
            if not isinstance(linear, nn.Linear):
                return _why_no_linear(name, linear)
        return super()._why_unlike(module, linears, act)

    def why_not(self, module: Any, *args: Any) -> str | None:
        """Return why the linear layers must be called one by one, if they must."""
        x = args[0]
        if not isinstance(x, Tensor):
            return "its input is no tensor"
        why = self.why_apart(module)
        if why is None and x.dtype != module._modules[self.gate]._parameters["weight"].dtype:
            # the module's forward may convert one dtype to the other
            return None if autocast_dtype(x) else "its input and its weights have other dtypes"
        return why

    def why_apart(self, module: nn.Module) -> str | None:
        """Return the part of :meth:`why_not` that does not depend on the input."""
        held: dict[str, Any] = {}
        for name in self.linears:
            linear: Any = module._modules.get(name)
            if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
                return _why_no_linear(name, linear)
            weight = linear._parameters.get("weight")
            is_fp8 = isinstance(weight, FP8_TYPES)
            held[name] = weight if is_fp8 else None
        return self.why_watched(module) or self._why_no_recipe(held)

    def run(self, module: Any, *args: Any) -> Tensor:
        """Compute the MLP as one function."""
        linears: list[Any] = [module._modules[name] for name in self.linears]
        return functional.gated_mlp(
            args[0],
            *self.by_role([linear.weight for linear in linears]),
            *self.by_role([linear.bias for linear in linears]),
            activation=self.activation,
            recompute=self.recompute,
        )

    def parameters(self, module: Any) -> list[tuple[nn.Module, str, str]]:
        """List weights and biases."""
        return [
            (module._modules[name], key, f"{name}.{key}")
            for name in self.linears
            for key, parameter in module._modules[name]._parameters.items()
            if parameter is not None
        ]

    def sample(self, parameters: Mapping[str, Tensor], drawn: Drawn) -> Sample:
        """Return an input."""
        return drawn.rows(parameters[f"{self.gate}.weight"]), lambda x: (x,)


def _act_of(module: nn.Module) -> str | None:
    """Return the attribute that holds a module's activation, if any; methods do not count."""
    held = {**module.__dict__, **module._modules}
    return next((name for name in _ACTS if callable(held.get(name))), None)


def _activations_like(act: Callable[[Tensor], Any], weight: Tensor) -> list[ActivationName]:
    """List the activations with the values of ``act`` for all bf16 numbers."""
    device = weight.device if weight.device.type != "meta" else torch.device("cpu")
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    x = x.to(weight.dtype)
    x = x[x.isfinite()]
    try:
        with torch.no_grad():
            y = act(x.clone())  # the activation may write to it
        return [name for name, each in ACTIVATIONS.items() if torch.equal(y, each.value(x))]
    except Exception:
        return []
