"""Torch functions whose answer depends on the part of torch that calls them.

``state_dict``, ``nn.Parameter``, FSDP and ``distribute_tensor`` call ``detach``, ``chunk`` and the
like, and offer no other place to tell them what an FP8 weight is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..distributed.dtensor import check_cuts, local_of
from ..distributed.fsdp.shards import chunks
from ..tensor.base import FP8Base, MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import carry_over, take_content
from ..tensor.weight import BlockwiseFP8Weight


def _caller() -> FrameType:
    """Return the frame that called the torch function."""
    frame = sys._getframe(2)  # the override's caller: __torch_function__, of one or two classes
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _name(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _as_usual(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the torch function without its override, by the aten rules."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _detach(tensor: Tensor) -> Tensor:
    caller = _caller()
    name = _name(caller)
    in_state_dict = caller.f_code.co_name == "_save_to_state_dict"
    if in_state_dict and isinstance(tensor, BlockwiseFP8Weight):
        return tensor.master.detach()  # a state_dict holds plain tensors
    _check_distribute_tensor(tensor, caller)
    made: Tensor = _as_usual(Tensor.detach, tensor)
    if name == "torch.nn.parameter" and caller.f_back is not None:
        # nn.Module._apply (.to(), .half(), .cuda(), ...) makes a new Parameter and swaps it in
        old = caller.f_back.f_locals.get("param")
        if caller.f_back.f_code.co_name == "_apply" and isinstance(old, FP8Base):
            # It sets .data of plain parameters. Of these, which it then swaps with themselves, it
            # is done here, unless there are weak references, for which swap_tensors will raise.
            if not weakref.getweakrefs(old) and take_content(old, made):
                return old
            carry_over(old, made)
    return made


def _chunk(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    caller = _caller()
    name = _name(caller)
    _check_distribute_tensor(input, caller)
    sharding = "torch.distributed.fsdp._fully_shard._fsdp_common"
    if isinstance(input, BlockwiseFP8Tensor) and name == sharding:
        return chunks(input, *args, **kwargs)
    return _as_usual(torch.chunk, input, *args, **kwargs)


def _new_zeros(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    is_whole = isinstance(tensor, (BlockwiseFP8Weight, BlockwiseFP8Tensor))
    caller = _caller()
    if is_whole and caller.f_code.co_name == "fill_empty_tensor_to_shards":
        # of distribute_tensor, for ranks that get nothing
        return tensor.narrow(caller.f_locals["shard_dim"], 0, 0)
    if is_whole and _name(caller) != "torch.distributed.fsdp._fully_shard._fsdp_param":
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return plain.new_zeros(*args, **kwargs)
    return _as_usual(Tensor.new_zeros, tensor, *args, **kwargs)  # begins a shard


def _view_as(tensor: Tensor, other: Tensor) -> Any:
    caller = _caller()
    if _name(caller) == "torch.distributed.tensor._api" and isinstance(tensor, MasterBase):
        frame = caller.f_back
        if frame is not None and frame.f_code.co_name == "apply":  # of the autograd function
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "full_tensor":
            return tensor.master.view_as(tensor.master)  # plain on one rank, as on several
        whole: Any = caller.f_locals.get("input")  # of to_local()
        if isinstance(tensor, BlockwiseFP8Weight) and "main_grad" in getattr(whole, "__dict__", ()):
            main_grad = whole.main_grad
            local = local_of(main_grad)
            tensor.main_grad = main_grad if local is None else local
    return _as_usual(Tensor.view_as, tensor, other)


def _contiguous(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_distribute_tensor(tensor, _caller())
    return _as_usual(Tensor.contiguous, tensor, *args, **kwargs)


_DISTRIBUTES = ("torch.distributed.tensor._api", "torch.distributed.tensor.placement_types")


def _check_distribute_tensor(tensor: Tensor, caller: FrameType) -> None:
    """Refuse ``distribute_tensor`` of FP8 tensors other than stacks of experts."""
    if _name(caller) not in _DISTRIBUTES:
        return
    is_weight = isinstance(tensor, BlockwiseFP8Weight) or (
        isinstance(tensor, BlockwiseFP8Tensor) and tensor.format.transposes
    )
    if not is_weight or tensor.ndim != 3:
        raise NotImplementedError(
            f"distribute_tensor of an FP8 weight {list(tensor.shape)}, whose gradient DTensor "
            f"would silently compute in high precision: pass ColwiseParallel or RowwiseParallel of "
            f"blocktensor.distributed to parallelize_module, or shard the converted model with "
            f"fully_shard (FSDP2)"
        )
    if caller.f_code.co_name == "distribute_tensor":  # which has sent nothing yet
        mesh, placements = caller.f_locals["device_mesh"], caller.f_locals["placements"]
        format = tensor.recipe.weight_format  # type: ignore[attr-defined]
        check_cuts(tensor.shape, mesh, placements, format, "a stack of FP8 experts")


def _flatten(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _name(_caller()) == "torch.distributed.fsdp._flat_param":
        raise NotImplementedError(
            f"FullyShardedDataParallel (FSDP1) copies parameters into one flat plain tensor, and a "
            f"{type(input).__name__} would silently compute in high precision: shard the converted "
            f"model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    return _as_usual(torch.flatten, input, *args, **kwargs)


BY_CALLER: dict[Any, Callable[..., Any]] = {
    Tensor.detach: _detach,
    torch.chunk: _chunk,
    torch.flatten: _flatten,
    Tensor.contiguous: _contiguous,
    Tensor.new_zeros: _new_zeros,
    Tensor.view_as: _view_as,
}
"""Overrides of all FP8 types."""
