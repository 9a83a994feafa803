"""Launches recorded once and replayed: what a call costs in eager mode.

A replayed function allocates tensors, plans launches from its arguments' shapes and strides, and
launches. None of it depends on values or addresses, so the second call with arguments of the same
kind (``ops/prepared.py``) can repeat the first with new addresses: it allocates the same tensors
and calls the compiled kernels directly. The device does the same work, bit for bit.

Nothing mutable is shared between calls but the tensor maps, which depend on their key alone, so
threads, streams and a CUDA graph's capture need no care: addresses are read at every call, and the
stream is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..layouts import ceil_div
from . import raw
from .launch import watch_launches

MAX_MAPS = 1024
"""Tensor maps kept for one argument of one launch, by address; then they are made anew."""

Function = TypeVar("Function", bound=Callable[..., Any])


def replayed(function: Function) -> Function:
    """Let ``ops/prepared.py`` replay ``function``.

    It takes tensors and other arguments; allocates with ``torch.empty`` and its
    kin; launches; returns a tensor it allocated, a tuple of such, or None. Any other op on its way
    (a copy, a zero) makes calls of that kind ordinary ones.
    """
    function.prepare = lambda *args: Replay(function)  # type: ignore[attr-defined]
    return function


class Replay:
    """Calls of a function with arguments of one kind: the first is recorded, the rest replayed.

    Attributes:
        settled: what to call from now on, once that is known: the player of the recording, or the
            function itself, if it cannot be replayed.
    """

    __slots__ = ("_function", "settled")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.settled: Callable[..., Any] | None = None if raw.supported() else function

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        return (self.settled or self._first)(*args)

    @property
    def recorded(self) -> bool:
        """Whether there is a recording."""
        return self.settled not in (None, self._function)

    def _first(self, *args: Any) -> Any:
        addresses = [x.data_ptr() for x in args if isinstance(x, Tensor)]
        if len(set(addresses)) < len(addresses) or raw.hooked():
            # Two arguments at one address could not be told apart: another call may be recorded.
            return self._function(*args)
        with watch_launches() as launches, _Watch() as watch:
            result = self._function(*args)
        try:
            if watch.others:
                raise _NotRepeatable
            kernels = [raw.raw_kernel(*launch) for launch in launches]
            self.settled = _player(self._function, args, watch.allocated, kernels, result)
        except (_NotRepeatable, raw.Unsupported):
            self.settled = self._function
        return result


class _NotRepeatable(Exception):
    pass


class _Watch(TorchDispatchMode):
    """Collects the tensors that a function allocates, and notes whether it runs any other op."""

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


# The player of a recording is written as the code one would write by hand, since loops over what
# was recorded take twice as long. That of a cast, with its constants c0, c1, …:
#
#     def play(a0, a1):
#         if hooked():
#             return function(a0, a1)
#         if current_device() != 0:
#             with torch.cuda.device(0):
#                 return play(a0, a1)
#         empty = fresh_empty()
#         m0 = empty(c0, c1, c2)
#         m1 = empty(c3, c4, c5)
#         stream = current_stream(0)
#         p_a0 = a0.data_ptr()
#         p_m0 = m0.data_ptr()
#         p_m1 = m1.data_ptr()
#         c6(4, 1, 1, stream, 94217, 0, 0, None, None, c7, None, None, None, p_a0, p_m0, p_m1, …)
#         return (m0, m1)
#
# Tensors that it allocates and does not return share one allocation.

_ALIGNMENT = 512


def _player(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    made: list[Tensor],
    kernels: list[raw.RawKernel],
    result: Any,
) -> Callable[..., Any]:
    """A function that does for arguments like ``args`` what ``function`` did for them."""
    names = [f"a{i}" for i in range(len(args))]
    known = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)}
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
    offsets = _offsets(made, result)
    pointers = {name: f"{name}.data_ptr()" for name in known}
    if offsets:
        size = sum(_padded(made[i]) for i in offsets)
        body.append(f"scratch = empty(({size},), (1,), {constant(torch.uint8)})")
        body.append("p_scratch = scratch.data_ptr()")
    for i, x in enumerate(made):
        name = f"m{i}"
        known[name] = x
        if i in offsets:
            pointers[name] = f"p_scratch + {offsets[i]}"
            continue
        pointers[name] = f"{name}.data_ptr()"
        geometry = (constant(part) for part in (tuple(x.shape), x.stride(), x.dtype))
        body.append(f"{name} = empty({', '.join(geometry)})")
    body.append(f"stream = current_stream({device})")
    body += [f"p_{name} = {value}" for name, value in pointers.items()]

    def address(tensor: Tensor) -> str:
        found = [name for name, x in known.items() if x.data_ptr() == tensor.data_ptr()]
        if len(found) != 1:
            raise _NotRepeatable
        return f"p_{found[0]}"

    for kernel in kernels:
        values = [repr(x) if x is None or type(x) is int else constant(x) for x in kernel.arguments]
        values[raw.STREAM] = "stream"
        for place, tensor in kernel.pointers:
            values[place] = address(tensor)
        for place, tensor, make in kernel.maps:
            at, maps = address(tensor), constant({tensor.data_ptr(): make(tensor.data_ptr())})
            new = f"new_map({constant(make)}, {maps}, {at})"
            values[place] = f"{maps}.get({at}) or {new}"
        body.append(f"{constant(kernel.launch)}({', '.join(values)})")
    body.append(f"return {_result(result, made, constant)}")

    bound = ", ".join(f"c{i}" for i in range(len(constants)))
    lines = [f"def play({call}):", *(f"    {line}" for line in body)]
    source = "\n".join(
        [f"def bind({bound}):", *(f"    {line}" for line in lines), "    return play"]
    )
    scope: dict[str, Any] = {}
    exec(compile(source, f"<replay of {len(kernels)} launches>", "exec"), globals(), scope)
    player: Callable[..., Any] = scope["bind"](*constants)
    return player


def _padded(x: Tensor) -> int:
    return ceil_div(x.untyped_storage().nbytes(), _ALIGNMENT) * _ALIGNMENT


def _offsets(made: list[Tensor], result: Any) -> dict[int, int]:
    """Where in one allocation those of ``made`` lie that are not returned; nothing for only one."""
    returned = result if isinstance(result, tuple) else (result,)
    kept = {x.untyped_storage().data_ptr() for x in returned if x is not None}
    inner = [i for i, x in enumerate(made) if x.untyped_storage().data_ptr() not in kept]
    if len(inner) < 2:
        return {}
    sizes = [_padded(made[i]) for i in inner]
    return {i: sum(sizes[:place]) for place, i in enumerate(inner)}


def _result(result: Any, made: list[Tensor], constant: Callable[[Any], str]) -> str:
    """The expression of a result: allocated tensors, or views of them."""
    if result is None:
        return "None"
    if isinstance(result, tuple):
        return "".join(["(", *(f"{_result(x, made, constant)}, " for x in result), ")"])
    for i, base in enumerate(made):  # not `is`: a factory under a mode returns another object
        here = base.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        if here and base.dtype == result.dtype:
            view = tuple(result.shape), result.stride(), result.storage_offset()
            if view == (tuple(base.shape), base.stride(), 0):
                return f"m{i}"
            return f"m{i}.as_strided({', '.join(constant(part) for part in view)})"
    raise _NotRepeatable


# What players call: torch's own without the detours.

hooked = raw.hooked

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_quick_empty: Callable[..., Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _empty
)


def fresh_empty() -> Callable[..., Tensor]:
    """What allocates; deterministic mode fills fresh memory, which the quick way does not."""
    return _empty if torch._C._get_deterministic_algorithms() else _quick_empty


def new_map(make: Callable[[int], Any], known: dict[int, Any], address: int) -> Any:
    """A tensor map for an address that has none yet."""
    if len(known) >= MAX_MAPS:
        known.clear()
    tensor_map = known[address] = make(address)
    return tensor_map
