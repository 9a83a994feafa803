"""The forwards of parallel linears: from the layout that comes in to the one that goes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ...tensor.weight import BlockwiseFP8Weight
from ..compare_ranks import agree
from ..dtensor import local_of
from .collectives import Reduction
from .colwise_linear import colwise_linear
from .rowwise_linear import rowwise_linear
from .token_shards import TokenShards

FEATURES = Shard(-1)
"""Every rank has some columns of all tokens."""


class Layouts(NamedTuple):
    """What a style was made with; see :class:`~blocktensor.distributed.ColwiseParallel`."""

    input: Placement
    output: Placement
    use_local_output: bool
    reduce_dtype: torch.dtype | None
    in_rank_order: bool


class ParallelForward(ABC):
    """The forward of one parallel linear, bound to it as its method."""

    def __init__(self, mesh: DeviceMesh, layouts: Layouts) -> None:
        self.mesh, self.layouts = mesh, layouts
        self.agreed = ""

    def __call__(self, module: nn.Linear, input: Tensor) -> Tensor:
        """``module(input)``."""
        weight: Any = module.weight
        self._agree(weight)
        # a shard of FSDP2, which has not gathered it, raises on the other way
        if not isinstance(local_of(weight), (BlockwiseFP8Weight, BlockwiseFP8Tensor)):
            return self._in_high_precision(module, input)
        check_no_main_grad(weight)
        bias: Any = module.bias
        y, layout = self._in_fp8(
            input, weight.to_local(), None if bias is None else bias.to_local()
        )
        wanted = _of(self.layouts.output, y.ndim)
        if layout == wanted and self.layouts.use_local_output:
            return y
        return self._given_out(DTensor.from_local(y, self.mesh, [layout], run_check=False))

    @abstractmethod
    def _in_fp8(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Placement]:
        """This rank's part of the output, and its layout."""

    @property
    @abstractmethod
    def _reads(self) -> Placement:
        """The layout of the input that a product of DTensors reads."""

    def _in_high_precision(self, module: nn.Linear, x: Tensor) -> Tensor:
        """As of torch's style: the linear was not converted."""
        read = self._distributed(x).redistribute(placements=[self._reads])
        return self._given_out(F.linear(read, module.weight, module.bias))

    def _given_out(self, y: Any) -> Tensor:
        y = y.redistribute(placements=[self.layouts.output])
        made: Tensor = y.to_local() if self.layouts.use_local_output else y
        return made

    def _distributed(self, x: Tensor) -> Any:
        """The input as a DTensor; a plain one has the layout that the style was told."""
        if isinstance(x, DTensor):
            return x
        return DTensor.from_local(x, self.mesh, [self.layouts.input], run_check=False)

    def _layout_of(self, x: Any) -> Placement:
        (layout,) = x.placements if isinstance(x, DTensor) else (self.layouts.input,)
        return _of(layout, x.ndim)

    @property
    def _reduction(self) -> Reduction:
        return Reduction(
            self.mesh.get_group(), self.layouts.reduce_dtype, self.layouts.in_rank_order
        )

    def _agree(self, weight: Any) -> None:
        """Compare with the other ranks what this linear is, when it first runs and if it changed.

        Ranks that disagree would wait for each other's collectives, or read other bytes.
        """
        if is_compiling():
            return
        local = local_of(weight)
        fp8 = isinstance(local, (BlockwiseFP8Weight, BlockwiseFP8Tensor))
        mine = f"{type(self).__name__} {list(weight.shape)} {weight.dtype}, {self.layouts}, "
        mine += f"{local.recipe}" if fp8 else "not converted"  # type: ignore[union-attr]
        if mine != self.agreed:
            agree("tensor parallel linears", [mine], self.mesh.get_group())
            self.agreed = mine


class ColwiseForward(ParallelForward):
    """The forward of a linear whose outputs are cut."""

    _reads = Replicate()

    def _in_fp8(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Placement]:
        layout, group = self._layout_of(x), self.mesh.get_group()
        tokens, reduction = None, self._reduction
        dim = _token_dim(layout, x)
        if dim is not None:
            if isinstance(x, DTensor):
                x = x.to_local(grad_placements=[layout])
            tokens = TokenShards.of(x.shape, dim, group)
        elif isinstance(x, DTensor) or not layout.is_replicate():
            whole = self._distributed(x).redistribute(placements=[Replicate()])
            # DTensor adds the partial sums where it needs them, of all linears that read x
            x = whole.to_local(grad_placements=[Partial()])
            return colwise_linear(x, w, bias, None, None), _of(FEATURES, x.ndim)
        return colwise_linear(x, w, bias, tokens, reduction), _of(FEATURES, x.ndim)


class RowwiseForward(ParallelForward):
    """The forward of a linear whose inputs are cut."""

    _reads = FEATURES

    def _in_fp8(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Placement]:
        features = _of(FEATURES, x.ndim)
        if isinstance(x, DTensor) or self._layout_of(x) != features:
            cut = self._distributed(x).redistribute(placements=[features])
            x = cut.to_local(grad_placements=[features])
        wanted = _of(self.layouts.output, x.ndim)
        layout = wanted if isinstance(wanted, Shard) and wanted != features else Replicate()
        dim = layout.dim if isinstance(layout, Shard) else None
        return rowwise_linear(x, w, bias, dim, self._reduction), layout


def _of(layout: Placement, ndim: int) -> Placement:
    """A layout with its dimension counted from the front."""
    if isinstance(layout, Shard):
        if not -ndim <= layout.dim < ndim:
            raise ValueError(f"{layout} of a tensor of {ndim} dimensions")
        return Shard(layout.dim % ndim)
    return layout


def _token_dim(layout: Placement, x: Any) -> int | None:
    """The dimension of tokens along which x is cut into equal parts; None if it is not."""
    if not isinstance(layout, Shard) or layout.dim == x.ndim - 1:
        return None
    # parts of a plain input are equal
    is_even = not isinstance(x, DTensor) or x.shape[layout.dim] % x.device_mesh.size() == 0
    return layout.dim if is_even else None


def check_no_main_grad(weight: Any) -> None:
    """Raise for a parallel weight with a ``main_grad``, which no backward would add to.

    Raises:
        NotImplementedError: it has one.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is not None or getattr(local_of(weight), "main_grad", None) is not None:
        raise NotImplementedError(
            "weight.main_grad of a tensor parallel linear: set it to None and read weight.grad"
        )
