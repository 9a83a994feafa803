"""The ranks that hold a model: work that one of them does, or each, and its failure on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from .dtensor import local_of

Result = TypeVar("Result")


class Ranks:
    """The ranks of a mesh, or the only process of a model that is not sharded.

    Attributes:
        size: how many there are.
        index: this one's place among them.
    """

    def __init__(self, mesh: Any = None) -> None:
        """Take the ranks of ``mesh``, a ``DeviceMesh``."""
        self._mesh = mesh
        self.size = 1 if mesh is None else mesh.size()
        self.index = 0 if mesh is None else mesh.mesh.flatten().tolist().index(dist.get_rank())

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Ranks:
        """Return the ranks of the largest mesh over which any of these tensors lies."""
        meshes: list[Any] = [x.device_mesh for x in tensors if local_of(x) is not None]  # type: ignore[attr-defined]
        return cls(max(meshes, key=lambda mesh: mesh.size(), default=None))

    def gathered(self, mine: Result) -> list[Result]:
        """Return the value of every rank, in their order."""
        found: list[Any] = [mine]
        for dim in reversed(range(0 if self._mesh is None else self._mesh.ndim)):
            group = self._mesh.get_group(dim)
            others: list[Any] = [None] * group.size()
            dist.all_gather_object(others, found, group=group)
            found = [value for each in others for value in each]
        return found

    def each(self, action: Callable[[], Result]) -> list[Result]:
        """Run ``action`` on every rank; return all results, in their order.

        An exception on one rank is raised on all of them.
        """
        made: Any = None
        try:
            made = action()
            failure = None
        except Exception as error:
            if self.size == 1:
                raise
            failure = _sendable(error)
        outcomes = self.gathered((made, failure))
        failed = next((failure for _, failure in outcomes if failure is not None), None)
        if failed is not None:
            raise failed
        return [made for made, _ in outcomes]

    def first(self, action: Callable[[], Result]) -> Result:
        """Run ``action`` on the first rank alone; return its result on every rank."""
        return self.each(lambda: action() if self.index == 0 else None)[0]  # type: ignore[return-value]


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
