"""The patterns of ``fuse``, and the check that a module computes one, bit for bit.

Both run forward and backward on drawn weights, since those of a model may hide a difference: where
``down`` begins as zeros every activation gives the same. Rows of the input have sizes from tiny to
huge, where clamps and epsilons show. Drawn weights have few features, so that a large model on a
CPU takes seconds; a module that reads its own sizes, and raises for others, runs with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..sharding.dtensor import fp8_part
from ..tensor.weight import BlockwiseFP8Weight
from .forward_reads import on_copies, state_of
from .fused_class import own_forward

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

Sample = tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]
"""The first argument of a forward, and a function that makes all arguments from it."""


class Found(NamedTuple):
    """A module that looks like one of a pattern.

    Attributes:
        computes: what it is taken for, as long as no pattern is verified.
        patterns: those that it may compute, in the order in which they are tried.
        reason: why it can be none of them, by its looks; empty if it may be one.
        readers: the linears that read its result, and share its casts.
    """

    name: str
    module: nn.Module
    computes: str
    patterns: Sequence[Pattern]
    reason: str
    readers: Sequence[nn.Module] = ()


class Pattern:
    """A computation of a module, and one function that runs it. Each kind is one file.

    Attributes:
        inputs: the number of arguments of the module's forward.
        in_graphs: True if compilers are shown the function, else the module's own forward.
    """

    inputs: ClassVar[int] = 1
    in_graphs: ClassVar[bool] = True

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[Found]:
        """Yield the modules of known names."""
        raise NotImplementedError

    @property
    def computes(self) -> str:
        """A formula for the report; empty if :class:`Found` has it."""
        return ""

    def with_recompute(self, recompute: bool) -> Pattern:
        """Return the pattern with this argument of ``fuse``."""
        return self

    def why_not(self, module: Any, *args: Any) -> str | None:
        """Return why the module's own forward has to run on ``args``, if it has.

        It is asked in every forward: hooks, adapters and dtypes may change after the fusion.
        """
        raise NotImplementedError

    def run(self, module: Any, *args: Any) -> Tensor:
        """Return ``module(*args)``, computed as one function."""
        raise NotImplementedError

    def verify(self, module: nn.Module, drawn: Drawn) -> tuple[Pattern | None, str]:
        """Return the pattern that the module computes, or None and what differs."""
        why = why_different(self, module, drawn)
        return (self, "") if why is None else (None, why)

    def parameters(self, module: Any) -> list[tuple[nn.Module, str, str]]:
        """List the parameters that are drawn: the module that holds one, its key, its name."""
        raise NotImplementedError

    def drawn_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of what is drawn for a parameter of this dtype."""
        return dtype

    def held_as(self, parameter: nn.Parameter) -> Any:
        """Return what the module holds of a drawn parameter."""
        return parameter

    def settings(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return attributes that the module needs for drawn parameters."""
        return {}

    def sample(self, parameters: Mapping[str, Tensor], drawn: Drawn) -> Sample:
        """Draw arguments of a forward."""
        raise NotImplementedError


def held_by(module: nn.Module, known: Collection[str | None]) -> list[str]:
    """Return the names of what a module holds other than ``known``, and of what is in that."""
    children = module._modules.items()
    others = [name for name, x in children if x is not None
              and (name not in known or any(True for _ in x.children()))]  # fmt: skip
    own = (*module._parameters.items(), *module._buffers.items())
    return others + [name for name, x in own if x is not None and name not in known]


class Drawn:
    """Operands for verification, one of each shape for all modules of a call."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, what: str, shape: tuple[int, ...], like: Tensor, spread: bool = False) -> Tensor:
        """Draw normal values of the dtype and device of ``like``, or on a device with memory."""
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

    def rows(self, weight: Tensor) -> Tensor:
        """Draw an input of a weight, of rows from tiny to huge."""
        return self.of("x", (*_ROWS, weight.shape[-1]), weight, spread=True)


def why_different(pattern: Pattern, module: nn.Module, drawn: Drawn) -> str | None:
    """Return why ``module`` does not run as ``pattern`` does, or what differs; None if it does."""
    why = _why_different(pattern, module, drawn, True)
    if why is not None and why.startswith(_RAISED):  # it may read its own sizes
        return _why_different(pattern, module, drawn, False)
    return why


def _why_different(pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool) -> str | None:
    """Run :func:`why_different` with small parameters, or with parameters of the module's sizes."""
    with on_copies(module):
        parameters = _stand_ins(pattern, module, drawn, small)
        x, arguments = pattern.sample(parameters, drawn)
        with _kept_random_numbers(x):
            if reason := pattern.why_not(module, *arguments(x)):
                return reason
            before = state_of(module)

            def as_written(x: Tensor) -> Any:
                return own_forward(module)(*arguments(x))

            def fused(x: Tensor) -> Any:
                args = arguments(x)
                if pattern.why_not(module, *args):  # under autocast
                    return own_forward(module)(*args)
                return pattern.run(module, *args)

            for training, autocast in _WAYS:
                for each in module.modules():
                    each.training = training
                mode = "" if training else " in evaluation mode"
                mode += " under autocast" if autocast else ""
                with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                    why = _why_unequal(
                        as_written, fused, lambda run: _results(run, x, parameters, drawn)
                    )
                after = state_of(module)
                for name in dict.fromkeys((*before, *after)):
                    if before.get(name) != after.get(name):
                        return f"its forward changes {name}"
                if why is not None:
                    return why if why.startswith(_RAISED) else why + mode
    return None


def _why_unequal(
    one: Callable[[Tensor], Any],
    other: Callable[[Tensor], Any],
    results: Callable[[Callable[[Tensor], Any]], dict[str, Any]],
) -> str | None:
    """Return what differs between the named results of two functions; None if no bit does."""
    made = []
    for run in (one, other):
        try:
            made.append(results(run))
        except Exception as error:
            return f"{_RAISED} {type(error).__name__} on one tensor: {error}"
    wanted, got = made
    different = [name for name in wanted if not _same(wanted[name], got.get(name))]
    return f"differs in {different[0]}" if different else None


def _results(
    run: Callable[[Tensor], Any], x: Tensor, parameters: dict[str, Tensor], drawn: Drawn
) -> dict[str, Any]:
    """Return the output of ``run(x)`` and the gradients for a drawn gradient of it, with names."""
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


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _stand_ins(pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool) -> dict[str, Tensor]:
    """Put drawn parameters into the module; return them by name."""
    parameters: dict[str, Tensor] = {}
    for holder, key, name in pattern.parameters(module):
        old: Any = holder._parameters[key]
        values = drawn.of(name, _smaller(old.shape) if small else tuple(old.shape), old)
        values = values.to(pattern.drawn_dtype(values.dtype))
        fp8 = fp8_part(old)
        made = values if fp8 is None else BlockwiseFP8Weight(values, fp8.recipe)
        parameters[name] = parameter = nn.Parameter(made)
        holder._parameters[key] = pattern.held_as(parameter)
    vars(module).update(pattern.settings(parameters))
    return parameters


def _smaller(shape: Sequence[int]) -> tuple[int, ...]:
    *experts, rows, columns = (1, *shape) if len(shape) == 1 else shape
    sizes = *(min(n, _EXPERTS) for n in experts), min(rows, _FEATURES), min(columns, _FEATURES)
    return sizes[-len(shape) :]


@contextmanager
def _kept_random_numbers(x: Tensor) -> Iterator[None]:
    """Leave the random numbers of torch and Python as they were."""
    state = random.getstate()
    try:
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            yield
    finally:
        random.setstate(state)
