"""The matrices of a model, each with its module: facts about them, and their FP8 forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ..recipe import Recipe
from ..sharding.dtensor import fp8_part, is_parallel, local_of, own_part, with_local
from ..sharding.fsdp.fsdp_internals import gathered_shape, owner_of
from ..sharding.fsdp.gather import GatheredInFP8
from ..sharding.fsdp.shards import FP8Shard
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .adapters import adapters_of
from .weights import (
    Named,
    casts_itself,
    full_name,
    is_experts,
    is_linear,
    is_transposed,
    kind_of,
    weights_of,
    why_not_a_stack,
    why_unconvertible,
)


class Sizes(NamedTuple):
    """The sizes of a matmul.

    Attributes:
        experts: the number of matrices of a stack; None for a linear layer.
        n, k: the outputs and inputs.
    """

    experts: int | None
    n: int
    k: int


class Share(NamedTuple):
    """The share of this rank in a parameter that is a DTensor.

    Attributes:
        local: its local part.
        owner: FSDP's object for the parameter; None if FSDP2 does not shard it.
    """

    local: Tensor
    owner: Any


@dataclass(eq=False)
class Matrix:
    """A matrix or stack: the parameter ``key`` of a module, and what a conversion decides about it.

    It refers to the module, not to the parameter, whose references conversions count. A conversion
    exchanges the content of the parameter: facts about it are read anew at each access.

    Attributes:
        name: of the module, relative to the model.
        counts: True if its row in the report counts the parameter: once for tied matrices.
        unconvertible: why it cannot be converted; None if it can.
        is_chosen: True if this matrix is to be cast, with all matrices tied to it.
        in_fp8: True if its matmuls read FP8 after the conversion.
        why: the reason why it is converted or skipped.
    """

    name: str
    key: str
    module: nn.Module
    unconvertible: str | None = None
    counts: bool = True
    is_chosen: bool = False
    in_fp8: bool = False
    why: str | None = None

    # Facts about the module

    @property
    def label(self) -> str:
        """The parameter's name without ``.weight``."""
        return self.name if self.key == "weight" else full_name(self.name, self.key)

    @property
    def title(self) -> str:
        """The parameter in messages."""
        return f"the weight of {self.label!r}" if self.label else "the weight"

    @property
    def is_unknown_stack(self) -> bool:
        """True for a parameter that may be a stack of experts, which ``stacks`` could name."""
        return (self.unconvertible or "").startswith(UNKNOWN_STACK)

    @property
    def is_adapter(self) -> bool:
        """True for a matrix of one of peft's adapters in the model."""
        return self.unconvertible == OF_PEFT

    @cached_property
    def is_transposed(self) -> bool:
        """True for a weight that is known to be ``[..., K, N]``; others are ``[..., N, K]``."""
        return is_transposed(self.module, self.key)

    @property
    def is_parallel(self) -> bool:
        """True for the weight of a linear layer with a style of ``blocktensor.distributed``."""
        return self.key == "weight" and is_parallel(self.module)

    # Facts about the parameter

    @property
    def parameter(self) -> Tensor:
        """The module's current parameter."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def own(self) -> Tensor:
        """The part of the parameter on this rank."""
        return own_part(self.parameter)

    @property
    def fp8(self) -> Any:
        """The part of the parameter on this rank if it is of an FP8 type; else None."""
        return fp8_part(self.parameter)

    @property
    def is_read(self) -> bool:
        """True if matmuls of the module read the parameter in FP8, once it is FP8."""
        if casts_itself(self.module) is not None:
            return False
        return self.key == "weight" if is_linear(self.module) else self.is_stack

    @property
    def is_stack(self) -> bool:
        """True for three dimensions."""
        return self.parameter.ndim == 3

    @property
    def is_frozen(self) -> bool:
        """True if the parameter is neither trained nor, on the meta device, initialised later."""
        parameter = self.parameter
        return not (parameter.requires_grad or parameter.is_meta)

    @property
    def lacks_master(self) -> bool:
        """True if the parameter has no high-precision values once it is in FP8."""
        fp8 = self.fp8
        return self.is_frozen if fp8 is None else isinstance(fp8, BlockwiseFP8Tensor)

    @property
    def share(self) -> Share | None:
        """The share of this rank; None if the parameter is no DTensor."""
        local = local_of(self.parameter)
        return None if local is None else Share(local, owner_of(local))

    @property
    def is_gathered(self) -> bool:
        """True if FSDP2 shards the parameter, and gathers it for its matmuls."""
        share = self.share
        return share is not None and share.owner is not None

    @property
    def shared_stack(self) -> Tensor | None:
        """The part of a stack that this rank multiplies by; None if ranks share no experts.

        FSDP2's shards do not count: they are gathered before a matmul reads them.
        """
        share = self.share
        if share is None or not self.is_stack or isinstance(share.local, GatheredInFP8):
            return None
        return share.local if share.owner is None else None

    @property
    def sizes(self) -> Sizes:
        """The sizes of a matmul with the whole weight."""
        return self._sizes_of(self.parameter.shape)

    @property
    def sizes_here(self) -> Sizes:
        """The sizes of a matmul on this rank: with its part of the weight, where ranks share it.

        FSDP2 gathers its shards before the matmul, so its cuts do not count.
        """
        share = self.share
        if share is None:
            return self.sizes
        if (gathered := gathered_shape(share.local)) is not None:
            return self._sizes_of(gathered)
        is_shared = self.is_parallel or self.shared_stack is not None
        return self._sizes_of(share.local.shape) if is_shared else self.sizes

    def _sizes_of(self, shape: Sequence[int]) -> Sizes:
        *experts, rows, columns = shape
        n, k = (columns, rows) if self.is_transposed else (rows, columns)
        return Sizes(experts[0] if experts else None, n, k)

    # Its FP8 forms

    def fp8_form(self, recipe: Recipe) -> Tensor:
        """Return the FP8 weight that will replace the parameter."""
        weight, share, recipe = self.parameter, self.share, self._oriented(recipe)
        if share is None:
            return self._form_of(weight, recipe)
        local = share.local.detach()
        if share.owner is None:
            form = self._form_of(local.requires_grad_(weight.requires_grad), recipe)
        else:
            form = FP8Shard(local, recipe)
        return with_local(weight, form)

    def _oriented(self, recipe: Recipe) -> Recipe:
        """Return a recipe whose grid has its groups along the inputs of this weight."""
        if recipe.weight_grid is None or not self.is_transposed:
            return recipe
        return replace(recipe, weight_grid="mxfp4_kn")

    def _form_of(self, weight: Tensor, recipe: Recipe) -> Tensor:
        if isinstance(weight, BlockwiseFP8Weight):
            return BlockwiseFP8Weight(weight.master, recipe)
        if weight.requires_grad or weight.is_meta:
            return BlockwiseFP8Weight(weight.detach().resolve_neg(), recipe)
        return self.frozen_form(weight, recipe)

    def frozen_form(self, master: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
        """Return the FP8 form of a high-precision value of the parameter, without that value.

        It holds the bytes that the forward reads: for a weight ``[K, N]``, as in Conv1D, the
        columnwise form.
        """
        recipe = self._oriented(recipe)
        weight, format = master.detach(), recipe.weight_format
        if not self.is_transposed:
            return BlockwiseFP8Tensor.from_values(weight, format, recipe)
        turned = weight.transpose(-1, -2).contiguous()
        fp8 = BlockwiseFP8Tensor.from_values(turned, format.of_transpose, recipe)
        return fp8.relabel(shape=weight.shape, strides=weight.stride(), transpose=True)


def fp8_weights(module: nn.Module, name: str = "") -> list[Matrix]:
    """Return the FP8 parameters of a module that its matmuls read.

    ``name``: of the module, relative to the model.
    """
    found = (
        Matrix(name, key, module)
        for key, parameter in module._parameters.items()
        if fp8_part(parameter) is not None
    )
    return [matrix for matrix in found if matrix.is_read]


def all_fp8_weights(model: nn.Module) -> list[Matrix]:
    """Return the FP8 parameters of a model that matmuls read; tied ones for each module."""
    return [x for name, module in model.named_modules() for x in fp8_weights(module, name)]


OF_PEFT = "adapter of peft: stays in high precision"
"""The reason for a matrix of an adapter, which a conversion never changes."""

UNKNOWN_STACK = "stack of matrices"
"""Prefix of the reason for a parameter that may be a stack of experts, but is not known as one."""

OF_NO_LINEAR = "not the weight of a linear layer"
"""Prefix of the reason for any other parameter."""

_OTHERS = (
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    (
        nn.MultiheadAttention,
        "nn.MultiheadAttention multiplies by it without calling a linear layer",
    ),
    (_ConvNd, "convolution"),
    (ParametrizationList, "parametrized: a weight is computed from it"),
)
"""Modules whose matrices are not weights of linear layers, and the reasons for the report."""


def matrices_of(model: nn.Module, named: Named) -> list[Matrix]:
    """Return all matrices of a model, in the order of modules; tied ones for each module.

    ``named``: stacks of experts that the caller of ``convert`` has named.
    """
    matrices = []
    adapters = adapters_of(model)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if key != "bias" if is_lazy(parameter) else parameter.ndim > 1:
                why = OF_PEFT if module in adapters else None
                why = why or _why_left_alone(module, key, parameter, named)
                matrices.append(Matrix(name, key, module, why))
    return matrices


def _why_left_alone(module: nn.Module, key: str, parameter: Tensor, named: Named) -> str | None:
    if key in weights_of(module, named):
        return why_unconvertible(module, key)
    if is_linear(module) and (why := why_unconvertible(module, "weight")) is not None:
        return why
    for kinds, why in _OTHERS:
        if isinstance(module, kinds):
            return why
    in_experts = is_experts(module)
    if parameter.ndim > 3 and in_experts:
        return why_not_a_stack(parameter)
    if parameter.ndim == 3 and len(parameter) > 1:
        return f"{UNKNOWN_STACK}: in {kind_of(module)}; stacks={{...}} would name it"
    if in_experts and "bias" in key:
        return "bias of experts"
    return f"{OF_NO_LINEAR}: in {kind_of(module)}"
