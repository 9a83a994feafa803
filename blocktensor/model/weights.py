"""Find the parameters that matmuls read: weights of linear layers, stacks of experts.

Linear layers are ``nn.Linear`` and transformers' ``Conv1D``. Stacks of experts are known by
transformers' flags, by the names of other libraries' classes, or because the caller of ``convert``
names them. Three dimensions alone do not make a parameter a stack.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ..recipe import Recipe
from ..sharding.dtensor import fp8_part, local_of, with_local
from ..sharding.fsdp.fsdp_internals import owner_of
from ..sharding.fsdp.gather import GatheredInFP8
from ..sharding.fsdp.shards import FP8Shard
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight

# Modules


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D`` (GPT-2): a linear layer whose weight is ``[K, N]``.

    The class is compared by name, so that transformers need not be installed.
    """
    return hasattr(module, "nf") and any(
        kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Return True for modules whose forward is a linear layer of their ``weight``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_fully_sharded(kind: type) -> bool:
    """Return True for a class that ``fully_shard`` has created."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, or its class before ``fully_shard``."""
    return next(kind for kind in type(module).__mro__ if not is_fully_sharded(kind))


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, or of its class before ``fully_shard``."""
    return unsharded_class(module).__name__


# Experts

Named = Mapping[nn.Module, tuple[str, ...]]
"""The stacks that the caller of ``convert`` has named, by module."""


class _Kind(NamedTuple):
    """A class of experts: the names of its stacks, and whether they are ``[E, K, N]``."""

    names: tuple[str, ...]
    is_transposed: bool


_FLAGS = ("is_transposed", "has_bias", "has_gate")
"""Attributes that ``@use_experts_implementation`` of transformers sets on experts."""

_OF_FLAGS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""The stacks of such modules, under their usual names."""

_TORCHTITAN = _Kind(
    (
        "w1_EFD",
        "w2_EDF",
        "w3_EFD",
        "w1",
        "w2",
        "w3",
        "mlp1_weight_EGD",
        "mlp2_weight_EDF",
        "mlp1_weight",
        "mlp2_weight",
    ),
    is_transposed=False,
)

_CLASSES = {
    "GroupedExperts": _TORCHTITAN,
    "GptOssGroupedExperts": _TORCHTITAN,
    "Llama4TextExperts": _Kind(("gate_up_proj", "down_proj"), is_transposed=True),
}
"""Classes of experts by their names: of torchtitan, and of transformers without flags."""


def _kind_of_experts(module: nn.Module) -> _Kind | None:
    attributes = vars(module)
    if all(isinstance(attributes.get(flag), bool) for flag in _FLAGS):
        return _Kind(_OF_FLAGS, attributes["is_transposed"])
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)


def experts_per_token(module: nn.Module) -> int:
    """Return to how many experts a module sends each token, by its config; 1 if unknown."""
    names = ("num_experts_per_tok", "top_k", "num_experts_per_token", "moe_topk")
    holders = (getattr(module, "config", None), module)
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((x for x in found if isinstance(x, int) and x > 0), 1)


# Their weights


def weights_of(module: nn.Module, named: Named | None = None) -> tuple[str, ...]:
    """Return the names of the parameters of a module that ``convert`` may convert.

    Args:
        module: any module.
        named: stacks that the caller of ``convert`` has named.
    """
    if is_linear(module):
        return ("weight",)
    return stacks_of(module, named)


def stacks_of(module: nn.Module, named: Named | None = None) -> tuple[str, ...]:
    """Return the names of a module's parameters that are stacks of experts."""
    kind = _kind_of_experts(module)
    known = () if kind is None else kind.names
    asked = () if named is None else named.get(module, ())
    names = dict.fromkeys((*known, *asked))
    return tuple(name for name in names if module._parameters.get(name) is not None)


def fp8_weights(module: nn.Module) -> list[str]:
    """Return the names of the FP8 parameters of a module that its matmuls read."""
    return [
        key
        for key, weight in module._parameters.items()
        if weight is not None and fp8_part(weight) is not None and is_read(module, key, weight)
    ]


def is_read(module: nn.Module, key: str, fp8: Tensor) -> bool:
    """Return True if matmuls of a module read a parameter that is FP8, or is to be."""
    if casts_itself(module) is not None:
        return False
    return key == "weight" if is_linear(module) else fp8.ndim == 3


_CAST_THEMSELVES = {"torchao", "transformer_engine"}
"""Libraries whose linear layers compute with casts of their own."""


def casts_itself(module: nn.Module) -> str | None:
    """Describe a module of another library that computes with its own casts; None for others.

    Such libraries may replace the class of a linear layer that holds an FP8 weight.
    """
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] in _CAST_THEMSELVES:
            return f"a {kind.__name__} of {kind.__module__}, which casts its weight itself"
    return None


