"""Override torch functions whose result depends on the part of torch that calls them.

``state_dict``, ``nn.Parameter``, FSDP, ``distribute_tensor`` and ``nn.DataParallel`` call
``detach``, ``chunk`` and similar functions, and have no other hook for tensor types.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..sharding.cuts import UNCONVERTED, check_on_grid
from ..sharding.fsdp.shards import chunks
from ..tensor.base import MasterBase
from ..tensor.compat.swap_in import carry_over, take_content
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.refusals import with_remedy
from ..tensor.torch_internals.callers import APPLY, Caller, caller
from ..tensor.weight import FP8_TYPES, BlockwiseFP8Weight


def caller_of_override() -> Caller:
    """Return the caller of the torch function."""
    who = caller(2)  # the override runs in __torch_function__ of one or two classes
    while who.function == "__torch_function__" and who.back is not None:
        who = who.back
    return who


def _as_usual(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the torch function without its override, by the aten rules."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _detach(tensor: Tensor) -> Tensor:
    who = caller_of_override()
    if who.function == "_save_to_state_dict" and isinstance(tensor, BlockwiseFP8Weight):
        return tensor.master.detach()  # a state_dict holds plain tensors
    _check_distribute_tensor(tensor, who)
    detached: Tensor = _as_usual(Tensor.detach, tensor)
    if who.module == "torch.nn.parameter" and who.back is not None and who.back.place == APPLY:
        # nn.Module._apply (.to(), .half(), .cuda(), ...) makes a new Parameter and swaps it in
        old = who.back.local("param")
        # It sets .data of plain parameters, and swaps FP8 ones. These take the new content here and
        # are swapped with themselves; not if there are weak references, for which swap_tensors
        # raises.
        if not weakref.getweakrefs(old) and take_content(old, detached):
            return cast(Tensor, old)
        carry_over(old, detached)
    return detached


def _chunk(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    who = caller_of_override()
    _check_distribute_tensor(input, who)
    sharding = "torch.distributed.fsdp._fully_shard._fsdp_common"
    if isinstance(input, BlockwiseFP8Tensor) and who.module == sharding:
        return chunks(input, *args, **kwargs)
    return _as_usual(torch.chunk, input, *args, **kwargs)


def _new_zeros(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    is_whole = isinstance(tensor, FP8_TYPES)
    who = caller_of_override()
    if is_whole and who.function == "fill_empty_tensor_to_shards":
        # from distribute_tensor, for ranks that get nothing
        return tensor.narrow(who.local("shard_dim"), 0, 0)
    if is_whole and who.module != "torch.distributed.fsdp._fully_shard._fsdp_param":
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return plain.new_zeros(*args, **kwargs)
    return _as_usual(Tensor.new_zeros, tensor, *args, **kwargs)  # the beginning of a shard


def _view_as(tensor: Tensor, other: Tensor) -> Any:
    who = caller_of_override()
    if who.module == "torch.distributed.tensor._api" and isinstance(tensor, MasterBase):
        outer = who.back
        if outer is not None and outer.function == "apply":  # of an autograd function
            outer = outer.back
        if outer is not None and outer.function == "full_tensor":
            return tensor.master.view_as(tensor.master)  # plain, as with several ranks
    return _as_usual(Tensor.view_as, tensor, other)


def _contiguous(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_distribute_tensor(tensor, caller_of_override())
    return _as_usual(Tensor.contiguous, tensor, *args, **kwargs)


_DISTRIBUTES = ("torch.distributed.tensor._api", "torch.distributed.tensor.placement_types")
_STATE_DICTS = "torch.distributed._state_dict_utils"


def _check_distribute_tensor(tensor: Tensor, who: Caller) -> None:
    """Refuse to distribute FP8 tensors except stacks, and to broadcast a ``state_dict``'s."""
    is_sent = who.place == (_STATE_DICTS, "_broadcast_tensors")  # to ranks that receive plain ones
    if not is_sent and who.module not in _DISTRIBUTES:
        return
    is_state = who.back is not None and who.back.module == _STATE_DICTS
    if is_sent or (is_state and tensor.ndim != 3):
        raise NotImplementedError(
            f"set_model_state_dict cannot send parts of the frozen FP8 weight {list(tensor.shape)} "
            f"of a whole state to ranks: load it before the model is sharded, on every rank and "
            f"without broadcast_from_rank0, or use blocktensor.save_fp8 and load_fp8"
        )
    if isinstance(tensor, BlockwiseFP8Tensor) and not tensor.format.transposes:
        raise NotImplementedError(
            f"distribute_tensor of FP8 activations {list(tensor.shape)}: distribute them in high "
            f"precision (.dequantize()); FP8 linear layers cast their local parts"
        )
    if tensor.ndim != 3:
        raise NotImplementedError(
            f"distribute_tensor of an FP8 weight {list(tensor.shape)}, whose gradient DTensor "
            f"would silently compute in high precision: pass ColwiseParallel or RowwiseParallel of "
            f"blocktensor.distributed to parallelize_module, or shard the converted model with "
            f"fully_shard (FSDP2)"
        )
    if who.function == "distribute_tensor":  # it has sent nothing yet
        mesh, placements = who.local("device_mesh"), who.local("placements")
        check_on_grid(tensor.shape, mesh, placements, "a stack of FP8 experts", UNCONVERTED)


def _flatten(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if caller_of_override().module == "torch.distributed.fsdp._flat_param":
        raise NotImplementedError(
            f"FullyShardedDataParallel (FSDP1) copies parameters into one flat plain tensor, and a "
            f"{type(input).__name__} would silently compute in high precision: shard the converted "
            f"model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    return _as_usual(torch.flatten, input, *args, **kwargs)


_COPIES_TO_DEVICES = "torch._utils", "_handle_complex"
"""Asked of each tensor by ``torch.nn.parallel.comm``, just before C++ copies its memory."""


def _is_complex(tensor: Tensor) -> Any:
    if caller_of_override().place == _COPIES_TO_DEVICES:
        raise with_remedy(
            f"nn.DataParallel (transformers' Trainer uses it if one process sees several GPUs) "
            f"copies parameters to other GPUs as plain tensors, and a {type(tensor).__name__} "
            f"would silently compute in high precision there: start one process for each GPU "
            f"(torchrun, accelerate launch) with DistributedDataParallel or fully_shard (FSDP2), "
            f"or let this process see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    return _as_usual(Tensor.is_complex, tensor)


BY_CALLER: dict[Any, Callable[..., Any]] = {
    Tensor.detach: _detach,
    torch.chunk: _chunk,
    torch.flatten: _flatten,
    Tensor.contiguous: _contiguous,
    Tensor.is_complex: _is_complex,
    Tensor.new_zeros: _new_zeros,
    Tensor.view_as: _view_as,
}
"""Overrides for all FP8 types."""
