"""The parameters of a module that its products read: the weight of a linear, stacks of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.dtensor import local_of
from ..distributed.fsdp.fsdp_internals import owner_of
from ..distributed.fsdp.gather import GatheredInFP8
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from . import linears
from .experts import Named, is_transposed_stack, stacks_of, why_not_a_stack
from .linears import fp8_part, is_conv1d, is_linear


def weights_of(module: nn.Module, named: Named | None = None) -> tuple[str, ...]:
    """The names of the parameters of a module that conversion is about.

    Args:
        module: any module.
        named: stacks that the caller of ``convert`` has named.
    """
    return ("weight",) if is_linear(module) else stacks_of(module, named)


def fp8_weights(module: nn.Module) -> list[str]:
    """The names of the parameters of a module that are FP8 and that its products read."""
    if is_linear(module):
        return ["weight"] if fp8_part(module._parameters.get("weight")) is not None else []
    return [
        key
        for key, weight in module._parameters.items()
        if weight is not None and weight.ndim == 3 and fp8_part(weight) is not None
    ]


def why_unconvertible(module: nn.Module, key: str) -> str | None:
    """Why one of :func:`weights_of` cannot be converted where it is; None if it can."""
    if is_linear(module):
        return linears.why_unconvertible(module)
    weight: Any = module._parameters[key]
    known = type(weight) is nn.Parameter or local_of(weight) is not None
    if not (known or is_lazy(weight) or fp8_part(weight) is not None):
        return f"experts in a {type(weight).__name__}, a type of another library"
    return why_not_a_stack(weight)


def sizes_of(module: nn.Module, key: str, weight: Tensor) -> tuple[int, int]:
    """N (outputs) and K (inputs) of the products with a weight, or with each matrix of a stack."""
    *_, rows, columns = weight.shape
    return (columns, rows) if is_transposed(module, key) else (rows, columns)


def local_stack(weight: Tensor) -> Tensor | None:
    """The part of a stack that a rank multiplies by, of experts that ranks share; None of others.

    What FSDP2 shards is not such a part: it is gathered before a product reads it.
    """
    local = local_of(weight)
    if local is None or weight.ndim != 3 or isinstance(local, GatheredInFP8):
        return None
    return local if owner_of(local) is None else None


def is_transposed(module: nn.Module, key: str) -> bool:
    """Whether a weight is known to be ``[..., K, N]``; others are ``[..., N, K]``."""
    return is_conv1d(module) or is_transposed_stack(module, key)


def label_of(name: str, key: str) -> str:
    """The name of a parameter of the module ``name``; without ``.weight``."""
    return name if key == "weight" else f"{name}.{key}".lstrip(".")


def frozen_form(module: nn.Module, key: str, master: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """The FP8 form of a high-precision weight of a module, without the master.

    It holds the bytes that the forward reads: of a weight that is ``[K, N]``, as those of Conv1D
    are, the columnwise form.
    """
    weight, format = master.detach(), recipe.weight_format
    if not is_transposed(module, key):
        return BlockwiseFP8Tensor.cast(weight, format, recipe)
    fp8 = BlockwiseFP8Tensor.cast(weight.transpose(-1, -2).contiguous(), format, recipe)
    return fp8.relabel(shape=weight.shape, strides=weight.stride(), transpose=True)
