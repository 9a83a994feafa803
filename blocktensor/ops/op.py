"""Declare an op once, and derive its schema, fake, registration and eager call.

The body of a declared function is its fake: it returns an uninitialised result. An eager call never
runs it, but the backend's function of the same name, which is chosen once for each kind of
arguments (``runtime/specialize.py``). If a call must go through the dispatcher (compilers, dispatch
modes, tensors without memory), it calls the registered op, which then runs the same function.

To add an op, declare a function, and write functions of the same name in ``reference.py`` and in a
kernel file that a table of backends names (``registry.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from .formats import BlockFormat, Quantized, named
from .registry import Backend
from .runtime import build_player
from .runtime.specialize import Specialized, recorded

P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, Specialized] = {}
"""All declared ops, with their decisions, by name."""


def op(
    backend: Callable[..., Backend[Any]] | None = None,
    *,
    check: Callable[..., object] | None = None,
    decide: Callable[..., Callable[..., Any]] | None = None,
    formats: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register an op and return the function that runs it.

    All parameters are functions of the op's arguments.

    Args:
        backend: returns the backend whose function of the op's name runs the call.
        check: raises if arguments do not fit.
        decide: instead of ``backend``, returns the function that runs calls of this kind.
        formats: returns the formats of the results, nested like the results, with ``Tensor`` for a
            plain tensor and None for no result; by default, the i-th result has the i-th format
            among the arguments, or the last one.
        flops: returns the FLOPs; it gets shapes in place of tensors.
    """

    def declare(fake: Callable[P, R]) -> Callable[P, R]:
        name, schema = fake.__name__, _Schema(fake)
        formats_of = formats or schema.formats_of_arguments

        def checked(*args: Any) -> Callable[..., Any]:
            if check is not None:
                check(*args)
            if decide is not None:
                return decide(*args)
            assert backend is not None
            return runner(backend(*args), name)

        def dispatch(*args: Any) -> Any:
            if check is not None:
                check(*args)
            made = registered(*schema.flat(args))
            if isinstance(made, Tensor):
                return made
            return _formed(formats_of(*args), iter(made))

        def counted(*flat: Any, **_: Any) -> int:
            assert flops is not None
            return flops(*schema.arguments(*flat))

        def compute(*flat: Any) -> Any:
            _refuse_tangents(name, flat)
            args = schema.arguments(*flat)
            made = schema.tensors(table.run(*args))
            if (recording := table.recording(args)) is not None:
                _repeat(name, schema.letters, recording)
            return made

        OPS[name] = table = Specialized(checked, dispatch)
        registered = torch.library.custom_op(
            f"blocktensor::{name}", compute, mutates_args=(), schema=schema.text
        )
        make: Callable[..., Any] = fake
        registered.register_fake(lambda *flat: schema.tensors(make(*schema.arguments(*flat))))
        if flops is not None:
            register_flop_formula(getattr(torch.ops.blocktensor, name))(counted)
        return _called(fake, table)

    return declare


_exclude, _KEYS = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey


def _refuse_tangents(name: str, flat: Sequence[Any]) -> None:
    """Refuse forward-mode AD, whose tangents would silently end at an op.

    Autograd functions refuse it where they run. A compiled graph without gradients calls the ops
    alone.

    Raises:
        NotImplementedError: an argument has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    tensors = [x for x in flat if isinstance(x, Tensor) and not x.is_inference()]
    # ops run below autograd, which alone knows tangents
    with _exclude(_KEYS.AutogradFunctionality, False), _exclude(_KEYS.ADInplaceOrView, False):
        has_tangent = any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if has_tangent:
        raise NotImplementedError(
            f"forward-mode AD (jvp) through blocktensor.{name}, which has no rule for it: use "
            f"reverse mode (torch.autograd.grad), or leave these modules unconverted "
            f"(convert(..., skip=[...]))"
        )


def _repeat(name: str, letters: str, recording: Any) -> None:
    """Repeat the call of a registered op that this thread has computed without Python.

    Compiled graphs call registered ops. The layers that ``custom_op`` puts before an op run only if
    autograd, a mode or a subclass must see the call.
    """
    player = build_player.player()
    if name not in _REPEATED:
        _REPEATED.add(name)
        player.repeat_op(name, letters)
    player.remember(recording)


_REPEATED: set[str] = set()
"""Names of ops whose calls ``player.cpp`` repeats."""


def runner(backend: Backend[Any], name: str) -> Callable[..., Any]:
    """Return a backend's function of this name; if it only launches kernels, recorded."""
    function = backend.function(name)
    assert function is not None, f"{backend.name} has no {name}"
    return recorded(function, backend.launches)