def why_unconvertible(module: nn.Module, key: str) -> str | None:
    """Return why one of :func:`weights_of` cannot be converted in its module; None if it can."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by it without calling it"
    if (other := casts_itself(module)) is not None:
        return other
    weight: Any = module._parameters.get(key)
    if weight is None:
        return "its weight is computed (parametrized), not a parameter"
    known = type(weight) is nn.Parameter or local_of(weight) is not None
    if not (known or is_lazy(weight) or fp8_part(weight) is not None):
        what = "its weight is" if is_linear(module) else "experts in"
        return f"{what} a {type(weight).__name__}, a type of another library"
    if not is_linear(module):
        return why_not_a_stack(weight)
    if not is_lazy(weight) and weight.ndim != 2:
        return f"its weight has {weight.ndim} dimensions"
    return None


def why_not_a_stack(parameter: Tensor) -> str | None:
    """Return why a parameter with the name of a stack cannot be converted; None if it can."""
    if is_lazy(parameter):
        return "experts without a shape yet"
    if parameter.ndim == 4:
        return "experts with 4 dimensions, which several fused projections share"
    return None if parameter.ndim == 3 else f"experts with {parameter.ndim} dimensions: expected 3"


def is_transposed(module: nn.Module, key: str) -> bool:
    """Return True for a weight that is known to be ``[..., K, N]``; others are ``[..., N, K]``."""
    kind = _kind_of_experts(module)
    in_stack = kind is not None and kind.is_transposed and key in kind.names
    return in_stack or is_conv1d(module)


def sizes_of(module: nn.Module, key: str, weight: Tensor) -> tuple[int, int]:
    """Return N (outputs) and K (inputs) of the matmuls with a weight, or with each of a stack."""
    *_, rows, columns = weight.shape
    return (columns, rows) if is_transposed(module, key) else (rows, columns)


def local_stack(weight: Tensor) -> Tensor | None:
    """Return the part of a stack that this rank multiplies by; None if ranks share no experts.

    FSDP2's shards do not count: they are gathered before a matmul reads them.
    """
    local = local_of(weight)
    if local is None or weight.ndim != 3 or isinstance(local, GatheredInFP8):
        return None
    return local if owner_of(local) is None else None


def label_of(name: str, key: str) -> str:
    """Return the name of a parameter of the module ``name``, without ``.weight``."""
    return name if key == "weight" else f"{name}.{key}".lstrip(".")


# Their FP8 forms


def fp8_form(module: nn.Module, key: str, weight: Tensor, recipe: Recipe) -> Tensor:
    """Return the FP8 weight that will replace ``weight`` in a module."""
    if isinstance(weight, BlockwiseFP8Weight):
        return BlockwiseFP8Weight(weight.master, recipe)
    if (local := local_of(weight)) is not None:
        if owner_of(local) is not None:
            return with_local(weight, FP8Shard(local.detach(), recipe))
        local = local.detach().requires_grad_(weight.requires_grad)
        return with_local(weight, fp8_form(module, key, local, recipe))
    if weight.requires_grad or weight.is_meta:
        return BlockwiseFP8Weight(weight.detach(), recipe)
    return frozen_form(module, key, weight, recipe)


def frozen_form(module: nn.Module, key: str, master: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """Return the FP8 form of a high-precision weight of a module, without the master.

    It holds the bytes that the forward reads: for a weight ``[K, N]``, as in Conv1D, the columnwise
    form.
    """
    weight, format = master.detach(), recipe.weight_format
    if not is_transposed(module, key):
        return BlockwiseFP8Tensor.from_values(weight, format, recipe)
    fp8 = BlockwiseFP8Tensor.from_values(weight.transpose(-1, -2).contiguous(), format, recipe)
    return fp8.relabel(shape=weight.shape, strides=weight.stride(), transpose=True)


# All matrices of a model


@dataclass(eq=False)
class Matrix:
    """A matrix or stack during a conversion: the parameter ``key`` of a module.

    It refers to the module, not to the parameter, whose references conversions count.

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

    @property
    def parameter(self) -> Tensor:
        """The module's current parameter."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def is_unknown_stack(self) -> bool:
        """True for a parameter that may be a stack of experts, which ``stacks`` could name."""
        return (self.unconvertible or "").startswith(UNKNOWN_STACK)

    @property
    def label(self) -> str:
        """The parameter's name without ``.weight``."""
        return label_of(self.name, self.key)


UNKNOWN_STACK = "stack of matrices"
"""Prefix of the reason for a parameter that may be a stack of experts, but is not known as one."""

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
    found = []
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if key != "bias" if is_lazy(parameter) else parameter.ndim > 1:
                why = _why_left_alone(module, key, parameter, named)
                found.append(Matrix(name, key, module, why))
    return found


def _why_left_alone(module: nn.Module, key: str, parameter: Tensor, named: Named) -> str | None:
    if key in weights_of(module, named):
        return why_unconvertible(module, key)
    if is_linear(module) and (why := why_unconvertible(module, "weight")) is not None:
        return why
    for kinds, why in _OTHERS:
        if isinstance(module, kinds):
            return why
    in_experts = _kind_of_experts(module) is not None
    if parameter.ndim > 3 and in_experts:
        return why_not_a_stack(parameter)
    if parameter.ndim == 3 and len(parameter) > 1:
        return f"{UNKNOWN_STACK}: in {kind_of(module)}; stacks={{...}} would name it"
    if in_experts and "bias" in key:
        return "bias of experts"
    return f"not the weight of a linear layer: in {kind_of(module)}"
