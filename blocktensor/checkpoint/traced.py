"""Trace which parts of other tensors a tensor consists of, without values.

A function that renames, splits, joins, stacks and transposes tensors is called with traced tensors.
Its results show where it would move values. This works for any function, without a list of known
ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensor.base import wrapper
from .parts import Part

_aten: Any = torch.ops.aten


class _Block(NamedTuple):
    """A box of a traced tensor.

    Attributes:
        at: its first index in the traced tensor.
        view: a view of the whole origin, on meta.
        origin: the name, and the shape, of the tensor that it is a part of.
    """

    at: tuple[int, ...]
    view: Tensor
    origin: tuple[str, tuple[int, ...]]


class _Layout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Layout:
        """Return the layout of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype)

    def on_meta(self) -> Tensor:
        """Return a tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class TracedTensor(torch.Tensor):
    """A tensor without values.

    Attributes:
        origins: the names of all tensors from which it is computed.
        blocks: the blocks that it consists of; None if its values are computed.
    """

    origins: frozenset[str]
    blocks: tuple[_Block, ...] | None

    @staticmethod
    def __new__(
        cls, layout: _Layout, origins: frozenset[str], blocks: tuple[_Block, ...] | None
    ) -> TracedTensor:
        """Make a traced tensor of a layout."""
        shape, strides, dtype = layout
        made: TracedTensor = wrapper(
            cls, shape, strides=strides, dtype=dtype, device=torch.device("cpu")
        )
        made.origins, made.blocks = origins, blocks
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor({list(self.shape)}, of {sorted(self.origins)})"

    @property
    def parts(self) -> tuple[Part, ...] | None:
        """The parts of other tensors that it consists of; None if its values are computed."""
        found = [] if self.blocks is None else [_part(block) for block in self.blocks]
        known = tuple(part for part in found if part is not None)
        return known if known and len(known) == len(found) else None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:  # views of the written tensor would change their values
            raise NotImplementedError(f"{func} writes to a tensor, which is not traced")
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        origins = frozenset[str]().union(
            *(x.origins for x in _traced_in((*args, *kwargs.values())))
        )
        layouts = _layouts(func, _described(args), _described(tuple(kwargs.items())))
        rule = _RULES.get(func)
        blocks = None if rule is None else rule(func, args, kwargs)
        each = layouts if isinstance(layouts, list) else [layouts]
        results = [
            cls(layout, origins, found)
            for layout, found in zip(each, blocks or [None] * len(each), strict=True)
        ]
        return results if isinstance(layouts, list) else results[0]


def traced(name: str, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
    """Return a traced tensor for the tensor ``name``."""
    like = torch.empty(tuple(shape), dtype=dtype, device="meta")
    block = _Block((0,) * like.ndim, like, (name, tuple(shape)))
    return TracedTensor(_Layout.of(like), frozenset([name]), (block,))


def _traced_in(values: Iterable[Any]) -> Iterator[TracedTensor]:
    """Yield the traced tensors among the arguments of an op, also in lists."""
    for x in values:
        if isinstance(x, TracedTensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _traced_in(x)


def _described(x: Any) -> Any:
    """Return an argument of an op: layouts in place of tensors, tuples in place of lists."""
    if isinstance(x, Tensor):
        return _Layout.of(x)
    return tuple(map(_described, x)) if type(x) in (list, tuple) else x


@functools.lru_cache(maxsize=4096)
def _layouts(func: Any, args: Any, kwargs: Any) -> _Layout | list[_Layout]:
    """Return the layout of the result, or of each result, of an op.

    The op runs on meta, and raises as usual. Results are cached: many experts have the same
    layouts.
    """

    def on_meta(x: Any) -> Any:
        if isinstance(x, _Layout):
            return x.on_meta()
        return tuple(map(on_meta, x)) if type(x) is tuple else x

    result = func(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs})
    return (
        [_Layout.of(x) for x in result] if isinstance(result, (list, tuple)) else _Layout.of(result)
    )


# Rules: functions from the blocks of an op's arguments to the blocks of each result

_Blocks = list[tuple[_Block, ...] | None]


def _same(func: Any, args: Sequence[Any], kwargs: Any) -> _Blocks:
    return [args[0].blocks]


def _view(func: Any, args: Sequence[Any], kwargs: Any) -> _Blocks | None:
    """View a tensor that consists of one block."""
    x, *rest = args
    if x.blocks is None or len(x.blocks) != 1:
        return None
    (block,) = x.blocks
    try:
        made = func(block.view, *rest, **kwargs)
    except RuntimeError:  # a copy, whose elements have another order than in the origin
        return None
    views = made if isinstance(made, (list, tuple)) else [made]
    return [(_Block((0,) * view.ndim, view, block.origin),) for view in views]


def _joined(func: Any, args: Sequence[Any], kwargs: Any) -> _Blocks | None:
    tensors: Sequence[Any] = args[0]
    stacks = func is _aten.stack.default
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= tensors[0].ndim + stacks
    begin, blocks = 0, []
    for x in tensors:
        if not isinstance(x, TracedTensor) or x.blocks is None:
            return None
        for at, view, origin in x.blocks:
            here = [*at[:dim], 0, *at[dim:]] if stacks else [*at]
            here[dim] += begin
            blocks.append(_Block(tuple(here), view.unsqueeze(dim) if stacks else view, origin))
        begin += 1 if stacks else x.shape[dim]
    return [tuple(blocks)]


def _ops(*names: str) -> Iterable[Any]:
    for name in names:
        packet = getattr(_aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads())


_RULES: dict[Any, Callable[[Any, Sequence[Any], Any], _Blocks | None]] = {
    **dict.fromkeys(_ops("alias", "clone", "detach", "_to_copy", "lift_fresh"), _same),
    **dict.fromkeys(
        _ops("expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze"), _view
    ),
    **dict.fromkeys(_ops("t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"), _view),
    **dict.fromkeys((_aten.cat.default, _aten.stack.default), _joined),
}


def _part(block: _Block) -> Part | None:
    """Return a block as a part of its origin; None if it is not a box there."""
    view, (name, shape) = block.view, block.origin
    strides = torch.empty(shape, device="meta").stride()
    wide = {stride: axis for axis, stride in enumerate(strides) if shape[axis] > 1}
    axes = [wide.get(s) if n > 1 else None for s, n in zip(view.stride(), view.shape, strict=True)]
    sizes = [1] * len(shape)
    for axis, size in zip(axes, view.shape, strict=True):
        if axis is None and size > 1:
            return None
        if axis is not None:
            sizes[axis] = size
    begins, left = [], int(view.storage_offset())
    for size, stride in zip(shape, strides, strict=True):
        begins.append(left // stride if size > 1 else 0)
        left -= begins[-1] * stride
    there = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    if any(run.stop > size for run, size in zip(there, shape, strict=True)):
        return None
    here = [slice(begin, begin + size) for begin, size in zip(block.at, view.shape, strict=True)]
    return Part(name, tuple(there), tuple(here), _with_single(axes, tuple(view.shape), len(shape)))


def _with_single(
    axes: Sequence[int | None], shape: Sequence[int], dims: int
) -> tuple[int | None, ...]:
    """Return ``axes``, completed by dimensions of size 1 at the same place in both tensors."""
    found = list(axes)
    if len(shape) == dims:
        for dim in range(dims):
            if found[dim] is None and dim not in axes:
                found[dim] = dim
    return tuple(found)
