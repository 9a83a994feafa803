"""Define patterns for ``fuse``, and check bit for bit that a module computes one.

Module and pattern run forward and backward on random weights, since the weights of a model may hide
a difference: if ``down`` is initialized to zeros, every activation gives the same result. Rows of
the input range from tiny to huge values, where clamps and epsilons matter. The random weights have
few features, so that the check of a large model on a CPU takes seconds; a module that reads its own
sizes, and raises for others, runs with its own sizes.
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
from .forward_reads import written_class
from .fused_class import own_forward, reads_now

_ROWS = (2, 68)
"""Leading dimensions of the input: the rows are not a whole number of blocks."""

FEATURES = 656
"""Most features of a drawn weight: several blocks of every format, and a part of one."""

_EXPERTS = 4
"""Most experts of a drawn stack."""

_RAISED = "raised"
"""The first word of the difference if a function raised."""

_EXPONENTS = {torch.float16: (-6, 3)}
_MOST_EXPONENTS = (-30, 30)
"""Half of the rows are scaled by powers of two from this range."""


class _Way(NamedTuple):
    """The settings of one run: training mode, autocast to bf16, gradients."""

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
"""The first argument of a forward, and a function that returns all arguments, given the first."""


class Found(NamedTuple):
    """A module that may match a pattern.

    Attributes:
        computes: what it seems to compute, as long as no pattern is verified.
        patterns: those that it may compute, in the order in which they are tried.
        reason: why it cannot match any of them; empty if it may match one.
        readers: the linear layers that read its result, and share its casts.
    """

    name: str
    module: nn.Module
    computes: str
    patterns: Sequence[Pattern]
    reason: str
    readers: Sequence[nn.Module] = ()


class Pattern:
    """A computation of a module, and one function that runs it. Each kind has its own file.

    Attributes:
        inputs: the number of arguments of the module's forward.
        in_graphs: True if compilers trace the function, False for the module's own forward.
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
    def code_of(cls, module: nn.Module) -> list[Any]:
        """Return the functions that the module's own forward runs."""
        return [written_class(module).forward]

    @classmethod
    def why_unwatched(cls, module: nn.Module) -> str:
        """Return why ``fuse`` must not replace the forward; empty if it may.

        It was replaced before, or later forwards could not notice a change of what it reads.
        """
        if "forward" in module.__dict__:
            return "its forward was replaced on the instance"
        try:
            reads_now(module, cls)
        except CannotWatch as error:
            return f"its forward {error}"
        return ""

    def with_recompute(self, recompute: bool) -> Pattern:
        """Return the pattern with this argument of ``fuse``."""
        return self

    def why_not(self, module: Any, *args: Any) -> str | None:
        """Return why the module's own forward must run on ``args``, if it must.

        It is called in every forward: hooks, adapters and dtypes may change after the fusion.
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
        """List the parameters to draw, each as the module that holds it, its key and its name."""
        raise NotImplementedError

    def drawn_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to draw for a parameter of this dtype."""
        return dtype

    def most_inputs(self, name: str) -> int:
        """Return the most input features of the drawn matrix of this name."""
        return FEATURES

    def held_as(self, parameter: nn.Parameter) -> Any:
        """Return a drawn parameter as the module is to hold it."""
        return parameter

    def settings(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return attributes that the module needs for drawn parameters."""
        return {}

    def sample(self, parameters: Mapping[str, Tensor], drawn: Drawn) -> Sample:
        """Draw arguments of a forward."""
        raise NotImplementedError


def held_by(module: nn.Module, known: Collection[str | None]) -> list[str]:
    """Return the names of a module's contents other than ``known``, and of their contents."""
    children = module._modules.items()
    others = [
        name
        for name, x in children
        if x is not None and (name not in known or any(True for _ in x.children()))
    ]
    own = (*module._parameters.items(), *module._buffers.items())
    return others + [name for name, x in own if x is not None and name not in known]


class Drawn:
    """Random operands for verification, shared between all modules of a call."""

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
        """Draw an input for a weight, with rows from tiny to huge values."""
        return self.of("x", (*_ROWS, weight.shape[-1]), weight, spread=True)


def why_different(pattern: Pattern, module: nn.Module, drawn: Drawn) -> str | None:
    """Return how ``module`` differs from ``pattern``, or how it fails; None if it does not."""
    why = _why_different(pattern, module, drawn, True)
    if why is not None and why.startswith(_RAISED):  # the module may read its own sizes
        return _why_different(pattern, module, drawn, False)
    return why


def _why_different(pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool) -> str | None:
    """Compare with small parameters, or with parameters of the module's own sizes."""
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
    """The operands of a verification, and a gradient of the output.

    Attributes:
        parameters: drawn parameters, which the module holds, by name.
        memory: their values.
        x: the first argument.
        arguments: a function that returns all arguments, given the first.
    """

    def __init__(self, pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool) -> None:
        self._drawn = drawn
        self.parameters, self.memory = _stand_ins(pattern, module, drawn, small)
        self._before = {name: values.clone() for name, values in self.memory.items()}
        self.x, self.arguments = pattern.sample(self.parameters, drawn)

    def results(self, run: Callable[[Tensor], Any], with_grad: bool) -> dict[str, Any]:
        """Return, by name, the result of ``run(x)``, what it writes, and the gradients."""
        with torch.set_grad_enabled(with_grad):
            leaf = self.x.clone().requires_grad_()
            y = run(leaf)
            if not isinstance(y, Tensor):
                return {"the type of its output": type(y).__name__}
            outputs = {"its output": y.detach(), "what it writes to its input": leaf.detach()}
            if not with_grad:
                return outputs
            grad = self._drawn.of("the gradient of the output", tuple(y.shape), y)
            inputs = {"its input": leaf, **self.parameters}
            grads = torch.autograd.grad(y, list(inputs.values()), grad, allow_unused=True)
        named = {f"the gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}
        return {**outputs, **named}

    def written(self) -> list[str]:
        """Return the names of the parameters whose values have changed."""
        return [x for x, before in self._before.items() if not _same(self.memory[x], before)]


def _why_unequal(pattern: Pattern, module: nn.Module, operands: _Operands, way: _Way) -> str | None:
    """Return how the module and its fused form differ; None if all bits are equal."""

    def as_written(x: Tensor) -> Any:
        return own_forward(module)(*operands.arguments(x))

    def forward(x: Tensor) -> Any:  # so named, it counts as a layer (`layer_runs`), as when used
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
            got = operands.results(forward, way.grad)
        except Exception as error:
            return f"{_RAISED} {type(error).__name__} on one tensor: {error}"
        if drew():
            return "its forward draws random numbers"
    for name in operands.written():
        return f"its forward changes {name}"
    different = [name for name in wanted if not _same(wanted[name], got.get(name))]
    return f"differs in {different[0]}{way}" if different else None


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return before is after
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[before.itemsize]
    return torch.equal(before.contiguous().view(bits), after.contiguous().view(bits))


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
    """Return a shape with limited numbers of outputs, inputs and experts."""
    if len(shape) == 1:
        return (min(shape[0], FEATURES),)
    *experts, rows, columns = shape
    return *(min(n, _EXPERTS) for n in experts), min(rows, FEATURES), min(columns, inputs)


@contextmanager
def _as_it_is(module: nn.Module) -> Iterator[None]:
    """Undo, at the end, assignments to the modules in ``module`` and to their parameters."""
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
    """Restore torch's random state; yield a function that tells if random numbers were used."""
    devices = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in devices)]

    with torch.random.fork_rng(devices):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))
