"""Coordinate ranks: compare what they hold, share work, and fail together.

A disagreement raises on every rank instead of hanging a collective; so does an exception on one
rank.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .dtensor import local_of, refuse_descending

TIMEOUT = datetime.timedelta(seconds=30)
"""The time to wait for each other rank in a comparison."""

_REMEDY = "convert and shard the same model on every rank, and run forward on all of them"

_asked: dict[str, int] = {}

Result = TypeVar("Result")


def agree(what: str, mine: Sequence[str], group: dist.ProcessGroup, remedy: str = _REMEDY) -> None:
    """Check that all ranks of ``group`` call this with the same lines, which describe ``what``.

    The lines go through the store of the default group: a collective could be matched with another
    collective of a disagreeing rank.

    Raises:
        RuntimeError: on every rank, with the first line that differs, or the rank that is late.
    """
    ranks = dist.get_process_group_ranks(group)
    # the backend "fake" is for dry runs and has no other ranks
    if len(ranks) == 1 or dist.get_backend(group) == "fake":
        return
    store = dist.distributed_c10d._get_default_store()
    turn = _asked[group.group_name] = _asked.get(group.group_name, 0) + 1
    key = f"blocktensor/{group.group_name}/{turn}"
    me, found = dist.get_rank(), {}
    store.set(f"{key}/{me}", "\n".join(mine))
    for rank in ranks:
        try:
            store.wait([f"{key}/{rank}"], TIMEOUT)
            found[rank] = store.get(f"{key}/{rank}").decode().split("\n")
        except RuntimeError as error:
            known = f", of which it has {mine[0]}" if len(mine) == 1 else ""
            raise RuntimeError(
                f"rank {me} waited {TIMEOUT.seconds} s for rank {rank} to compare {what}{known}: "
                f"{remedy}"
            ) from error
    other = next((rank for rank in ranks if found[rank] != list(mine)), None)
    # every rank comes to the same verdict, since it has the same lines
    if other is None:
        return
    store.set(f"{key}/{me}/has read", "")
    with contextlib.suppress(RuntimeError):  # one rank serves the store and must exit last
        store.wait([f"{key}/{rank}/has read" for rank in ranks], TIMEOUT)
    pairs = itertools.zip_longest(mine, found[other], fillvalue="nothing")
    ours, theirs = next((a, b) for a, b in pairs if a != b)
    raise RuntimeError(
        f"ranks disagree on {what}: rank {me} has {ours}, rank {other} has {theirs}; {remedy}"
    )


class Ranks:
    """The ranks of a mesh, or the only process of a model that is not sharded.

    Attributes:
        size: the number of ranks.
        index: the position of this rank.
        device: of their mesh; the CPU for a model that is not sharded.
    """

    def __init__(self, mesh: Any = None) -> None:
        """Describe the ranks of ``mesh``, a ``DeviceMesh``."""
        self._mesh = mesh
        if mesh is not None:
            refuse_descending(mesh)
        self.size = 1 if mesh is None else mesh.size()
        self.device = torch.device("cpu" if mesh is None else mesh.device_type)
        self.index = 0 if mesh is None else mesh.mesh.flatten().tolist().index(dist.get_rank())

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Ranks:
        """Return the ranks of the largest mesh that a tensor is on."""
        meshes: list[Any] = [x.device_mesh for x in tensors if local_of(x) is not None]  # type: ignore[attr-defined]
        return cls(max(meshes, key=lambda mesh: mesh.size(), default=None))

    def gathered(self, mine: Result) -> list[Result]:
        """Return the values of all ranks, in the order of ranks."""
        found: list[Any] = [mine]
        for dim in reversed(range(0 if self._mesh is None else self._mesh.ndim)):
            group = self._mesh.get_group(dim)
            others: list[Any] = [None] * group.size()
            dist.all_gather_object(others, found, group=group)
            found = [value for each in others for value in each]
        return found

    def each(self, action: Callable[[], Result]) -> list[Result]:
        """Run ``action`` on every rank; return all results, in the order of ranks.

        An exception on one rank raises on all ranks.
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

    def together(self, action: Callable[[], Result]) -> Result:
        """Run ``action`` on every rank; return the result on this rank.

        An exception on one rank raises on all ranks.
        """
        made: list[Result] = []
        self.each(lambda: made.append(action()))
        return made[0]

    def first(self, action: Callable[[], Result]) -> Result:
        """Run ``action`` on the first rank alone; return its result on every rank."""
        return self.each(lambda: action() if self.index == 0 else None)[0]  # type: ignore[return-value]


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
