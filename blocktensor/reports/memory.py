"""Count the bytes that a model's parameters, gradients and buffers hold now, by kind."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..model.names import is_module
from ..ops.formats import Quantized
from ..sharding.fsdp.shards import FP8Shard, FrozenShard
from ..tensor.base import MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.operand import Operand
from ..tensor.weight import BlockwiseFP8Weight
from ..text_table import Report, Table, human_bytes

_FP8_KINDS = {
    BlockwiseFP8Weight: "trainable",
    FP8Shard: "trainable",
    BlockwiseFP8Tensor: "frozen",
    FrozenShard: "frozen",
}


@dataclass(frozen=True)
class Held:
    """Bytes held by the tensors of one kind; shared memory counts once.

    Attributes:
        elements: number of values.
        high_precision: masters of trainable FP8 weights; plain parameters and buffers.
        data, scales: of rowwise FP8 forms.
        columnwise: data and scales of columnwise FP8 forms.
        gradients: in ``.grad``.
        would_take: bytes of tensors on the meta device, which hold no memory yet.
    """

    elements: int = 0
    high_precision: int = 0
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
        return self.high_precision + self.fp8 + self.gradients


@dataclass(frozen=True)
class MemoryReport(Report):
    """The result of :func:`memory_report`; ``print(report)`` shows it as a table.

    Attributes:
        trainable: :class:`~blocktensor.BlockwiseFP8Weight`: masters, and the FP8 forms that their
            caches hold now (none between the steps of a training loop); shards made by FSDP2 too.
        frozen: :class:`~blocktensor.BlockwiseFP8Tensor` and its shards.
        plain, buffers: all other parameters and buffers.
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
        """FP8 bytes, scales included, per element of converted weights; 0 if there are none."""
        converted = self.trainable + self.frozen
        return converted.fp8 / max(converted.elements, 1)

    def _parts(self) -> list[Table | str]:
        header = ("kind", "elements", "not FP8", "FP8 data", "scales", "columnwise", "gradients")
        names = ("trainable FP8", "frozen FP8", "plain", "buffers", "total")
        kinds = (self.trainable, self.frozen, self.plain, self.buffers, self.total)
        rows = [_row(*kind) for kind in zip(names, kinds, strict=True)]
        table, meta = Table((*header, "held", "each"), rows), self.total.would_take
        later = f"on the meta device: nothing held, would take {human_bytes(meta)}"
        return [table, later] if meta else [table]


def memory_report(model: nn.Module) -> MemoryReport:
    """Return the bytes that a model's parameters, their gradients and its buffers hold right now.

    Tensors on the same memory (tied weights) count once, for the first of them; a slice of a larger
    storage counts as the bytes of the slice, a DTensor as its local part.

    Args:
        model: any module, converted or not.
    """
    is_module(model, "memory_report")
    seen: set[object] = set()
    kinds = dict.fromkeys(("trainable", "frozen", "plain", "buffers"), Held())
    for kind_of_others, tensors in (("plain", model.parameters()), ("buffers", model.buffers())):
        for tensor in tensors:
            for leaf in _leaves(tensor):
                kind = _FP8_KINDS.get(type(leaf), kind_of_others)
                kinds[kind] += _held(leaf, seen)
            for leaf in [] if tensor.grad is None else _leaves(tensor.grad):
                held = _held(leaf, seen)
                kinds[kind] += Held(gradients=held.total, would_take=held.would_take)
    return MemoryReport(**kinds)


def _leaves(tensor: Tensor) -> list[Tensor]:
    """Return the plain and FP8 tensors inside any wrapper."""
    if type(tensor) in _FP8_KINDS or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    # a DTensor also names its mesh
    return [leaf for part in inner if isinstance(part, Tensor) for leaf in _leaves(part)]


def _held(tensor: Tensor, seen: set[object]) -> Held:
    high = [tensor.master if isinstance(tensor, MasterBase) else tensor]
    operands: list[Operand] = []
    if isinstance(tensor, BlockwiseFP8Weight):
        operands = [cache.held() for cache in (tensor.cache, *tensor.cache.parts())]
    elif isinstance(tensor, FrozenShard):
        form = Quantized(tensor.data_rows, tensor.scale, tensor.recipe.weight_format)
        high, operands = [], [Operand(form, None)]
    elif isinstance(tensor, BlockwiseFP8Tensor):
        high, operands = [], [tensor.operand]
    rows = [form for form, _ in operands if form is not None]
    columns = [form for _, form in operands if form is not None]
    parts = (
        high,
        [form.data for form in rows],
        [form.scale for form in rows],
        [part for form in columns for part in form[:2]],
    )
    own = next(part[0] for part in parts if part)
    elements = 0 if _key(own) in seen else tensor.numel()
    sizes = [sum(_new_bytes(one, seen) for one in part) for part in parts]
    return Held(elements, would_take=sum(sizes)) if tensor.is_meta else Held(elements, *sizes)


def _key(tensor: Tensor) -> object:
    # tensors on the meta device all have address 0: the object identifies them
    return tensor.device, tensor.data_ptr() or id(tensor), tensor.nbytes


def _new_bytes(tensor: Tensor, seen: set[object]) -> int:
    key = _key(tensor)
    is_new = key not in seen
    seen.add(key)
    # nbytes of an expanded or a resized tensor may exceed its storage
    return is_new * min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _row(name: str, held: Held) -> tuple[str, ...]:
    sizes = (held.high_precision, held.data, held.scales, held.columnwise, held.gradients)
    each = f"{held.total / held.elements:.4f}" if held.elements else "-"
    cells = [human_bytes(size) if size else "-" for size in (*sizes, held.total)]
    return name, f"{held.elements:,}", *cells, each
