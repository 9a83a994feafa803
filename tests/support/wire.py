"""What ranks send to each other, as the collectives of a step get it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(NamedTuple):
    """What a step sends: counts, and the bytes that this rank brings."""

    gathers: int
    gathered_bytes: int
    gathered_dtypes: set[torch.dtype]
    reductions: int
    reduced_bytes: int


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
            self.collectives.append((name, sum(x.nbytes for x in sent)))
            for part, seen in (
                ("gather", self.gathered),
                ("all_reduce", self.reduced),
                ("reduce_scatter_tensor", self.scattered),
            ):
                seen += sent if part in name else []
        return func(*args, **(kwargs or {}))

    def traffic(self) -> Traffic:
        return Traffic(
            len(self.gathered),
            sum(x.nbytes for x in self.gathered),
            {x.dtype for x in self.gathered},
            len(self.reduced),
            sum(x.nbytes for x in self.reduced),
        )
