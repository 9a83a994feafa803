"""The place of a sharded weight in a table of amaxes, and how ranks make tables together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ...ops.formats import ceil_div
from ...recipe import Recipe
from ...tensor.base import MasterBase
from ..compare_ranks import agree
from ..dtensor import local_of
from .amax_table import AmaxTable, ShardedWeight, ShardSlice
from .fsdp_internals import Sharded, count_changes, holds, owner_of, sharded_with


class RowsInTable(MasterBase):
    """Base class of a rank's rows of a weight, whose blocks have their amaxes in a table.

    Attributes:
        recipe: of the weight's casts.
        original: the rows of which these are a copy on another device, as FSDP makes one of those
            that it offloads.
    """

    recipe: Recipe
    original: weakref.ref[RowsInTable] | None = None
    _owner: weakref.ref[Any] | None = None  # found last

    def owner(self, module: nn.Module | None) -> Any:
        """FSDP's own object for the parameter of ``module`` with these rows, or their original.

        It alone says what weight this is: other modules may be assigned these rows, or aliases of
        them. Without a module any of these objects, or None.
        """
        original = None if self.original is None else self.original()
        candidates = [rows for rows in (self, original) if rows is not None]
        for rows in candidates:
            owner = None if rows._owner is None else rows._owner()
            if owner is not None and holds(owner, rows, module):
                return owner
        for rows in candidates:
            owner = owner_of(rows, module)
            if owner is not None:
                rows._owner = weakref.ref(owner)
                return owner
        return None

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: nothing that this process alone has."""
        here = "original", "_owner"
        return {name: value for name, value in self.__dict__.items() if name not in here}


_PLACES: weakref.WeakKeyDictionary[Any, tuple[Recipe, tuple[AmaxTable, int]]] = (
    weakref.WeakKeyDictionary()
)
"""The recipe and the place of each parameter that FSDP has, by its own object for it."""


def place_of(shard: RowsInTable, module: nn.Module | None = None) -> tuple[AmaxTable, int] | None:
    """A shard's table and its index there; made now if FSDP knows the weights of one table.

    ``module`` is the one that has the shard; it may be left out unless several have.
    """
    place = known_place(shard, module)
    if place is None or place[0].alone:
        together, are_all = sharded_with(shard.owner(module))
        if together and (are_all or place is None):
            groups: dict[str, list[Sharded]] = {}
            for sharded in together:
                if _rows_of(sharded.parameter()) is not None:
                    groups.setdefault(sharded.group.group_name, []).append(sharded)
            for weights in groups.values():
                _build(weights, alone=not are_all)
            place = known_place(shard, module)
    return place


def known_place(
    shard: RowsInTable, module: nn.Module | None = None
) -> tuple[AmaxTable, int] | None:
    """The place of FSDP's parameter, if it was made for weights with the recipe of this shard.

    It outlives the shard: after a move FSDP pads the rows into a new one, on those ranks alone that
    have fewer than others. They must not compare their weights while the other ranks do not.
    """
    owner = shard.owner(module)
    known = None if owner is None else _PLACES.get(owner)
    if known is None:
        return None
    recipe, (table, index) = known
    # a backward needs the scales of its forward: it raises if it uses the shard of another recipe
    is_valid = recipe == shard.recipe or table.weights[index].in_backward()
    return (table, index) if is_valid else None


def precompute_block_amax(model: nn.Module) -> int:
    """Reduce the block amaxes of a sharded model's FP8 weights now, for the next forward.

    A forward does this by itself. After a call right behind ``optimizer.step()``, the all-reduce
    may overlap with work before the forward. All ranks must call it. A weight may change between
    this call and the forward only in ways that PyTorch counts, on all ranks alike
    (:class:`~blocktensor.Recipe` lists the others).

    Returns:
        The number of weights whose amaxes are kept: 0 before the first forward.
    """
    weights = (
        (shard, module)
        for module in model.modules()
        for parameter in module._parameters.values()
        if (shard := _rows_of(parameter)) is not None
    )
    places = [place for weight in weights if (place := known_place(*weight)) is not None]
    for table in dict.fromkeys(table for table, _ in places):
        table.precompute()
    return len(places)


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
            count_changes(sharded.owner),
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
            _PLACES[owner] = shard.recipe, (table, index)


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


def _rows_of(parameter: Any) -> RowsInTable | None:
    local = local_of(parameter)
    return local if isinstance(local, RowsInTable) else None
