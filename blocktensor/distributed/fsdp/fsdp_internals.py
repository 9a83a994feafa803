"""The weights that FSDP2 shards together, read from its private structures (torch 2.11 to 2.13)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dtensor import local_of
from .changes import Changes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Sharded(NamedTuple):
    """A parameter ``name`` of the root module, which FSDP shards along ``dim`` over ``group``.

    Attributes:
        shape: of the whole parameter.
        rank, ranks: index of this process's shard along ``dim``, and the number of shards.
        device: where it is gathered.
        parameter: returns the present DTensor; None once the model is freed.
        forwards: returns how many forwards FSDP has begun, of the root or of a part that was called
            by itself. It counts alike on all ranks.
        in_backward: returns True while FSDP gathers for a backward.
        owner: FSDP's own object for the parameter, which outlives the tensors.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    group: ProcessGroup
    rank: int
    ranks: int
    device: torch.device
    parameter: Callable[[], Tensor | None]
    forwards: Callable[[], int]
    in_backward: Callable[[], bool]
    owner: Any


def sharded_with(owner: Any) -> tuple[list[Sharded], bool]:
    """The parameters under the FSDP2 root of one of them, of which ``owner`` is FSDP's object.

    Returns:
        The parameters in FSDP's order (none without an owner), and True if these are all: before
        the root's first forward, only those gathered together are known.
    """
    for state in _states():
        if any(param is owner for param in _params(state)):
            states = state._state_ctx.all_states
            forwards = _counter_of_forwards(state._state_ctx)
            found = [
                _sharded(param, group, forwards)
                for s in states or [state]
                for group in _groups(s)
                for param in group.fsdp_params
            ]
            return found, bool(states)
    return [], False


def owner_of(local: Tensor, module: nn.Module | None = None) -> Any:
    """FSDP's own object for the parameter, of ``module``, whose local part this is; else None."""
    return next(owners_of(local, module), None)


def owners_of(local: Tensor, module: nn.Module | None = None) -> Iterator[Any]:
    """All such objects: models may share a parameter."""
    for state in _states():
        yield from (param for param in _params(state) if holds(param, local, module))


def holds(owner: Any, local: Tensor, module: nn.Module | None = None) -> bool:
    """Whether this is the local part of FSDP's parameter, now; ``module``: which that one is of."""
    held: bool = owner._sharded_local_tensor is local
    return held and (module is None or owner._module_info.module is module)


def count_changes(owner: Any) -> Callable[[], int | None]:
    """A function that returns how often FSDP's parameter has changed; None once it is freed."""
    if not hasattr(owner, "changes"):
        owner.__class__ = _resetting(owner.__class__)
        owner.changes = Changes()
    reference = weakref.ref(owner)

    def changes() -> int | None:
        param = reference()
        return None if param is None else param.changes.count(param.sharded_param)

    return changes


@functools.cache
def _resetting(base: Any) -> Any:
    """The class of parameters that leave out what FSDP does to them after a move or a load.

    FSDP pads the rows anew then, on those ranks alone that have fewer rows than others.
    """

    class ResettingParam(base):
        changes: Changes

        def reset_sharded_param(self) -> None:
            info = self._module_info
            weight = getattr(info.module, info.param_name)  # FSDP adopts it now
            counting = [self.changes]
            local = local_of(weight)
            if local is not None and local.shape != self.padded_sharded_param_size:
                # other models may share it
                params = (param for param in owners_of(local) if param is not self)
                counting += [param.changes for param in params if hasattr(param, "changes")]
            for changes in counting:
                changes.count(weight)
            super().reset_sharded_param()
            for changes in counting:
                changes.skip(weight)

    return ResettingParam


def _sharded(param: Any, group: Any, forwards: Callable[[], int]) -> Sharded:
    info, after = param.mesh_info, param.post_forward_mesh_info
    if after is not None and after is not info:
        raise NotImplementedError(
            f"reshard_after_forward={after.shard_mesh_size} with FP8 weights: FSDP2 cannot reshard "
            f"to fewer ranks what tensors gather in their own way; pass True or False"
        )
    # replicate() is FSDP2 with nothing sharded
    is_sharded = hasattr(info, "shard_process_group")
    return Sharded(
        param._param_fqn or param._module_info.param_name,
        tuple(param._orig_size),
        param.fsdp_placement.dim,
        info.shard_process_group if is_sharded else info.replicate_process_group,
        info.shard_mesh_rank if is_sharded else 0,
        info.shard_mesh_size if is_sharded else 1,
        param.device,
        _parameter_of(weakref.ref(param)),
        forwards,
        _is_in_backward(weakref.ref(group)),
        param,
    )


def _counter_of_forwards(context: Any) -> Callable[[], int]:
    """FSDP sets ``iter_forward_root`` as a forward begins and resets it as it ends."""
    if not hasattr(context, "forwards"):
        context.__class__ = _counting(context.__class__)
    reference = weakref.ref(context)

    def forwards() -> int:
        found = reference()
        return 0 if found is None else found.forwards

    return forwards


@functools.cache
def _counting(base: Any) -> Any:
    """The class of contexts that count forwards. A hook on modules would break compiled graphs."""

    class CountingContext(base):
        forwards = 0

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "iter_forward_root" and value is not None:
                self.__dict__["forwards"] = self.forwards + 1
            super().__setattr__(name, value)

    return CountingContext


def _is_in_backward(reference: Callable[[], Any]) -> Callable[[], bool]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    backward = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD

    def in_backward() -> bool:
        group = reference()
        # a backward that raised leaves its state; no task of autograd runs then
        runs = torch._C._current_graph_task_id() != -1
        return runs and group is not None and group._training_state in backward

    return in_backward


def _parameter_of(reference: Callable[[], Any]) -> Callable[[], Tensor | None]:
    def parameter() -> Tensor | None:
        param = reference()
        return None if param is None else param.sharded_param

    return parameter


def _states() -> Iterator[Any]:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for reference in list(_module_state_mapping.values()):
        state = reference()
        if isinstance(state, FSDPState):
            yield state


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13: one group per state
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _params(state: Any) -> Iterator[Any]:
    for group in _groups(state):
        yield from group.fsdp_params
