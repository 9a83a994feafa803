"""FSDP2's private structures, read here and nowhere else (torch 2.11 to 2.13)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from ...ops.formats import ceil_div
from ...patches import FSDP_CHANGES, FSDP_FORWARDS
from ...tensor.base import MasterBase
from ..dtensor import local_of


class ShardedParam:
    """A parameter that FSDP2 shards, read from FSDP's own objects, which it does not keep alive.

    Attributes:
        name: in the root module.
        shape: of the whole parameter.
        dim, start: this rank holds a part from index ``start`` on along ``dim``.
        ranks: how many hold the parts; 1 if each rank holds the whole parameter.
        group: these ranks, or those that hold the whole parameter.
        device: where it is gathered.
        owner: a weak reference to FSDP's object for the parameter, which outlives the tensors.
    """

    def __init__(self, param: Any, group: Any, context: Any) -> None:
        """Read the object of a parameter, of its group, and of the root.

        Raises:
            NotImplementedError: ``reshard_after_forward`` is a number of ranks.
        """
        info, after = param.mesh_info, param.post_forward_mesh_info
        if after is not None and after is not info:
            raise NotImplementedError(
                f"reshard_after_forward={after.shard_mesh_size} with FP8 weights: FSDP2 cannot "
                f"reshard to fewer ranks what tensors gather in their own way; pass True or False"
            )
        self.name: str = param._param_fqn or param._module_info.param_name
        self.shape, self.dim = tuple(param._orig_size), param.fsdp_placement.dim
        # replicate() is FSDP2 with nothing sharded
        is_sharded = hasattr(info, "shard_process_group")
        rank, ranks = (info.shard_mesh_rank, info.shard_mesh_size) if is_sharded else (0, 1)
        self.ranks: int = ranks
        self.group: torch.distributed.ProcessGroup = (
            info.shard_process_group if is_sharded else info.replicate_process_group
        )
        whole = self.shape[self.dim]
        each = ceil_div(whole, ranks)
        self.start = min(rank * each, whole)
        self.device: torch.device = param.device
        self.owner, self._group, self._context = map(weakref.ref, (param, group, context))

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} sharded on dim {self.dim}"

    @property
    def local(self) -> Tensor | None:
        """The present part on this rank; None once the model is freed."""
        owner = self.owner()
        return None if owner is None else owner._sharded_local_tensor

    def track(self) -> None:
        """Count from now on what :meth:`changes` and :meth:`forwards` return."""
        FSDP_CHANGES.give_class(self.owner())
        FSDP_FORWARDS.give_class(self._context())

    def changes(self) -> int | None:
        """Return how often the part was changed or replaced, as far as PyTorch counts.

        Ranks compare their counts with earlier ones, never with counts of other ranks, and all come
        to the same verdict. None once the model is freed.
        """
        owner = self.owner()
        return None if owner is None else owner.changes()

    def forwards(self) -> int:
        """Return how many forwards have begun, of the root or of a part called by itself."""
        context = self._context()
        return 0 if context is None else context.forwards

    @property
    def gathered_with(self) -> int:
        """A number that is equal for parameters that FSDP gathers together."""
        return id(self._group())

    def in_forward(self) -> bool:
        """Return True while FSDP gathers for a forward: not because of ``unshard()``."""
        return self._state() == "FORWARD"

    def in_backward(self) -> bool:
        """Return True while FSDP gathers for a backward."""
        # a backward that raised leaves its state; no task of autograd runs then
        return torch._C._current_graph_task_id() != -1 and self._state() == "PRE_BACKWARD"

    def _state(self) -> str | None:
        group = self._group()
        return None if group is None else group._training_state.name


def sharded_with(owner: Any) -> tuple[list[ShardedParam], bool]:
    """Return all parameters under the FSDP2 root of the parameter whose object is ``owner``.

    The list is in FSDP's order, and empty without an owner. The second result is True if it is
    complete: before the root's first forward, only the parameters that are gathered together are
    known.
    """
    for state in _states():
        if any(param is owner for param, _ in _params(state)):
            context = state._state_ctx
            states = context.all_states or [state]
            found = [ShardedParam(*pair, context) for s in states for pair in _params(s)]
            return found, bool(context.all_states)
    return [], False


def by_group(weights: Iterable[ShardedParam]) -> Iterable[list[ShardedParam]]:
    """Return the weights that each group of ranks holds, in their order."""
    found: dict[str, list[ShardedParam]] = {}
    for weight in weights:
        found.setdefault(weight.group.group_name, []).append(weight)
    return found.values()


class Sharding(NamedTuple):
    """The cut of one parameter by FSDP2.

    Attributes:
        dim: it is cut along this dimension.
        has_run: True if its root has run a forward, and so has gathered it.
    """

    dim: int
    has_run: bool


def sharding_of(owner: Any) -> Sharding | None:
    """Return how FSDP2 shards the parameter of which ``owner`` is the object; None without one.

    Raises:
        NotImplementedError: as :class:`ShardedParam`, also for other parameters under the root.
    """
    together, has_run = sharded_with(owner)
    return next((Sharding(x.dim, has_run) for x in together if x.owner() is owner), None)


_FOUND: dict[int, tuple[weakref.ref[Any], weakref.ref[Tensor]]] = {}
"""By id, the owners found last of parts that exist. Every gather of every weight asks for one."""

_COPIED_FROM = WeakIdKeyDictionary()
"""Weak references to the parts that parts on other devices are copies of."""


def remember_copy(part: Tensor, original: Tensor) -> None:
    """Remember that ``part`` is a copy on another device: FSDP gathers one of what it offloads."""
    _COPIED_FROM[part] = weakref.ref(original)


def owner_of(local: Tensor, module: nn.Module | None = None) -> Any:
    """Return FSDP's object for the parameter, of ``module``, with this local part, or None.

    Only this object identifies the weight: other modules may hold the same part, or aliases of it.
    """
    key = id(local)
    known = _FOUND.get(key)
    owner = None if known is None else known[0]()
    if owner is not None and _holds(owner, local, module):
        return owner
    copied = _COPIED_FROM.get(local)
    original = None if copied is None else copied()
    owner = None if original is None else owner_of(original, module)
    if owner is None:
        owner = next(_owners_of(local, module), None)
        if owner is not None:
            part = weakref.ref(local, lambda _: _FOUND.pop(key, None))
            _FOUND[key] = weakref.ref(owner), part
    return owner


def adopt_parameters(model: nn.Module) -> None:
    """Make FSDP refer to the parameters that modules were assigned, as it does after a move."""
    for param in _params_in(model):
        param.reset_sharded_param()


def sharded_in(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return the parts on this rank of the parameters that FSDP2 shards, gathered or not.

    Their keys are the module that holds a parameter, and its name there.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    return {
        (param._module_info.module, param._module_info.param_name): param._sharded_local_tensor
        for param in _params_in(model)
    }


def _params_in(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's objects for the parameters of a model."""
    modules = set(model.modules())
    for state in _states():
        yield from (param for param, _ in _params(state) if param._module_info.module in modules)


