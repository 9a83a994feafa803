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
from .recorder import Recorder, Refused

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

_WAYS = {
    "": (True, False, True),
    " in evaluation mode": (False, False, True),
    " under autocast": (True, True, True),
    " without gradients": (False, False, False),
}
"""How a forward is run: in training mode, under autocast to bf16, with gradients."""

Sample = tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]
"""The first argument of a forward, and a function that makes all arguments from it."""


Verified = tuple["Pattern | None", str]
"""A pattern that a module computes, or None and why it computes none."""


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

    @staticmethod
    def tables_of(x: Any) -> Sequence[str]:
        """Name the dictionaries that are all the state of an object which forwards may read."""
        return ()

    def verify(self, module: nn.Module, recorder: Recorder, drawn: Drawn) -> Verified:
        """Return the pattern that the module computes, or None and what differs."""
        why = why_different(self, recorder, drawn)
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


def why_different(pattern: Pattern, recorder: Recorder, drawn: Drawn) -> str | None:
    """Return why a module does not run as ``pattern`` does, or what differs; None if it does."""
    why = _why_different(pattern, recorder, drawn, True)
    if why is not None and why.startswith(_RAISED):  # it may read its own sizes
        return _why_different(pattern, recorder, drawn, False)
    return why


def _why_different(pattern: Pattern, recorder: Recorder, drawn: Drawn, small: bool) -> str | None:
    """Run :func:`why_different` with small parameters, or with parameters of the module's sizes."""
    twin = recorder.twin()
    parameters = _stand_ins(pattern, twin, drawn, small)
    x, arguments = pattern.sample(parameters, drawn)
    if reason := pattern.why_not(twin, *arguments(x)):
        return reason

    def fused(*args: Any) -> Any:
        if pattern.why_not(twin, *args):  # under autocast
            return recorder.forward(*args)
        return pattern.run(twin, *args)

    for mode, (training, autocast, grad) in _WAYS.items():
        for each in twin.modules():
            each.training = training
        try:
            with (
                torch.random.fork_rng([x.device] if x.is_cuda else []),
                torch.autocast(x.device.type, torch.bfloat16, enabled=autocast),
                torch.set_grad_enabled(grad),
            ):
                leaf = x.clone().requires_grad_(grad)
                args = arguments(leaf)
                with _no_writes(args, parameters), recorder.watching():
                    wanted = _results(recorder.forward, leaf, args, parameters, drawn)
                leaf = x.clone().requires_grad_(grad)
                got = _results(fused, leaf, arguments(leaf), parameters, drawn)
        except Refused as refused:
            return str(refused)
        except Exception as error:
            return f"{_RAISED} {type(error).__name__} on one tensor: {error}"
        for name in wanted:
            if not _same(wanted[name], got.get(name)):
                return f"differs in {name}{mode}"
    return None


def _results(
    run: Callable[..., Any],
    leaf: Tensor,
    args: tuple[Any, ...],
    parameters: dict[str, Tensor],
    drawn: Drawn,
) -> dict[str, Any]:
    """Return the output of ``run(*args)``, and gradients for a drawn gradient of it, with names."""
    y = run(*args)
    if not isinstance(y, Tensor):
        return {"the type of its output": type(y).__name__}
    results: dict[str, Any] = {"its output": y.detach(), "attributes of its output": [*vars(y)]}
    if leaf.requires_grad:
        gradient = drawn.of("the gradient of the output", tuple(y.shape), y)
        inputs = {"its input": leaf, **parameters}
        grads = torch.autograd.grad(y, list(inputs.values()), gradient, allow_unused=True)
        results |= {f"the gradient of {x}": g for x, g in zip(inputs, grads, strict=True)}
    return results


@contextmanager
def _no_writes(args: tuple[Any, ...], parameters: dict[str, Tensor]) -> Iterator[None]:
    """Check that neither arguments nor parameters change, and that no random numbers are drawn.

    Raises:
        Refused: they do, or are.
    """
    tensors = {f"its argument {i}": x for i, x in enumerate(args) if isinstance(x, Tensor)}
    before = {
        name: (x, {*vars(x)}, _values(x).clone()) for name, x in (tensors | parameters).items()
    }
    random = _random_state(args[0])
    yield
    for name, (x, attributes, values) in before.items():
        if vars(x).keys() != attributes or not torch.equal(_values(x), values):
            raise Refused(f"its forward changes {name}")
    if not all(map(torch.equal, random, _random_state(args[0]))):
        raise Refused("its forward draws random numbers")


def _values(x: Tensor) -> Tensor:
    return x.master if isinstance(x, BlockwiseFP8Weight) else x.detach()


def _random_state(x: Tensor) -> list[Tensor]:
    """Return the state of the generators that a forward of ``x`` would use."""
    state = [torch.get_rng_state()]
    return [*state, torch.cuda.get_rng_state(x.device)] if x.is_cuda else state


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _stand_ins(pattern: Pattern, module: nn.Module, drawn: Drawn, small: bool) -> dict[str, Tensor]:
    """Put drawn parameters into the module; return them by name."""
    parameters: dict[str, Tensor] = {}
    for holder, key, name in pattern.parameters(module):
        old: Any = holder._parameters[key]
        shape = _smaller(old.shape, pattern.most_inputs(name)) if small else tuple(old.shape)
        values = drawn.of(name, shape, old)
        values = values.to(pattern.drawn_dtype(values.dtype), copy=True)
        fp8 = fp8_part(old)
        made = values if fp8 is None else BlockwiseFP8Weight(values, fp8.recipe)
        parameters[name] = parameter = nn.Parameter(made)
        holder._parameters[key] = pattern.held_as(parameter)
    vars(module).update(pattern.settings(parameters))
    return parameters


def _smaller(shape: Sequence[int], inputs: int) -> tuple[int, ...]:
    if len(shape) == 1:
        return (min(shape[0], FEATURES),)
    *experts, rows, columns = shape
    return *(min(n, _EXPERTS) for n in experts), min(rows, FEATURES), min(columns, inputs)
