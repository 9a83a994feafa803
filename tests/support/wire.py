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
    """Every tensor that is gathered, all-reduced, cut and sent to be added, or exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[Tensor] = []
        self.reduced: list[Tensor] = []
        self.scattered: list[Tensor] = []
        self.exchanged: list[Tensor] = []
        self.collectives: list[tuple[str, int]] = []
        """Names of functional collectives, and the bytes that this rank brings to each."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and "gather" in str(func):
            self.gathered.append(args[1])
        elif func.namespace == "c10d" and "allreduce" in str(func):
            (tensor,) = args[0]
            self.reduced.append(tensor)
        elif func.namespace == "_c10d_functional":
            self._functional(str(func.overloadpacket).partition(".")[2], args[0])
        return func(*args, **(kwargs or {}))

    def _functional(self, name: str, sent: Any) -> None:
        if name != "wait_tensor":
            tensors = sent if isinstance(sent, list) else [sent]
            self.collectives.append((name, sum(x.nbytes for x in tensors)))
        if "gather" in name:
            self.gathered += sent if isinstance(sent, list) else [sent]
        elif name == "all_reduce":
            self.reduced.append(sent)
        elif name == "reduce_scatter_tensor":
            self.scattered.append(sent)
        elif "all_to_all" in name:
            self.exchanged.append(sent)

    def traffic(self) -> Traffic:
        return Traffic(
            len(self.gathered),
            sum(x.nbytes for x in self.gathered),
            {x.dtype for x in self.gathered},
            len(self.reduced),
            sum(x.nbytes for x in self.reduced),
        )
