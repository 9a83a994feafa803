"""Which weights FSDP2 shards together: the one place that looks into FSDP's own structures.

They are not public: torch 2.11 to 2.13 are known. Where another version has them differently, every
weight stands alone, which costs an all-reduce a weight and changes nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IsShard = Callable[[Tensor], bool]


class Sharded(NamedTuple):
    """A parameter that FSDP shards, with what FSDP knows of it.

    Attributes:
        name: in the root module.
        shape: of the whole parameter.
        dim: along which it is sharded.
        local: gives its local tensor as it is now; None once the model is gone.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    local: Callable[[], Tensor | None]


def root_of(module: nn.Module) -> object | None:
    """What stands for the FSDP root above a module that owns a sharded parameter."""
    for state in _states():
        if any(param._module_info.module is module for param in _params(state)):
            root: object = state._state_ctx
            return root
    return None


def sharded_with(root: object, group: ProcessGroup, is_shard: IsShard) -> Iterator[Sharded]:
    """The parameters under a root, in FSDP's order, that are shards over ``group``."""
    for state in root.all_states:  # type: ignore[attr-defined]
        for param in _params(state):
            known = param.mesh_info.shard_process_group is group
            if known and is_shard(param._sharded_local_tensor):
                yield Sharded(
                    param._param_fqn or param._module_info.param_name,
                    tuple(param._orig_size),
                    param.fsdp_placement.dim,
                    _local_of(weakref.ref(param)),
                )


def _local_of(reference: Callable[[], Any]) -> Callable[[], Tensor | None]:
    def local() -> Tensor | None:
        param = reference()
        return None if param is None else param._sharded_local_tensor

    return local


def _states() -> Iterator[Any]:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for reference in list(_module_state_mapping.values()):
        state = reference()
        if isinstance(state, FSDPState):
            yield state


def _params(state: Any) -> Iterator[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13: one a state
        groups = [state._fsdp_param_group]
    for group in groups:
        yield from () if group is None else group.fsdp_params