def unregistered(
    reference: Callable[..., Any],
    backend: Callable[..., Backend[Any]],
    with_rows: tuple[int, ...] = (),
) -> Specialized:
    """Return a reference that runs on its backend; compilers see the ops of the reference.

    ``with_rows``: see :class:`~.runtime.specialize.Specialized`.
    """

    def decide(*args: Any) -> Callable[..., Any]:
        return runner(backend(*args), reference.__name__)

    return Specialized(decide, reference, with_rows)


def _called(fake: Callable[P, R], table: Specialized) -> Callable[P, R]:
    """Return a function with the signature of ``fake`` that calls ``table``.

    It is compiled from source text, so that Python itself handles defaults and keywords, which
    saves host time. Its frames have the name, file and line of ``fake``.
    """
    names, code = ", ".join(inspect.signature(fake).parameters), fake.__code__
    text = f"def {fake.__name__}({names}): return run({names})"
    scope: dict[str, Any] = {"run": table.__call__}
    exec(compile("\n" * (code.co_firstlineno - 1) + text, code.co_filename, "exec"), scope)
    call: Any = scope[fake.__name__]
    call.__defaults__ = fake.__defaults__
    made: Callable[P, R] = functools.update_wrapper(call, fake)
    return made


class _Schema:
    """The schema of a declared function, and its arguments and results in the dispatcher.

    A registered op takes tensors and strings: a format as its name, a :class:`Quantized` as data,
    scale and name. It returns data and scale of each result; in one list if a result may be absent.
    """

    _TYPES: dict[Any, str] = {  # noqa: RUF012
        Tensor: "Tensor",
        BlockFormat: "str",
        torch.dtype: "ScalarType",
        int: "SymInt",
        float: "float",
        bool: "bool",
        str: "str",
    }

    def __init__(self, declared: Callable[..., Any]) -> None:
        self._kinds = get_type_hints(declared)
        self._returned = self._kinds.pop("return")
        parameters = inspect.signature(declared).parameters.values()
        self._defaults = {x.name: x.default for x in parameters}
        self.text = f"({', '.join(self._parameters())}) -> {self._results()}"

    def _parameters(self) -> list[str]:
        operands = sum(_is_cast(kind) for kind in self._kinds.values())
        listed: list[str] = []
        has_default = True  # all later parameters have defaults, too
        for name, kind in reversed(self._kinds.items()):
            default = self._defaults[name]
            has_default = has_default and isinstance(default, (bool, NoneType))
            if kind is Quantized and operands == 1:
                listed.append("Tensor data, Tensor scale, str format")
            elif _is_cast(kind):
                mark = "?" * (kind is not Quantized)
                parts = f"Tensor{mark} {name}", f"Tensor{mark} {name}_scale"
                listed.append(f"{', '.join(parts)}, str{mark} {name}_format")
            else:
                optional = NoneType in get_args(kind)
                if optional:
                    (kind,) = (x for x in get_args(kind) if x is not NoneType)
                written = "str" if get_origin(kind) is Literal else self._TYPES[kind]
                listed.append(f"{written}{'?' * optional} {name}" + f"={default}" * has_default)
        return listed[::-1]

    @property
    def letters(self) -> str:
        """A letter for each argument of the registered op, as ``player.cpp`` reads them.

        ``t``: a tensor; ``q``: data or scale of a cast; ``i``: an integer; ``o``: another argument.
        """
        made = ""
        for kind in self._kinds.values():
            kinds = (kind, *get_args(kind))
            made += "qqo" if _is_cast(kind) else "t" if Tensor in kinds else "oi"[int in kinds]
        return made

    def _results(self) -> str:
        if self._returned is Tensor:
            return "Tensor"
        if any(part is not Quantized for part in self._parts):
            return "Tensor[]"
        return f"({', '.join(['Tensor'] * 2 * len(self._parts))})"

    @property
    def _parts(self) -> tuple[Any, ...]:
        is_tuple = get_origin(self._returned) is tuple
        return get_args(self._returned) if is_tuple else (self._returned,)

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of the registered op; a format that is the default becomes None."""
        flat: list[Any] = []
        before: BlockFormat | None = None  # what a default of None stands for
        kinds = self._kinds.values()
        for kind, default, x in zip(kinds, self._defaults.values(), args, strict=True):
            if x is None and _is_cast(kind):
                flat += [None, None, None]
            elif isinstance(x, Quantized):
                flat += [x.data, x.scale, x.format.name]
            elif isinstance(x, BlockFormat):
                flat.append(None if default is None and x is before else x.name)
                before = x
            else:
                flat.append(x)
        return flat

    @functools.cached_property
    def arguments(self) -> Any:
        """A function that converts the registered op's arguments to the declared function's.

        It is compiled from source text for speed: compiled graphs call it for every op. The
        dispatcher omits trailing arguments that are defaults.
        """
        given, passed = [], []
        for name, kind in self._kinds.items():
            default = "" if self._defaults[name] is inspect.Parameter.empty else f"={name}"
            if _is_cast(kind):
                given += [f"{name}, {name}_scale, {name}_format"]
                form = f"Quantized({name}, {name}_scale, named({name}_format))"
                passed.append(
                    form if kind is Quantized else f"{name} if {name} is None else {form}"
                )
            else:
                given.append(f"{name}{default}")
                is_format = BlockFormat in (kind, *get_args(kind))
                passed.append(f"None if {name} is None else named({name})" if is_format else name)
        text = f"lambda {', '.join(given)}: ({', '.join(passed)},)"
        return eval(text, {"Quantized": Quantized, "named": named, **self._defaults})

    @functools.cached_property
    def tensors(self) -> Callable[[Any], Any]:
        """A function that converts the declared function's result to the registered op's."""
        if self._returned in (Tensor, Quantized):
            return lambda made: made if isinstance(made, Tensor) else made[:2]
        return lambda made: [*_tensors(made)]

    def formats_of_arguments(self, *args: Any) -> Any:
        """Return the format of the i-th result: the i-th one among the arguments, or the last."""
        formats = [x.format if isinstance(x, Quantized) else x for x in args]
        formats = [x.stored for x in formats if isinstance(x, BlockFormat)]
        if self._returned is Quantized:
            return formats[0]
        return tuple(formats[min(i, len(formats) - 1)] for i in range(len(self._parts)))


def _is_cast(kind: Any) -> bool:
    """Return True for a parameter that is a :class:`Quantized`, or may be one."""
    return Quantized in (kind, *get_args(kind))


def _tensors(made: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, which may have parts that are absent."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, Quantized):
        yield from made[:2]
    elif made is not None:
        for part in made:
            yield from _tensors(part)


def _formed(formats: Any, tensors: Iterator[Tensor]) -> Any:
    """Return results, nested like ``formats``, built from data and scales or plain tensors."""
    if formats is None:
        return None
    if formats is Tensor:
        return next(tensors)
    if isinstance(formats, BlockFormat):
        return Quantized(next(tensors), next(tensors), formats)
    parts = [_formed(part, tensors) for part in formats]
    return tuple(parts) if type(formats) is tuple else type(formats)(*parts)
