"""Whether a module computes what it is taken for, bit for bit, forward and backward.

Both run on drawn weights, since those of a model may hide a difference: where ``down`` begins as
zeros every activation gives the same. Rows of the input have sizes from tiny to huge, where clamps
and epsilons show. Drawn weights have few features, so that a large model on a CPU takes seconds; a
module that reads its own sizes, and raises for others, runs with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..recipe import Recipe
from ..tensor.weight import BlockwiseFP8Weight
from .fused_mlp import why_mixed
from .kept_state import kept_state
from .product_weights import fp8_part

_ROWS = (2, 68)
"""Leading dimensions of the input: rows that fill no whole number of blocks."""

_FEATURES = 656
"""Most features of a drawn weight: several blocks of every format, and a part of one."""

_EXPERTS = 4
"""Most experts of a drawn stack."""

_RAISED = "raised"
"""The first word where a function raised."""

_EXPONENTS = {torch.float16: (-6, 3)}
_MOST_EXPONENTS = (-30, 30)
"""Half of the rows are scaled by powers of two from this range."""

_WAYS = ((True, False), (False, False), (True, True))
"""Training mode, and autocast to bf16."""


class Drawn:
    """Operands for verification, one of each shape for all modules of a call."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, what: str, shape: tuple[int, ...], like: Tensor, spread: bool = False) -> Tensor:
        """Normal values of the dtype and device of ``like``, or on one with memory."""
        device = like.device
        if device.type == "meta":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        key = what, shape, like.dtype, device
        if key not in self._made:
            generator = torch.Generator(device).manual_seed(len(self._made))
            x = torch.randn(shape, generator=generator, device=device)
            if spread:
                low, high = _EXPONENTS.get(like.dtype, _MOST_EXPONENTS)
                rows = shape[:-1]
                powers = torch.randint(low, high, rows, generator=generator, device=device)
                chosen = torch.rand(rows, generator=generator, device=device) < 0.5
                x = torch.where(chosen[..., None], x * 2.0 ** powers[..., None], x)
            elif len(shape) > 1:
                x = x / math.sqrt(shape[-1])
            self._made[key] = x.to(like.dtype)
        made: Tensor = self._made[key]
        return made

    def rows(self, features: int, like: Tensor) -> Tensor:
        """An input of so many features, of rows from tiny to huge."""
        return self.of("x", (*_ROWS, features), like, spread=True)


def why_not_one_function(recipes: Sequence[Recipe], weights: str) -> str:
    """Return the reason why no fused function serves weights of these recipes, or ""."""
    if reason := why_mixed(recipes, weights):
        return reason
    if recipes[0].wgrad_input_format is None:
        return "weight gradients read high precision (wgrad_input='high_precision')"
    return ""


class Compared(NamedTuple):
    """Two functions of one input that are to compute the same bits.

    Attributes:
        module: whose mode is set.
        places: the parameters that both read: the module that holds one, its key there, its name.
        one, other: the functions.
        input_for: makes an input, for parameters by name.
        dtype: of the parameters, where it is not their own.
        held_as: makes what the module holds of a parameter, if that is not the parameter.
    """

    module: nn.Module
    places: Sequence[tuple[nn.Module, str, str]]
    one: Callable[[Tensor], Any]
    other: Callable[[Tensor], Any]
    input_for: Callable[[dict[str, Tensor]], Tensor]
    dtype: torch.dtype | None = None
    held_as: Callable[[Tensor], Any] | None = None


def why_different(compared: Compared, drawn: Drawn) -> str | None:
    """What differs between the two functions on drawn parameters; None if nothing does."""
    why = _why_different(compared, drawn, True)
    if why is not None and why.startswith(_RAISED):  # it may read its own sizes
        return _why_different(compared, drawn, False)
    return why


def _why_different(compared: Compared, drawn: Drawn, small: bool) -> str | None:
    """:func:`why_different` with small parameters, or with those of the module's sizes."""
    module = compared.module
    with _stand_ins(compared, drawn, small) as parameters, kept_state(module) as changed:
        x = compared.input_for(parameters)
        with kept_random_numbers(x):
            for training, autocast in _WAYS:
                for each in module.modules():
                    each.training = training
                with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                    why = why_unequal(
                        compared.one,
                        compared.other,
                        lambda run: results(run, x, parameters, drawn),
                        mode_named(training) + (" under autocast" if autocast else ""),
                    )
                if name := changed():
                    return f"its forward changes {name}"
                if why is not None:
                    return why
    return None


def mode_named(training: bool) -> str:
    """How a difference in this mode reads."""
    return "" if training else " in evaluation mode"


def why_unequal(
    one: Callable[[Tensor], Any],
    other: Callable[[Tensor], Any],
    values: Callable[[Callable[[Tensor], Any]], dict[str, Any]],
    where: str,
) -> str | None:
    """What differs between the named ``values`` of two functions; None if no bit does."""
    made = []
    for run in (one, other):
        try:
            made.append(values(run))
        except Exception as error:
            return f"{_RAISED} {type(error).__name__} on one tensor: {error}"
    different = _first_difference(*made)
    return None if different is None else f"differs in {different}{where}"


def results(
    run: Callable[[Tensor], Any], x: Tensor, parameters: dict[str, Tensor], drawn: Drawn
) -> dict[str, Any]:
    """The output of ``run(x)`` and the gradients for a drawn gradient of it, with their names."""
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        if not isinstance(y, Tensor):
            return {"the type of its output": type(y).__name__}
        grad = drawn.of("the gradient of the output", tuple(y.shape), y)
        inputs = {"its input": leaf, **parameters}
        grads = torch.autograd.grad(y, list(inputs.values()), grad, allow_unused=True)
    named = {f"the gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}
    return {"its output": y.detach(), **named}


def _first_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    for name in a:
        if not _same(a[name], b.get(name)):
            return name
    return None


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@contextmanager
def _stand_ins(compared: Compared, drawn: Drawn, small: bool) -> Iterator[dict[str, Tensor]]:
    """Drawn parameters in place of those in ``compared.places``, by name, until the end."""
    replaced = []
    parameters: dict[str, Tensor] = {}
    try:
        for holder, key, name in compared.places:
            parameter: Any = holder._parameters[key]
            shape = _smaller(parameter.shape) if small else tuple(parameter.shape)
            values = drawn.of(name, shape, parameter)
            if compared.dtype is not None:
                values = values.to(compared.dtype)
            held = fp8_part(parameter)
            made = values if held is None else BlockwiseFP8Weight(values, held.recipe)
            replaced.append((holder._parameters, key, parameter))
            parameters[name] = holder._parameters[key] = nn.Parameter(made)
            if compared.held_as is not None:
                holder._parameters[key] = compared.held_as(parameters[name])
        yield parameters
    finally:
        for held_by, key, parameter in replaced:
            held_by[key] = parameter


def _smaller(shape: Sequence[int]) -> tuple[int, ...]:
    *experts, rows, columns = (1, *shape) if len(shape) == 1 else shape
    sizes = *(min(n, _EXPERTS) for n in experts), min(rows, _FEATURES), min(columns, _FEATURES)
    return sizes[-len(shape) :]


@contextmanager
def kept_random_numbers(x: Tensor) -> Iterator[None]:
    """Leave the random numbers of torch and Python as they were."""
    state = random.getstate()
    try:
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            yield
    finally:
        random.setstate(state)
