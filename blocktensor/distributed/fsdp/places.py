"""The place of a sharded weight in a table of amaxes, and how ranks make tables together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from ...ops.formats import ceil_div
from ...recipe import Recipe
from ...tensor.base import MasterBase
from ..compare_ranks import agree
from ..dtensor import local_of
from .amax_table import AmaxTable, ShardedWeight, ShardSlice
from .fsdp_internals import Sharded, sharded_with
from .kept_cast import KeptCast


class Identity:
    """Identity of one sharded weight, common to all tensor objects that are its local part."""

    __slots__ = ("__weakref__", "kept", "place")

    def __init__(self) -> None:
        self.place: tuple[AmaxTable, int] | None = None
        self.kept = KeptCast()

    def __reduce__(self) -> tuple[Any, ...]:
        return Identity, ()  # a copy is another weight


class RowsInTable(MasterBase):
    """Base class of a rank's rows of a weight, whose blocks have their amaxes in a table.

    Attributes:
        recipe: of the weight's casts.
        identity: of the weight.
    """

    recipe: Recipe
    identity: Identity


_PLACES: weakref.WeakKeyDictionary[Any, tuple[Recipe, tuple[AmaxTable, int]]] = (
    weakref.WeakKeyDictionary()
)
"""The recipe and the place of the parameters that FSDP has, by its own objects for them."""


def place_of(shard: RowsInTable) -> tuple[AmaxTable, int] | None:
    """A shard's table and its index there; made now if FSDP knows the weights of one table."""
    place = known_place(shard)
    if place is None or place[0].alone:
        together, are_all = _sharded_with(shard)
        if together and (are_all or place is None):
            groups: dict[str, list[Sharded]] = {}
            for sharded in together:
                if _rows_of(sharded.parameter()) is not None:
                    groups.setdefault(sharded.group.group_name, []).append(sharded)
            for weights in groups.values():
                _build(weights, alone=not are_all)
            place = shard.identity.place
    return place


def known_place(shard: RowsInTable) -> tuple[AmaxTable, int] | None:
    """A shard's place, or that of the shard before it that FSDP had, if it was cast alike.

    After a model moves, FSDP pads the rows into a new shard, on those ranks alone that have fewer
    rows than others: they must not compare their weights with ranks that keep their tables.
    """
    if shard.identity.place is None:
        for sharded in _sharded_with(shard)[0]:
            present = _rows_of(sharded.parameter())
            if present is not None and present.identity is shard.identity:
                recipe, place = _PLACES.get(sharded.owner, (None, None))
                shard.identity.place = place if recipe == shard.recipe else None
    return shard.identity.place


def precompute_block_amax(model: nn.Module) -> int:
    """Reduce the block amaxes of a sharded model's FP8 weights now, for the next forward.

    A forward does this by itself. After a call right behind ``optimizer.step()``, the all-reduce
    may overlap with work before the forward. All ranks must call it. A weight may change between
    this call and the forward only in ways that PyTorch counts, on all ranks alike
    (:class:`~blocktensor.Recipe` lists the others).

    Returns:
        The number of weights whose amaxes are kept: 0 before the first forward.
    """
    shards = (shard for p in model.parameters() if (shard := _rows_of(p)) is not None)
    places = [place for shard in shards if (place := known_place(shard)) is not None]
    for table in dict.fromkeys(table for table, _ in places):
        table.precompute()
    return len(places)


def _sharded_with(shard: RowsInTable) -> tuple[list[Sharded], bool]:
    return sharded_with(lambda x: isinstance(x, RowsInTable) and x.identity is shard.identity)


def _build(together: Sequence[Sharded], alone: bool) -> None:
    """Make the tables of weights that share a group, after a comparison with the other ranks.

    Amaxes are reused within a step (``Recipe(cache_weight="step")``) for weights of which every
    rank holds rows: the others would miss changes that other ranks count.
    """
    by_reuse: dict[bool, list[tuple[ShardedWeight, RowsInTable, Any]]] = {}
    lines = []
    for sharded in together:
        shard = _rows_of(sharded.parameter())
        assert shard is not None
        size, world = sharded.shape[sharded.dim], sharded.ranks
        each = ceil_div(size, world)
        weight = ShardedWeight(
            sharded.name,
            ShardSlice(
                sharded.shape,
                sharded.dim,
                min(sharded.rank * each, size),
                shard.recipe.weight_format,
            ),
            _master_of(sharded.parameter),
            _version_of(sharded.parameter),
            sharded.forwards,
            sharded.in_backward,
        )
        reuses = shard.recipe.cache_weight == "step" and each * (world - 1) < size
        lines.append(f"{weight}, reuses={reuses}")
        by_reuse.setdefault(reuses, []).append((weight, shard, sharded.owner))
    group, device = together[0].group, together[0].device
    agree("sharded FP8 weights", lines, group)
    for reuses, entries in by_reuse.items():
        weights = [weight for weight, _, _ in entries]
        table = AmaxTable(weights, group, device, reuses=reuses, alone=alone)
        for index, (_, shard, owner) in enumerate(entries):
            shard.identity.place = table, index
            _PLACES[owner] = shard.recipe, shard.identity.place


def _master_of(parameter: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    def master() -> Tensor | None:
        whole = parameter()
        check_no_main_grad(getattr(whole, "main_grad", None))
        shard = _rows_of(whole)
        return None if shard is None else shard.master

    return master


def check_no_main_grad(main_grad: Any) -> None:
    """Raise for a sharded weight with a ``main_grad``, which no backward would add to.

    Raises:
        NotImplementedError: it has one.
    """
    if main_grad is not None:
        raise NotImplementedError(
            "weight.main_grad with FSDP2, which reduces and shards gradients itself: set it to "
            "None. MixedPrecisionPolicy(reduce_dtype=torch.float32) reduces in fp32, and "
            "model.set_requires_gradient_sync(False) sums microbatches before"
        )


def _version_of(parameter: Callable[[], Tensor | None]) -> Callable[[], object]:
    def version() -> object:
        whole = parameter()
        shard = _rows_of(whole)
        if whole is None or shard is None:
            return None
        master = shard.master
        # a view shares the version counter of its base: the parameter, its to_local(), or the
        # master that state_dict() returns
        with torch._C.DisableTorchFunctionSubclass():  # for host time: a microsecond a counter
            counters = whole._version, shard._version, master._version
        # an address may be given out again after a model has moved
        return counters, WeakIdRef(master), master.data_ptr(), master.device

    return version


def _rows_of(parameter: Any) -> RowsInTable | None:
    local = local_of(parameter)
    return local if isinstance(local, RowsInTable) else None
