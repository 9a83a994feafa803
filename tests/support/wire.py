"""What ranks send to each other, as the collectives of a step get it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


class Wire(TorchDispatchMode):
    """Every tensor that is gathered, all-reduced, or cut and sent to be added."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[Tensor] = []
        self.reduced: list[Tensor] = []
        self.scattered: list[Tensor] = []
        self.collectives: list[tuple[str, int]] = []
        """Names of functional collectives, and the bytes that this rank brings to each."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and "gather" in name:
            self.gathered.append(args[1])
        elif func.namespace == "c10d" and "allreduce" in name:
            self.reduced += args[0]
        elif func.namespace == "_c10d_functional" and name != "wait_tensor":
            sent = args[0] if isinstance(args[0], list) else [args[0]]
            self.collectives.append((name, nbytes(sent)))
            for part, seen in (
                ("gather", self.gathered),
                ("all_reduce", self.reduced),
                ("reduce_scatter_tensor", self.scattered),
            ):
                seen += sent if part in name else []
        return func(*args, **(kwargs or {}))
