"""Where the bytes of a model's parameters, gradients and buffers are, right now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .ops.layouts import Form
from .tables import human_bytes, text_table
from .tensor import BlockwiseFP8Tensor
from .weight import BlockwiseFP8Weight

_Key: TypeAlias = tuple[torch.device, int, int]

_FP8_KINDS = {BlockwiseFP8Weight: "trainable", BlockwiseFP8Tensor: "frozen"}
_HEADER = ("kind", "elements", "full precision", "FP8 data", "scales", "columnwise", "gradients",
           "held", "each")  # fmt: skip


@dataclass(frozen=True)
class Held:
    """What the tensors of one kind hold, in bytes; memory that several share counts once.

    Attributes:
        tensors, elements: how many there are, and their values.
        full_precision: masters of trainable FP8 weights; all of plain parameters and buffers.
        data, scales: of rowwise FP8 forms.
        columnwise: data and scales of columnwise FP8 forms.
        gradients: in ``.grad``.
        would_take: of tensors on the meta device, which hold nothing yet.
    """

    tensors: int = 0
    elements: int = 0
    full_precision: int = 0
    data: int = 0
    scales: int = 0
    columnwise: int = 0
    gradients: int = 0
    would_take: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def fp8(self) -> int:
        """Bytes in FP8, scales included."""
        return self.data + self.scales + self.columnwise

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.full_precision + self.fp8 + self.gradients


@dataclass(frozen=True)
class MemoryReport:
    """What :func:`memory_report` found; ``print(report)`` shows it as a table.

    Attributes:
        trainable: the :class:`~blocktensor.BlockwiseFP8Weight`: masters, and the FP8 forms that
            their caches hold at the moment (none between the steps of a training loop).
        frozen: the :class:`~blocktensor.BlockwiseFP8Tensor`.
        plain: all other parameters.
        buffers: all other buffers.
    """

    trainable: Held
    frozen: Held
    plain: Held
    buffers: Held

    @property
    def total(self) -> Held:
        """All kinds together."""
        return self.trainable + self.frozen + self.plain + self.buffers

    @property
    def fp8_bytes_per_parameter(self) -> float:
        """FP8 bytes held, scales included, by each element of a converted weight; 0 without one."""
        converted = self.trainable + self.frozen
        return converted.fp8 / max(converted.elements, 1)

    def __str__(self) -> str:
        kinds = {
            "trainable FP8": self.trainable,
            "frozen FP8": self.frozen,
            "plain": self.plain,
            "buffers": self.buffers,
            "total": self.total,
        }
        table = text_table(_HEADER, [_row(name, held) for name, held in kinds.items()])
        meta = self.total.would_take
        later = f"\non the meta device: nothing held, would take {human_bytes(meta)}"
        return table + (later if meta else "")


def memory_report(model: nn.Module) -> MemoryReport:
    """The bytes that a model's parameters, their gradients and its buffers hold right now.

    Tensors on the same memory (tied weights) count once, for the first of them; a slice of a larger
    storage counts as the bytes of the slice. Of a DTensor the local part counts.

    Args:
        model: any module, converted or not.
    """
    seen: set[_Key] = set()
    kinds = dict.fromkeys(("trainable", "frozen", "plain", "buffers"), Held())
    for default, tensors in (("plain", model.parameters()), ("buffers", model.buffers())):
        for tensor in tensors:
            local = _local(tensor)
            kinds[_FP8_KINDS.get(type(local), default)] += _held(local, tensor.grad, seen)
    return MemoryReport(**kinds)


def _local(tensor: Tensor) -> Tensor:
    """The tensor of a wrapper that only places it, such as DTensor; others as they are."""
    while type(tensor) not in _FP8_KINDS and len(inner := _inner(tensor)) == 1:
        (tensor,) = inner
    return tensor


def _held(tensor: Tensor, gradient: Tensor | None, seen: set[_Key]) -> Held:
    values: Sequence[Tensor] = ()
    forms: tuple[Form | None, Form | None] = (None, None)
    if isinstance(tensor, BlockwiseFP8Weight):
        values, forms = (tensor.master,), tensor.cache.held()
    elif isinstance(tensor, BlockwiseFP8Tensor):
        forms = tensor.forms()
    else:
        values = _leaves(tensor)
    row, column = (form or () for form in forms)
    of_gradient = () if gradient is None else _leaves(gradient)
    first = any(_key(own) not in seen for own in values or (*row, *column))
    parts = (values, row[:1], row[1:], column, of_gradient)
    sizes = [sum(_new_bytes(one, seen) for one in part) for part in parts]
    counts = (1, tensor.numel()) if first else (0, 0)
    if tensor.device.type == "meta":
        return Held(*counts, would_take=sum(sizes))
    return Held(*counts, *sizes)


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside any wrapper."""
    inner = _inner(tensor)
    return [leaf for one in inner for leaf in _leaves(one)] if inner else [tensor]


def _inner(tensor: Tensor) -> list[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return []
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor also names its mesh


def _key(tensor: Tensor) -> _Key:
    # nothing lies at address 0: tensors on the meta device are told apart as objects
    return tensor.device, tensor.data_ptr() or id(tensor), tensor.nbytes


def _new_bytes(tensor: Tensor, seen: set[_Key]) -> int:
    key = _key(tensor)
    if key in seen:
        return 0
    seen.add(key)
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # expanded, or freed by resizing


def _row(name: str, held: Held) -> tuple[str, ...]:
    sizes = (held.full_precision, held.data, held.scales, held.columnwise, held.gradients)
    each = f"{held.total / held.elements:.4f}" if held.elements else "-"
    cells = [human_bytes(size) if size else "-" for size in (*sizes, held.total)]
    return name, f"{held.elements:,}", *cells, each
