"""Launches recorded once and repeated, which reduces the host time of calls in eager mode.

A recorded function allocates tensors, plans launches from its arguments' shapes and strides, and
launches. None of it depends on values or addresses, so calls with arguments of the same kind
(``specialize.py``) can repeat a recorded one with new addresses: they allocate the same tensors and
call the compiled kernels directly. Results are the same, bit for bit. Calls of one kind may differ
in a number of rows that kernels get as :class:`~.launch.Rows`: that of the first argument or, if it
is no tensor, the first integer.

Every call reads addresses and the caller's stream. Calls share no mutable state except tensor maps,
which depend only on an address: threads, streams and CUDA graph capture need no special handling.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..formats import ceil_div
from . import check_recordings
from .launch import current_stream, watch_launches  # noqa: F401 (players call current_stream)
from .triton_compat import launcher

MAX_MAPS = 2**16
"""Tensor maps, some 300 bytes each, that all recordings make before each drops its older ones."""


class Replay:
    """Calls of ``function`` with arguments of one kind: the first is recorded, the rest repeated.

    ``function`` takes tensors, tuples of tensors (``Quantized``) and other arguments; allocates
    with ``torch.empty`` and similar functions; launches; returns tensors that it allocated, tuples
    of them, or None. With any other op (a copy, a fill) or an unknown Triton, it is called itself.
    """

    __slots__ = ("_function", "player")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.player = function if launcher.launcher() is None else None

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        return (self.player or self._record)(*args)

    def _record(self, *args: Any) -> Any:
        addresses = [x.data_ptr() for x in _tensors(args).values()]
        if len(set(addresses)) < len(addresses) or launcher.hooked():
            # Two arguments at one address cannot be distinguished: a later call may be recorded.
            return self._function(*args)
        with watch_launches() as launches, _Watch() as watch:
            result = self._function(*args)
        try:
            if watch.others:
                raise _NotRepeatable
            kernels = [launcher.raw_kernel(*launch) for launch in launches]
            sized = [launch.sized.data_ptr() for launch, _ in launches if launch.sized is not None]
            self.player = _player(self._function, args, watch.allocated, sized, kernels, result)
            if check_recordings.ENABLED:
                self.player = check_recordings.checked(self._function, self.player)
        except (_NotRepeatable, launcher.Unsupported):
            self.player = self._function
        return result


class _NotRepeatable(Exception):
    pass


class _Watch(TorchDispatchMode):
    """Collects the tensors that a function allocates, and the names of all other ops it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.others: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(out)
        elif not _is_view(func):
            self.others.append(str(func))
        return out


_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


def _is_view(func: Any) -> bool:
    aliases = [value.alias_info for value in func._schema.returns]
    return all(alias is not None and not alias.is_write for alias in aliases)


