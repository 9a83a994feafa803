"""How accelerate's ``Accelerator.prepare`` names parameters when it shards a model with FSDP2.

It notes ``data_ptr()`` of every parameter, to find those of an optimizer again after
``fully_shard``.
"""

from __future__ import annotations

from types import FrameType

from torch import Tensor


def names_by_address(caller: FrameType) -> bool:
    """Whether accelerate asks for an address as for a name: it reads no memory there.

    Raises:
        NotImplementedError: it would send frozen FP8 weights from rank 0 as plain values, for which
            other ranks would wait in vain.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_globals.get("__name__") == "accelerate.accelerator":
        if frame.f_code.co_name == "_prepare_fsdp2":
            plugin = frame.f_locals["self"].state.fsdp_plugin
            if plugin.cpu_ram_efficient_loading:
                raise NotImplementedError(
                    "accelerate's cpu_ram_efficient_loading sends the state_dict of rank 0 as "
                    "plain tensors, which frozen FP8 weights are not: prepare the model with "
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False), every rank "
                    "having loaded it"
                )
            return True
        frame = frame.f_back
    return False


def address_of_bytes(tensor: Tensor) -> int:
    """The address of the first bytes of a frozen FP8 weight."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    address: int = getattr(tensor, names[0]).data_ptr()
    return address
