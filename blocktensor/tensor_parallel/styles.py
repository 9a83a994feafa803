"""The styles with which ``parallelize_module`` cuts FP8 linears between ranks."""

from __future__ import annotations

import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..ops import checks
from .cut_linear import cut_linear
from .is_parallel import bind
from .parallel_forward import ColwiseForward, Layouts, RowwiseForward


class ColwiseParallel(torch_styles.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` for linears in FP8.

    Every rank holds some rows of the weight and computes those columns of the output. With
    ``input_layouts=Shard(...)`` of tokens (sequence parallel), forward gathers the input as e4m3
    and scales, half the bytes of bf16; only this rank's tokens are saved, in FP8, and backward
    gathers them beside the data gradient. Outputs and weight gradients are those of one process,
    bit for bit. The data gradient is a sum over ranks, reduced in high precision.

    If the tokens of a rank are no multiple of 128 (of each sequence of a batch, where tokens are
    cut within sequences), the input is gathered in its own dtype for the weight gradient.

    Linears that are not converted, and embeddings, run as with torch's style.

    Args:
        input_layouts: of a plain input: ``Replicate()`` (default), or ``Shard(dim)`` of tokens. All
            ranks hold equal parts.
        output_layouts: ``Shard(-1)`` (default); others are made by DTensor, in high precision.
        use_local_output: return plain tensors, not DTensors.
        reduce_dtype: in which partial sums of the data gradient travel; default: the input's dtype.
        in_rank_order: send every rank's partial sum as it is and add them in fp32 in the order of
            ranks. Slower; the bits then do not depend on the backend.

    Raises:
        TypeError: ``reduce_dtype`` is not bf16, fp16 or fp32.
        ValueError, NotImplementedError: from ``parallelize_module``, if the linear cannot be cut
            (ranks hold equal parts; a frozen FP8 weight needs cuts at multiples of 128).
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        reduce_dtype: torch.dtype | None = None,
        in_rank_order: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.reduce_dtype, self.in_rank_order = checked_dtype(reduce_dtype), in_rank_order

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        forward = ColwiseForward(device_mesh, _layouts(self))
        cut_linear(module, device_mesh, 0, self.src_data_rank)
        bind(forward, forward.kind, module)
        return module


class RowwiseParallel(torch_styles.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` for linears in FP8.

    Every rank holds some columns of the weight and computes a partial sum of the output, which is
    reduced in high precision. With ``output_layouts=Shard(...)`` of tokens (sequence parallel),
    each rank gets its tokens, and backward gathers the output's gradient as e4m3 and scales. Data
    and weight gradients are those of one process, bit for bit; but not weight gradients with
    ``Recipe(wgrad_input="128x128")`` if a rank's inputs are no multiple of 128: its blocks end with
    them.

    If the tokens of a rank are no multiple of 128 (as of :class:`ColwiseParallel`), the gradient is
    gathered in its own dtype too, for the weight gradient.

    Linears that are not converted, and embeddings, run as with torch's style.

    Args:
        input_layouts: of a plain input: ``Shard(-1)`` (default); DTensor makes it of others.
        output_layouts: ``Replicate()`` (default), or ``Shard(dim)`` of tokens.
        use_local_output: return plain tensors, not DTensors.
        reduce_dtype: in which partial sums of the output travel; default: the input's dtype.
        in_rank_order: as of :class:`ColwiseParallel`.

    Raises:
        TypeError, ValueError, NotImplementedError: as :class:`ColwiseParallel`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        reduce_dtype: torch.dtype | None = None,
        in_rank_order: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.reduce_dtype, self.in_rank_order = checked_dtype(reduce_dtype), in_rank_order

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        forward = RowwiseForward(device_mesh, _layouts(self))
        cut_linear(module, device_mesh, 1, self.src_data_rank)
        bind(forward, forward.kind, module)
        return module


def checked_dtype(reduce_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return ``reduce_dtype``, or raise TypeError."""
    if reduce_dtype is not None and reduce_dtype not in checks.HIGH_PRECISION:
        known = ", ".join(map(str, checks.HIGH_PRECISION))
        raise TypeError(f"reduce_dtype={reduce_dtype!r}: expected one of {known}, or None")
    return reduce_dtype


def _layouts(style: ColwiseParallel | RowwiseParallel) -> Layouts:
    (given,), (made,) = style.input_layouts, style.output_layouts
    return Layouts(given, made, style.use_local_output, style.reduce_dtype, style.in_rank_order)
