"""Run the forwards of parallel linear layers, with any layouts of input and output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import allow_in_graph, assume_constant_result, is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..autograd.linear import refuse_prepared
from ..sharding.dtensor import local_of
from ..sharding.ranks import agree
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import FP8_TYPES, BlockwiseFP8Weight
from .collectives import Reduction, TokenShards
from .parallel_matmuls import Colwise, Rowwise, parallel_linear
from .weight_part import WeightPart, part_off_grid

FP8Weight = BlockwiseFP8Weight | BlockwiseFP8Tensor

FEATURES = Shard(-1)
"""The layout in which every rank has some columns of all tokens."""


class Layouts(NamedTuple):
    """The arguments of a style; see :class:`~blocktensor.distributed.ColwiseParallel`."""

    input: Placement
    output: Placement
    use_local_output: bool
    reduce_dtype: torch.dtype | None
    in_rank_order: bool


class Agreement:
    """The last description of a module that the ranks of a mesh have compared.

    Ranks that disagree would wait for each other's collectives, or read other bytes.
    """

    def __init__(self, what: str, mesh: DeviceMesh) -> None:
        self._what, self._mesh = what, mesh
        self._agreed: tuple[object, ...] = ()

    def check(self, *mine: object) -> None:
        """Compare ``mine`` between ranks, unless it is what they agreed on last.

        Raises:
            RuntimeError: it differs between ranks; raised on every rank.
        """
        if mine == self._agreed:
            return
        agree(self._what, [", ".join(map(str, mine))], self._mesh.get_group())
        self._agreed = mine


class ParallelForward(ABC):
    """The forward of one parallel linear layer, bound to it as a method."""

    kind: str
    """The name of the forward on the linear layer and in graphs."""

    dim: int
    """The dimension of the weight that is cut."""

    def __init__(self, mesh: DeviceMesh, layouts: Layouts) -> None:
        self.mesh, self.layouts = mesh, layouts
        self.agreement = Agreement("tensor parallel linear layers", mesh)
        given, made, *others = layouts
        self._constants = self.kind, as_constant(given), as_constant(made), *others

    def __call__(self, module: nn.Linear, input: Tensor) -> Tensor:
        """Run ``module(input)``."""
        if is_dynamo_compiling():
            weight = module.weight
            self._agree_while_traced(weight)
            return _whole(input, weight, module.bias, *self._constants)
        local = fp8_local(module.weight)
        self._agree(module.weight, local)
        return self._run(input, module.weight, module.bias, local)

    def _agree(self, weight: Any, local: FP8Weight | None) -> None:
        """Compare facts about the layer between ranks."""
        self.agreement.check(
            type(self).__name__,
            tuple(weight.shape),
            weight.dtype,
            self.layouts,
            "not converted" if local is None else local.recipe,
        )

    @assume_constant_result  # calls this at once, with the weight itself
    def _agree_while_traced(self, weight: Any) -> None:
        self._agree(weight, fp8_local(weight))

    def _run(self, input: Tensor, weight: Any, bias: Any, local: FP8Weight | None) -> Tensor:
        if local is None:
            # a shard that FSDP2 has not gathered raises there
            return self._in_high_precision(input, weight, bias)
        y, layout = self._in_fp8(
            input,
            weight.to_local(),
            None if bias is None else bias.to_local(),
            self._part(weight.shape, local),
        )
        wanted = _of(self.layouts.output, y.ndim)
        if layout == wanted and self.layouts.use_local_output:
            return y
        return self._given_out(DTensor.from_local(y, self.mesh, [layout], run_check=False))

    @abstractmethod
    def _in_fp8(
        self, x: Tensor, w: Tensor, bias: Tensor | None, part: WeightPart | None
    ) -> tuple[Tensor, Placement]:
        """Return this rank's part of the output, and its layout."""

    @property
    @abstractmethod
    def _reads(self) -> Placement:
        """The layout of the input for a matmul of DTensors."""

    def _part(self, shape: Sequence[int], local: FP8Weight) -> WeightPart | None:
        format = local.recipe.weight_format
        part = part_off_grid(tuple(shape), self.dim, self.mesh.get_group(), format)
        if part is not None and not isinstance(local, BlockwiseFP8Weight):
            raise NotImplementedError(
                f"a tensor parallel FP8 weight {list(shape)} of which each rank holds "
                f"{shape[self.dim] // self.mesh.size()} {'inputs' if self.dim else 'outputs'}, no "
                f"multiple of {format.block_shape[self.dim]}, and which FSDP2 shards besides, or "
                f"which is frozen: leave it unconverted (convert(..., skip=[...])), or use fewer "
                f"tensor parallel ranks"
            )
        return part

    def _in_high_precision(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run a linear layer that was not converted as torch's style does."""
        read = self._distributed(x, _of(self._reads, x.ndim))
        return self._given_out(F.linear(read, weight, bias))

    def _given_out(self, y: Any) -> Tensor:
        y = y.redistribute(placements=[self.layouts.output])
        made: Tensor = y.to_local() if self.layouts.use_local_output else y
        return made

    def _distributed(self, x: Any, layout: Placement) -> Any:
        """Return the input as a DTensor of this layout."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [self.layouts.input], run_check=False)
        # a redistribution would sum gradients separately for each linear layer that reads x
        return x if layout_of(x, layout) == layout else x.redistribute(placements=[layout])

    @property
    def _reduction(self) -> Reduction:
        return Reduction(
            self.mesh.get_group(), self.layouts.reduce_dtype, self.layouts.in_rank_order
        )


class ColwiseForward(ParallelForward):
    """The forward of a linear layer whose outputs are cut between ranks."""

    kind, dim = "colwise", 0
    _reads = Replicate()

    def _in_fp8(
        self, x: Tensor, w: Tensor, bias: Tensor | None, part: WeightPart | None
    ) -> tuple[Tensor, Placement]:
        features = _of(FEATURES, x.ndim)
        if isinstance(x, BlockwiseFP8Tensor) and x.prepared is not None:
            return parallel_linear(x, w, bias, Colwise(None, None, part)), features
        layout = layout_of(x, self.layouts.input)
        reduction: Reduction | None = self._reduction
        dim = token_dim(layout, x)
        if dim is not None:
            x = local_input(x, layout)
            tokens = TokenShards.of(x.shape, dim, self.mesh.get_group())
            return parallel_linear(x, w, bias, Colwise(tokens, reduction, part)), features
        if isinstance(x, DTensor) or not layout.is_replicate():
            whole = self._distributed(x, Replicate())
            # DTensor adds the partial sums of all linear layers that read x when it needs them
            x = whole.to_local(grad_placements=[Partial()])
            reduction = None
        return parallel_linear(x, w, bias, Colwise(None, reduction, part)), features


class RowwiseForward(ParallelForward):
    """The forward of a linear layer whose inputs are cut between ranks."""

    kind, dim = "rowwise", 1
    _reads = FEATURES

    def _in_fp8(
        self, x: Tensor, w: Tensor, bias: Tensor | None, part: WeightPart | None
    ) -> tuple[Tensor, Placement]:
        if isinstance(x, BlockwiseFP8Tensor):
            refuse_prepared(x)
        features = _of(FEATURES, x.ndim)
        if isinstance(x, DTensor) or layout_of(x, self.layouts.input) != features:
            cut = self._distributed(x, features)
            x = cut.to_local(grad_placements=[features])
        wanted = _of(self.layouts.output, x.ndim)
        layout = wanted if isinstance(wanted, Shard) and wanted != features else Replicate()
        dim = layout.dim if isinstance(layout, Shard) else None
        tokens = None if dim is None else TokenShards.of_whole(x.shape, dim, self.mesh.get_group())
        return parallel_linear(x, w, bias, Rowwise(tokens, self._reduction, part)), layout


def as_constant(layout: Placement) -> str:
    """Return ``layout`` as a string: graphs hold no objects.

    A string, since Dynamo would make a number symbolic if it differs between two linear layers.

    Raises:
        NotImplementedError: the layout is not ``Shard``, ``Replicate`` or ``Partial``.
    """
    known: Any = layout
    kind = type(layout).__name__  # Dynamo of torch 2.12 cannot compare these classes
    if kind == "Replicate":
        return "replicate"
    if kind == "Shard":
        return f"shard {known.dim}"
    if kind == "Partial":
        return f"partial {known.reduce_op}"
    raise NotImplementedError(
        f"a layout {layout} of a tensor parallel linear layer: expected Shard, Replicate or Partial"
    )


def from_constant(constant: str) -> Placement:
    """Return the layout from its string; the inverse of :func:`as_constant`."""
    kind, _, argument = constant.partition(" ")
    if kind == "replicate":
        return Replicate()
    return Shard(int(argument)) if kind == "shard" else Partial(argument)


def fp8_local(weight: Any) -> FP8Weight | None:
    """Return the local part of an FP8 weight; None for a weight in high precision."""
    local = local_of(weight)
    return local if isinstance(local, FP8_TYPES) else None


def layout_of(x: Any, given: Placement) -> Placement:
    """Return the layout of a DTensor; for a plain input, the ``given`` one."""
    (layout,) = x.placements if isinstance(x, DTensor) else (given,)
    return _of(layout, x.ndim)


def _of(layout: Placement, ndim: int) -> Placement:
    """Return a layout with its dimension counted from the front."""
    if isinstance(layout, Shard):
        if not -ndim <= layout.dim < ndim:
            raise ValueError(f"{layout} of a tensor of {ndim} dimensions")
        return Shard(layout.dim % ndim)
    return layout


def token_dim(layout: Placement, x: Any) -> int | None:
    """Return the dimension of tokens along which x is cut in equal parts; None if it is not."""
    if not isinstance(layout, Shard) or layout.dim == x.ndim - 1:
        return None
    # parts of a plain input are equal
    is_even = not isinstance(x, DTensor) or x.shape[layout.dim] % x.device_mesh.size() == 0
    return layout.dim if is_even else None


def local_input(x: Any, layout: Placement) -> Tensor:
    """Return this rank's part of an input, whose gradient has the same layout."""
    local: Tensor = x.to_local(grad_placements=[layout]) if isinstance(x, DTensor) else x
    return local


_FORWARDS = {forward.kind: forward for forward in (ColwiseForward, RowwiseForward)}


@allow_in_graph
def _whole(
    input: Tensor, weight: Any, bias: Any, kind: str, given: str, made: str, *others: Any
) -> Tensor:
    """Run the forward of a linear layer; Dynamo puts this call into its graph.

    Graphs hold constants instead of layouts and meshes: linear layers of one kind share a graph.
    """
    layouts = Layouts(from_constant(given), from_constant(made), *others)
    forward = _FORWARDS[kind](weight.device_mesh, layouts)
    return forward._run(input, weight, bias, fp8_local(weight))
