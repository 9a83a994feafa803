"""Record the launches of a call, as data that ``player.cpp`` repeats.

A recorded function allocates tensors, plans launches from its arguments' shapes and strides, and
launches. None of it depends on values or addresses, so calls with arguments of the same kind
(``specialize.py``) can repeat a recorded one with new addresses: they allocate the same tensors and
launch the same kernels. Results are the same, bit for bit. Calls of one kind may differ in one
number of rows, which kernels get as :class:`~.launch.Rows`: the rows of the first argument or, if
this is not a tensor, the first integer. Rows in groups are of one kind if they round up to the same
multiple of ``GROUP_STEP``; for the arguments that a sequence names (``specialize.py``), of
``ROW_STEP``. What a launch depends on but for :class:`~.launch.Rows` is then the same: tiles have
whole steps of rows, and layouts are padded to them.

A recording holds no address and no mutable state: threads, streams and CUDA graph capture need no
special handling.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..formats import ceil_div
from .launch import Rows, watch_launches
from .triton_compat import launcher


class NotRepeatable(Exception):
    """Raised for calls that do more than allocate and launch; the message names the op."""


def record(
    function: Callable[..., Any], args: tuple[Any, ...], player: Any, with_rows: int = 0
) -> tuple[Any, Any]:
    """Call a function, and return its result and the recording of the call.

    The function takes tensors, tuples of them (``Quantized``) and other arguments; allocates with
    ``torch.empty`` and similar functions; launches; and returns tensors that it allocated, tuples
    of them, or None.

    Args:
        function: the function.
        args: its arguments.
        player: the module of ``player.cpp``.
        with_rows: has a bit for each argument that may have other numbers of rows in other calls.

    Returns:
        The result, and the recording: None if this call cannot be recorded but another of its kind
        may be, or the function itself if no call can be repeated (it runs another op, or Triton
        alone can launch one of its kernels).
    """
    given = tensors_in(args)
    addresses = {x.data_ptr() for x in given}
    if len(addresses) < len(given) or launcher.hooked():
        # Two arguments at one address cannot be told apart.
        return function(*args), None
    with watch_launches() as launches, _Watch() as watch:
        result = function(*args)
    try:
        if watch.others:
            raise NotRepeatable(f"it runs {watch.others[0]}")
        rows = player.rows_of(args, with_rows)
        call = _Call(given, watch.allocated, launches, result, None if rows < 0 else rows)
        return result, player.Recording(*call.as_data(), with_rows)
    except launcher.UnknownTriton as error:
        _warn_once(str(error))
        return result, function
    except (NotRepeatable, launcher.Unsupported):
        return result, function


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"blocktensor: kernels are launched by Triton itself, which takes several times the host "
        f"time: Triton {triton.__version__} describes them in another way than 3.6 to 3.9 "
        f"({reason}). Results are the same",
        stacklevel=2,
    )


class _Watch(TorchDispatchMode):
    """A mode that collects the tensors that a function allocates, and the names of other ops."""

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


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, in the order in which ``player.cpp`` meets them."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple):
        return [x for value in values for x in tensors_in(value)]
    return []


_ALIGNMENT = 512
_FIXED = -1
"""Stands for a number that does not depend on the rows (``Map::kFixed`` of ``player.cpp``)."""


class _Call:
    """One call to record: its arguments, allocations, launches and results.

    Attributes:
        given: the tensors among its arguments.
        made: the tensors that it allocated.
        rows: the number of rows that other calls may have otherwise; None if there is none.
    """

    def __init__(
        self,
        given: list[Tensor],
        made: list[Tensor],
        launches: list[tuple[Any, Any]],
        result: Any,
        rows: int | None,
    ) -> None:
        self.given, self.made, self.launches, self.result = given, made, launches, result
        self.rows = rows
        self.device = given[0].device
        if any(x.device != self.device for x in made):
            raise NotRepeatable("it allocates on another device")
        sized = [x for each, _ in launches for x in each.sized if x.shape[0] == rows]
        self._sized = {x.data_ptr(): x.stride(0) for x in sized}
        # Tensors that are not returned share the first allocation, unless their numbers of rows
        # differ.
        inner = self._inner()
        self._offsets, size = {}, 0
        for i in inner if len(inner) > 1 else ():
            self._offsets[i] = size
            size += ceil_div(made[i].untyped_storage().nbytes(), _ALIGNMENT) * _ALIGNMENT
        self._allocations: list[tuple[Any, ...]] = []
        self._index: dict[int, int] = {}  # by the number of a tensor
        if size:
            self._allocations.append(((size,), (1,), torch.uint8, False))
        for i, x in enumerate(made):
            if i not in self._offsets:
                self._index[i] = len(self._allocations)
                # Scales are transposed lines of memory; there may be as many lines as rows.
                has_rows = x.shape[:1] == (rows,) and x.stride(0) == self._sized.get(x.data_ptr())
                self._allocations.append((tuple(x.shape), x.stride(), x.dtype, has_rows))

    def as_data(self) -> tuple[Any, ...]:
        """Return the arguments of ``Recording`` of ``player.cpp``."""
        launches = [self._launch(each, compiled) for each, compiled in self.launches]
        compiled = [each for _, each in self.launches]
        return self.device, self._allocations, launches, self._returned(self.result), compiled

    def _inner(self) -> list[int]:
        kept = {x.untyped_storage().data_ptr() for x in _leaves(self.result)}
        kept |= self._sized.keys()
        storages = (x.untyped_storage().data_ptr() for x in self.made)
        return [i for i, storage in enumerate(storages) if storage not in kept]

    def _launch(self, launch: Any, compiled: Any) -> tuple[Any, ...]:
        kernel = launcher.kernel_of(launch, compiled)
        parameters: list[tuple[Any, ...]] = []
        for kind, first, *rest in kernel.parameters:
            if kind == "map":
                *others, sizes = rest
                beyond = [self._beyond_rows(size) for size in sizes]
                sizes = [int(size) for size in sizes]
                parameters.append((kind, *self._place(first), *others, sizes, beyond))
            elif kind == "pointer":
                parameters.append((kind, *self._place(first)))
            elif (beyond_rows := self._beyond_rows(first)) != _FIXED:
                parameters.append(("rows", int(first), beyond_rows))
            else:
                parameters.append(("number", int(first)))
        return *kernel.configuration, parameters

    def _beyond_rows(self, size: int) -> int:
        """Return how much larger a number is than the number of rows that it depends on."""
        if type(size) is not Rows or size - size.beyond != self.rows:
            return _FIXED
        return size.beyond

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Return the tensor of the call that contains a pointer, and the offset in bytes."""
        at = tensor.data_ptr()
        known = [(i, x) for i, x in enumerate(self.given)]
        known += [(len(self.given) + i, x) for i, x in enumerate(self.made)]
        owners = [(i, x) for i, x in known if x.data_ptr() == at]
        if not owners:  # the pointer is a part of an argument
            storage = tensor.untyped_storage().data_ptr()
            owners = [(i, x) for i, x in known if x.untyped_storage().data_ptr() == storage]
        if len(owners) != 1:
            raise NotRepeatable("a kernel gets a pointer of unknown origin")
        ((i, x),) = owners
        behind = at - x.data_ptr()
        number = i - len(self.given)
        if number < 0:
            return i, behind
        if number in self._offsets:
            return len(self.given), self._offsets[number] + behind
        return len(self.given) + self._index[number], behind

    def _returned(self, result: Any) -> tuple[Any, ...]:
        if isinstance(result, tuple):
            return "tuple", type(result), tuple(self._returned(x) for x in result)
        if not isinstance(result, Tensor):
            return "object", result
        for i, base in enumerate(self.made):  # under a mode, a factory returns another object
            same = base.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            if same and base.dtype == result.dtype:
                view = tuple(result.shape), result.stride(), result.storage_offset()
                if view == (tuple(base.shape), base.stride(), 0):
                    return "tensor", self._index[i]
                if self.rows in result.shape and base.data_ptr() in self._sized:
                    raise NotRepeatable("it returns a view whose size depends on the rows")
                return "view", self._index[i], *view
        raise NotRepeatable("it returns a tensor that it did not allocate")


def _leaves(result: Any) -> list[Tensor]:
    return tensors_in(result)