def _tensors(args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the tensors in ``args`` by their names in a player: a0, or a0_1 inside a tuple."""
    found = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            found[f"a{i}"] = arg
        elif isinstance(arg, tuple):
            found |= {f"a{i}_{j}": x for j, x in enumerate(arg) if isinstance(x, Tensor)}
    return found


# A recording is repeated by generated code, its player, since loops over the recording take twice
# as long. The player of shard_amax, with constants c0, c1, …:
#
#     def play(a0, a1, a2, a3):
#         if hooked():
#             return c0(a0, a1, a2, a3)
#         if current_device() != 0:
#             with torch.cuda.device(0):
#                 return play(a0, a1, a2, a3)
#         empty = fresh_empty()
#         m0 = empty(c1, c2, c3)
#         stream = current_stream(0)
#         p_a0 = a0.data_ptr()
#         p_m0 = m0.data_ptr()
#         c4(c5, c6, c7, stream, c8, c9, c10, c11, None, None, None, None, None, c12, c13, (…))
#         return m0
#
# Numbers are constants too, so calls that differ in their sizes have one text, compiled once.
# Tensors that a player allocates and does not return share one allocation.

_ALIGNMENT = 512


def _player(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    made: list[Tensor],
    sized: list[int],
    kernels: list[launcher.RawKernel],
    result: Any,
) -> Callable[..., Any]:
    """Return a function that repeats ``function`` for arguments like ``args``.

    ``sized``: addresses of tensors of ``made`` that have :class:`~.launch.Rows`.
    """
    names = [f"a{i}" for i in range(len(args))]
    known = _tensors(args)
    device = next(iter(known.values())).get_device()
    if any(x.get_device() != device for x in made):
        raise _NotRepeatable
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c{len(constants) - 1}"

    call = ", ".join(names)
    body = [
        "if hooked():",
        f"    return {constant(function)}({call})",
        f"if current_device() != {device}:",
        f"    with torch.cuda.device({device}):",
        f"        return play({call})",
        "empty = fresh_empty()",
    ]
    for name, arg in zip(names, args, strict=True):
        if isinstance(arg, tuple) and any(isinstance(x, Tensor) for x in arg):
            body.append("".join(f"{name}_{j}, " for j in range(len(arg))) + f"= {name}")
    first_int = (f"a{i}" for i, x in enumerate(args) if type(x) is int)
    rows = "a0.shape[0]" if "a0" in known else next(first_int, None)
    offsets = _offsets(made, result, sized)
    pointers = {name: f"{name}.data_ptr()" for name in known}
    if offsets:
        size = (sum(_padded(made[i]) for i in offsets),)
        body.append(f"scratch = empty({constant(size)}, (1,), {constant(torch.uint8)})")
        body.append("p_scratch = scratch.data_ptr()")
    for i, x in enumerate(made):
        name = f"m{i}"
        known[name] = x
        if i in offsets:
            pointers[name] = f"p_scratch + {constant(offsets[i])}"
            continue
        pointers[name] = f"{name}.data_ptr()"
        geometry = [constant(part) for part in (tuple(x.shape), x.stride(), x.dtype)]
        if rows and x.data_ptr() in sized:
            geometry[0] = f"({rows}, {constant(x.shape[1])})"
        body.append(f"{name} = empty({', '.join(geometry)})")
    body.append(f"stream = current_stream({device})")
    body += [f"p_{name} = {value}" for name, value in pointers.items()]

    def address(tensor: Tensor) -> str:
        at = tensor.data_ptr()
        found = [(name, x) for name, x in known.items() if x.data_ptr() == at]
        if not found:  # a part of one of them
            storage = tensor.untyped_storage().data_ptr()
            parts = known.items()
            found = [(n, x) for n, x in parts if x.untyped_storage().data_ptr() == storage]
        if len(found) != 1:
            raise _NotRepeatable
        ((name, x),) = found
        behind = at - x.data_ptr()
        return f"p_{name} + {constant(behind)}" if behind else f"p_{name}"

    def written(values: list[Any]) -> list[str]:
        return ["None" if x is None else constant(x) for x in values]

    for kernel in kernels:
        head, values = written(kernel.head), written(kernel.arguments)
        head[launcher.STREAM] = "stream"
        for place, tensor in kernel.pointers:
            values[place] = address(tensor)
        for place in kernel.rows:
            values[place] = rows or values[place]
        for place, tensor, make in kernel.maps:
            at, maps = address(tensor), TensorMaps(make, tensor.data_ptr())
            values[place] = f"{constant(maps.known)}.get({at}) or {constant(maps.new)}({at})"
        listed = "".join(f"{value}, " for value in values)
        passed = f"({listed})" if kernel.in_tuple else listed
        body.append(f"{constant(kernel.launch)}({', '.join(head)}, {passed})")
    body.append(f"return {_result(result, made, constant)}")

    player: Callable[..., Any] = _maker(call, "\n".join(body), len(constants))(*constants)
    player.__dict__["compiled"] = [kernel.compiled for kernel in kernels]  # stay loaded
    return player


@functools.lru_cache(maxsize=1024)
def _maker(arguments: str, body: str, constants: int) -> Callable[..., Any]:
    """Return a function of constants c0, c1, … that returns the player with this body."""
    bound = ", ".join(f"c{i}" for i in range(constants))
    play = f"def play({arguments}):\n{textwrap.indent(body, '    ')}\nreturn play"
    text = f"def bind({bound}):\n{textwrap.indent(play, '    ')}"
    scope: dict[str, Any] = {}
    exec(compile(text, "<replay>", "exec"), globals(), scope)
    bind: Callable[..., Any] = scope["bind"]
    return bind


def _padded(x: Tensor) -> int:
    return ceil_div(x.untyped_storage().nbytes(), _ALIGNMENT) * _ALIGNMENT


def _leaves(result: Any) -> list[Tensor]:
    if isinstance(result, tuple):
        return [x for part in result for x in _leaves(part)]
    return [result] if isinstance(result, Tensor) else []


def _offsets(made: list[Tensor], result: Any, sized: list[int]) -> dict[int, int]:
    """Return offsets in one allocation of tensors of ``made`` that are not returned."""
    kept = {x.untyped_storage().data_ptr() for x in _leaves(result)} | {*sized}
    inner = [i for i, x in enumerate(made) if x.untyped_storage().data_ptr() not in kept]
    if len(inner) < 2:
        return {}
    sizes = [_padded(made[i]) for i in inner]
    return {i: sum(sizes[:place]) for place, i in enumerate(inner)}


def _result(result: Any, made: list[Tensor], constant: Callable[[Any], str]) -> str:
    """Return the expression of a result: tensors, views of them, tuples of both, constants."""
    if result is None:
        return "None"
    if isinstance(result, tuple):
        parts = "".join(f"{_result(x, made, constant)}, " for x in result)
        return (
            f"({parts})" if type(result) is tuple else f"new({constant(type(result))}, ({parts}))"
        )
    if not isinstance(result, Tensor):
        return constant(result)
    for i, base in enumerate(made):  # not `is`: under a mode, a factory returns another object
        here = base.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        if here and base.dtype == result.dtype:
            view = tuple(result.shape), result.stride(), result.storage_offset()
            if view == (tuple(base.shape), base.stride(), 0):
                return f"m{i}"
            return f"m{i}.as_strided({', '.join(constant(part) for part in view)})"
    raise _NotRepeatable


# Called by players: torch's own functions without their checks.
hooked = launcher.hooked
new = tuple.__new__  # that of a NamedTuple takes twice as long

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_quick_empty: Callable[..., Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _empty
)


def fresh_empty() -> Callable[..., Tensor]:
    """Return the function that allocates: in deterministic mode the one that fills memory."""
    return _empty if torch._C._get_deterministic_algorithms() else _quick_empty


class TensorMaps:
    """Tensor maps of one argument of one launch: ``known``, by address."""

    _made: ClassVar[int] = 0

    def __init__(self, make: Callable[[int], Any], address: int) -> None:
        """Hold the map for ``address``, and those that ``make`` makes for others."""
        self.known: dict[int, Any] = {}
        self._make, self._turn = make, 0
        self.new(address)

    def new(self, address: int) -> Any:
        """Return a new map; drop the others if all recordings have made ``MAX_MAPS`` since."""
        turn = TensorMaps._made // MAX_MAPS
        if turn != self._turn:
            self._turn = turn
            self.known.clear()
        TensorMaps._made += 1
        tensor_map = self.known[address] = self._make(address)
        return tensor_map
