"""Define the styles with which ``parallelize_module`` cuts FP8 linear layers between ranks."""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ..ops import checks
from ..sharding.dtensor import local_of, with_local
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .parallel_forward import ColwiseForward, Layouts, ParallelForward, RowwiseForward


class _FP8Style(torch_styles.ParallelStyle):
    """The base class of both styles: it overrides what torch's styles do to linear layers."""

    input_layouts: tuple[Placement]
    output_layouts: tuple[Placement]
    use_local_output: bool
    _forward: ClassVar[type[ParallelForward]]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        reduce_dtype: torch.dtype | None = None,
        in_rank_order: bool = False,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        if reduce_dtype is not None:
            checks.given_dtype(reduce_dtype, "reduce_dtype")
        self.reduce_dtype, self.in_rank_order = reduce_dtype, in_rank_order

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)  # type: ignore[safe-super]  # of torch's style
        (given,), (wanted,) = self.input_layouts, self.output_layouts
        layouts = Layouts(
            given, wanted, self.use_local_output, self.reduce_dtype, self.in_rank_order
        )
        forward = self._forward(device_mesh, layouts)
        _cut_linear(module, device_mesh, forward.dim, self.src_data_rank)
        _bind(forward, module)
        return module


class ColwiseParallel(_FP8Style, torch_styles.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` for linear layers in FP8.

    Every rank holds some rows of the weight and computes those columns of the output. With
    ``input_layouts=Shard(...)`` of tokens (sequence parallel), forward gathers the input as e4m3
    and scales, half the bytes of bf16; only this rank's tokens are saved, in FP8, and backward
    gathers them during dgrad. Outputs and weight gradients have the same bits as in one process.
    The data gradient is a sum over ranks, reduced in high precision.

    If the tokens of a rank are no multiple of 128 (of each sequence of a batch, where tokens are
    cut within sequences), the input is gathered in its own dtype for the weight gradient.

    Linear layers that are not converted, and embeddings, run as with torch's style.

    Args:
        input_layouts: of a plain input: ``Replicate()`` (default), or ``Shard(dim)`` of tokens. All
            ranks hold equal parts.
        output_layouts: ``Shard(-1)`` (default); DTensor makes other layouts, in high precision.
        use_local_output: return plain tensors, not DTensors.
        reduce_dtype: the dtype in which ranks send partial sums of the data gradient; default: the
            input's dtype.
        in_rank_order: send every partial sum unchanged and add them in fp32 in the order of ranks.
            This is slower; the bits then do not depend on the backend.

    Raises:
        TypeError: ``reduce_dtype`` is not bf16, fp16 or fp32.
        ValueError, NotImplementedError: in ``parallelize_module``, if the linear layer cannot be
            cut (ranks must hold equal parts; a frozen FP8 weight needs cuts at multiples of 128).
    """

    _forward = ColwiseForward


class RowwiseParallel(_FP8Style, torch_styles.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` for linear layers in FP8.

    Every rank holds some columns of the weight and computes a partial sum of the output, which is
    reduced in high precision. With ``output_layouts=Shard(...)`` of tokens (sequence parallel),
    each rank gets its tokens, and backward gathers the output's gradient as e4m3 and scales. Data
    and weight gradients have the same bits as in one process, with one exception: if a rank's
    inputs are no multiple of 128, its last 128x128 blocks are smaller, and only
    ``Recipe.deepseek()`` gives weight gradients with the same bits.

    If the tokens of a rank are no multiple of 128 (see :class:`ColwiseParallel`), the gradient is
    gathered in its own dtype too, for the weight gradient.

    Linear layers that are not converted, and embeddings, run as with torch's style.

    Args:
        input_layouts: of a plain input: ``Shard(-1)`` (default); DTensor makes it of others.
        output_layouts: ``Replicate()`` (default), or ``Shard(dim)`` of tokens.
        use_local_output: return plain tensors, not DTensors.
        reduce_dtype: the dtype in which ranks send partial sums of the output; default: the input's
            dtype.
        in_rank_order: see :class:`ColwiseParallel`.

    Raises:
        TypeError, ValueError, NotImplementedError: see :class:`ColwiseParallel`.
    """

    _forward = RowwiseForward


def _bind(forward: ParallelForward, module: nn.Linear) -> None:
    """Give a linear layer a forward; copies of the layer share it and pass themselves."""

    # Dynamo accepts functions as methods, but no other callables
    def parallel_forward(module: nn.Linear, input: Tensor) -> Tensor:
        return forward(module, input)

    module.forward = MethodType(parallel_forward, module)  # type: ignore[method-assign]
    module._parallel_kind = forward.kind  # type: ignore[assignment]
    module._of_this_process = _OfThisProcess()  # type: ignore[assignment]


class _OfThisProcess:
    """An attribute that raises if its linear layer is pickled; copies of the layer share it.

    ``pickle`` would write the forward by its name, by which no other process can find it.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfThisProcess:
        return self

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            "a linear layer with ColwiseParallel or RowwiseParallel cannot be pickled, as "
            "torch.save(model) does: its forward and its mesh belong to this process. Save "
            "get_model_state_dict(model) with torch.distributed.checkpoint, and load it into a "
            "model that is parallelized in any way"
        )


