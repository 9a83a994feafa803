"""The patterns of ``fuse``, and the check that a module computes one, bit for bit.

Both run forward and backward on drawn weights, since those of a model may hide a difference: where
``down`` begins as zeros every activation gives the same. Rows of the input have sizes from tiny to
huge, where clamps and epsilons show. Drawn weights have few features, so that a large model on a
CPU takes seconds; a module that reads its own sizes, and raises for others, runs with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..sharding.dtensor import fp8_part
from ..tensor.weight import BlockwiseFP8Weight
from .code_names import CannotWatch
from .fused_class import own_forward, reads_now

_ROWS = (2, 68)
"""Leading dimensions of the input: rows that fill no whole number of blocks."""

FEATURES = 656
"""Most features of a drawn weight: several blocks of every format, and a part of one."""

_EXPERTS = 4
"""Most experts of a drawn stack."""

_RAISED = "raised"
"""The first word where a function raised."""

_EXPONENTS = {torch.float16: (-6, 3)}
_MOST_EXPONENTS = (-30, 30)
"""Half of the rows are scaled by powers of two from this range."""


class _Way(NamedTuple):
    """A way to run a forward: training mode, autocast to bf16, gradients."""

    training: bool = True
    autocast: bool = False
    grad: bool = True

    def __str__(self) -> str:
        words = (
            "" if self.training else " in evaluation mode",
            " under autocast" if self.autocast else "",
            "" if self.grad else " without gradients",
        )
        return "".join(words)


_WAYS = (_Way(), _Way(training=False), _Way(autocast=True), _Way(grad=False))

Sample = tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]
"""The first argument of a forward, and a function that makes all arguments from it."""


class Found(NamedTuple):
    """A module that looks like one of a pattern.

    Attributes:
        computes: what it is taken for, as long as no pattern is verified.
        patterns: those that it may compute, in the order in which they are tried.
        reason: why it can be none of them, by its looks; empty if it may be one.
        readers: the linear layers that read its result, and share its casts.
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

    @classmethod
    def code_of(cls, kind: Any) -> list[Any]:
        """Return the functions that run as the forward of this class."""
        return [kind.forward]

    @classmethod
    def why_unwatched(cls, module: nn.Module) -> str:
        """Return why no later forward could notice a change of what the forward computes."""
        try:
            reads_now(module, cls)
        except CannotWatch as error:
            return f"its forward {error}"
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

    def most_inputs(self, name: str) -> int:
        """Return the most input features of a matrix that is drawn, by its name."""
        return FEATURES

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
    others = [
        name
        for name, x in children
        if x is not None and (name not in known or any(True for _ in x.children()))
    ]
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
    with _as_it_is(module):
        operands = _Operands(pattern, module, drawn, small)
        if reason := pattern.why_not(module, *operands.arguments(operands.x)):
            return reason
        for way in _WAYS:
            for each in module.modules():
                each.training = way.training
            why = _why_unequal(pattern, module, operands, way)
            if why is not None:
                return why
    return None


class _Operands:
    """What a forward is verified on, and a gradient of its output.

    Attributes:
        parameters: drawn parameters, which the module holds, by name.
        memory: their values.
        x: the first argument.
        arguments: a function that makes all arguments from it.
    """

    def __init__(self, pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool) -> None:
        self._drawn = drawn
        self.parameters, self.memory = _stand_ins(pattern, module, drawn, small)
        self._before = {name: values.clone() for name, values in self.memory.items()}
        self.x, self.arguments = pattern.sample(self.parameters, drawn)

    def results(self, run: Callable[[Tensor], Any], with_grad: bool) -> dict[str, Any]:
        """Return, by name, what ``run(x)`` returns and writes, and gradients for a drawn one."""
        with torch.set_grad_enabled(with_grad):
            leaf = self.x.clone().requires_grad_()
            y = run(leaf)
            if not isinstance(y, Tensor):
                return {"the type of its output": type(y).__name__}
            made = {"its output": y.detach(), "what it writes to its input": leaf.detach()}
            if not with_grad:
                return made
            grad = self._drawn.of("the gradient of the output", tuple(y.shape), y)
            inputs = {"its input": leaf, **self.parameters}
            grads = torch.autograd.grad(y, list(inputs.values()), grad, allow_unused=True)
        named = {f"the gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}
        return {**made, **named}

    def written(self) -> list[str]:
        """Return the names of the parameters whose values have changed."""
        return [x for x, before in self._before.items() if not _same(self.memory[x], before)]


def _why_unequal(pattern: Pattern, module: nn.Module, operands: _Operands, way: _Way) -> str | None:
    """Return what differs if the module runs as written and fused; None if no bit does."""

    def as_written(x: Tensor) -> Any:
        return own_forward(module)(*operands.arguments(x))

    def fused(x: Tensor) -> Any:
        args = operands.arguments(x)
        if pattern.why_not(module, *args):  # under autocast
            return own_forward(module)(*args)
        return pattern.run(module, *args)

    device = operands.x.device
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=way.autocast),
        _kept_random_numbers(device) as drew,
    ):
        try:
            wanted = operands.results(as_written, way.grad)
            got = operands.results(fused, way.grad)
        except Exception as error:
            return f"{_RAISED} {type(error).__name__} on one tensor: {error}"
        if drew():
            return "its forward draws random numbers"
    for name in operands.written():
        return f"its forward changes {name}"
    different = [name for name in wanted if not _same(wanted[name], got.get(name))]
    return f"differs in {different[0]}{way}" if different else None


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _stand_ins(
    pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Put drawn parameters into the module; return them, and their memory, by name."""
    parameters: dict[str, Tensor] = {}
    memory: dict[str, Tensor] = {}
    for holder, key, name in pattern.parameters(module):
        old: Any = holder._parameters[key]
        shape = _smaller(old.shape, pattern.most_inputs(name)) if small else tuple(old.shape)
        values = drawn.of(name, shape, old)
        values = values.to(pattern.drawn_dtype(values.dtype), copy=True)
        memory[name] = values
        fp8 = fp8_part(old)
        made = values if fp8 is None else BlockwiseFP8Weight(values, fp8.recipe)
        parameters[name] = parameter = nn.Parameter(made)
        holder._parameters[key] = pattern.held_as(parameter)
    vars(module).update(pattern.settings(parameters))
    return parameters, memory


def _smaller(shape: Sequence[int], inputs: int) -> tuple[int, ...]:
    """Return a shape with at most ``FEATURES`` outputs, this number of inputs, and few experts."""
    if len(shape) == 1:
        return (min(shape[0], FEATURES),)
    *experts, rows, columns = shape
    return *(min(n, _EXPERTS) for n in experts), min(rows, FEATURES), min(columns, inputs)


@contextmanager
def _as_it_is(module: nn.Module) -> Iterator[None]:
    """Undo afterwards what is assigned to the modules in ``module``, and to their parameters."""
    before = [(each, vars(each)) for each in module.modules()]
    try:
        for each, own in before:
            copies = {key: dict(x) if type(x) is dict else x for key, x in own.items()}
            object.__setattr__(each, "__dict__", copies)
        yield
    finally:
        for each, own in before:
            object.__setattr__(each, "__dict__", own)


@contextmanager
def _kept_random_numbers(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leave the random numbers of torch as they were; yield a function that tells their use."""
    devices = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in devices)]

    with torch.random.fork_rng(devices):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))