def gathered_shape(local: Tensor) -> tuple[int, ...] | None:
    """Return the shape of what FSDP gathers for a weight with this local part; None for no shard.

    Where other ranks multiply by other parts of the weight, it is the shape of such a part.
    """
    owner = owner_of(local)
    return None if owner is None else tuple(owner._orig_size)


def _owners_of(local: Tensor, module: nn.Module | None = None) -> Iterator[Any]:
    """Yield FSDP's objects for parameters with this local part; models may share a parameter."""
    for state in _states():
        yield from (param for param, _ in _params(state) if _holds(param, local, module))


def _holds(owner: Any, local: Tensor, module: nn.Module | None) -> bool:
    held: bool = owner._sharded_local_tensor is local
    return held and (module is None or owner._module_info.module is module)


@FSDP_CHANGES.made_by
@functools.cache
def _counts_changes(base: Any) -> Any:
    """Return a class of parameters that count their changes, except for changes by FSDP itself.

    After a move or a load FSDP pads the part anew on those ranks alone that have fewer rows.
    """

    class CountsChanges(base):
        seen: tuple[int, object] = 0, None  # how many changes, and the state after the last

        def changes(self, weight: Tensor | None = None) -> int:
            state = _state_of(self.sharded_param if weight is None else weight)
            if state != self.seen[1]:
                self.seen = self.seen[0] + 1, state
            return self.seen[0]

        def reset_sharded_param(self) -> None:
            info = self._module_info
            weight = getattr(info.module, info.param_name)  # FSDP adopts it now
            counting = [self]
            local = local_of(weight)
            if local is not None and local.shape != self.padded_sharded_param_size:
                # other models may share it
                others = (param for param in _owners_of(local) if param is not self)
                counting += [param for param in others if hasattr(param, "changes")]
            for param in counting:
                param.changes(weight)
            super().reset_sharded_param()
            for param in counting:
                param.seen = param.seen[0], _state_of(weight)

    return CountsChanges


def _state_of(weight: Tensor) -> object:
    """Return a value that differs after a change."""
    local = local_of(weight)
    if not isinstance(local, MasterBase):
        return None
    master = local.master
    with torch._C.DisableTorchFunctionSubclass():  # for host time: a microsecond a counter
        if weight.is_inference():
            return object()  # PyTorch counts nothing: it may have changed
        # a view shares the version counter of its base: the parameter, its to_local(), or the
        # master that torch.distributed.checkpoint writes to
        counters = [x._version for x in (weight, local, master) if not x.is_inference()]
    # counters of other objects begin again at 0
    return counters, WeakIdRef(local), WeakIdRef(master), master.data_ptr(), master.device


@FSDP_FORWARDS.made_by
@functools.cache
def _counts_forwards(base: Any) -> Any:
    """Return a class of contexts that count forwards: a hook on modules breaks compiled graphs.

    FSDP sets ``iter_forward_root`` as a forward begins and resets it as it ends.
    """

    class CountsForwards(base):
        forwards = 0

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "iter_forward_root" and value is not None:
                self.__dict__["forwards"] = self.forwards + 1
            super().__setattr__(name, value)

    return CountsForwards


def _states() -> Iterator[Any]:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for reference in list(_module_state_mapping.values()):
        state = reference()
        if isinstance(state, FSDPState):
            yield state


def _params(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield parameters, each with its group."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13: one group per state
        groups = [state._fsdp_param_group]
    yield from (
        (param, group) for group in groups if group is not None for param in group.fsdp_params
    )