def _cut_linear(module: nn.Linear, mesh: DeviceMesh, dim: int, src_data_rank: int | None) -> None:
    """Replace the parameters of a linear layer by DTensors that are cut between ranks.

    Args:
        module: the linear layer.
        mesh: a mesh of one dimension.
        dim: 0 cuts the outputs of the weight, and the bias; 1 cuts the inputs.
        src_data_rank: the rank of the mesh whose values all ranks take; None: each keeps its own.

    Raises:
        ValueError: the mesh has several dimensions; a parameter is a DTensor already.
        NotImplementedError: the module is not a plain ``nn.Linear``; the cuts of an FP8 weight do
            not lie between blocks.
    """
    _check(module, mesh, dim)
    placements: dict[str, Placement] = {
        "weight": Shard(dim),
        "bias": Shard(0) if dim == 0 else Replicate(),
    }
    cut = {
        name: cut_parameter(parameter, mesh, placements[name], src_data_rank)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for name, made in cut.items():
        needs_grad = getattr(module, name).requires_grad
        module.register_parameter(name, nn.Parameter(made, requires_grad=needs_grad))


def _check(module: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    kind = type(module).__name__
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallel of a {kind} on a mesh of {mesh.ndim} dimensions: pass one of them, "
            f'e.g. mesh["tp"]'
        )
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        raise NotImplementedError(
            f"tensor parallel of a {kind} with a forward of its own, which would not run: "
            f"parallelize the nn.Linear that it calls, and each linear layer once"
        )
    if set(module._parameters) - {"weight", "bias"} or module._parameters.get("weight") is None:
        raise NotImplementedError(
            f"tensor parallel of a {kind} with the parameters {sorted(module._parameters)}: "
            f"expected a weight and a bias; remove parametrizations before"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if local_of(parameter) is not None:
            raise ValueError(
                f"the {name} of this {kind} is a DTensor already: call parallelize_module before "
                f"fully_shard, and once for each linear layer"
            )
    _check_even(module.weight, mesh, dim)


def _check_even(weight: Tensor, mesh: DeviceMesh, dim: int) -> None:
    """Check that ranks can hold equal parts of a weight ``[N, K]``, and a frozen one in blocks.

    Raises:
        NotImplementedError: they cannot.
    """
    ranks, size = mesh.size(), weight.shape[dim]
    edge, kind = 1, "a"
    if isinstance(weight, BlockwiseFP8Tensor):
        edge, kind = weight.block_shape[dim], "a frozen FP8"
    if size % (ranks * edge):
        what = "outputs" if dim == 0 else "inputs"
        raise NotImplementedError(
            f"{kind} weight {list(weight.shape)} whose {size} {what} are cut between {ranks} "
            f"ranks: expected a multiple of {ranks * edge}; leave this linear layer out of the "
            f"plan of parallelize_module, or use fewer ranks"
        )


def cut_parameter(
    parameter: Tensor, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> Tensor:
    """Cut a parameter between ranks, and return it as a DTensor; FP8 parameters stay FP8."""

    def cut(x: Tensor) -> Tensor:
        return distribute_tensor(x.detach(), mesh, [placement], src_data_rank=src_data_rank)

    if isinstance(parameter, BlockwiseFP8Weight):
        cut_master = cut(parameter.master)
        return with_local(cut_master, BlockwiseFP8Weight(_owned(cut_master), parameter.recipe))
    if isinstance(parameter, BlockwiseFP8Tensor):
        data, scale, format = parameter.rowwise()
        as_bytes, scales = cut(data.view(torch.uint8)), cut(scale)
        local = BlockwiseFP8Tensor.from_data(
            _owned(as_bytes).view(format.dtype),
            _owned(scales),
            block_shape=format.block_shape,
            dtype=parameter.dtype,
            recipe=parameter.recipe,
        )
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return with_local(distribute_tensor(like, mesh, [placement], src_data_rank=None), local)
    return cut(parameter)


def _owned(x: Tensor) -> Tensor:
    """Return a DTensor whose local part is contiguous and has its own memory."""
    local = local_of(x)
    assert local is not None
    if local.is_contiguous() and local.untyped_storage().nbytes() == local.nbytes:
        return local
    return local.clone(memory_format=torch.contiguous_format)
