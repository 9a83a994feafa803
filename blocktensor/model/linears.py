"""The modules that are linears, ``nn.Linear`` and transformers' ``Conv1D``, and their weights."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ..distributed.dtensor import local_of
from ..tensor.base import FP8Base


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' ``Conv1D`` (GPT-2): a linear whose weight is ``[K, N]``.

    Its class is found by name, so that transformers need not be installed.
    """
    return hasattr(module, "nf") and any(
        kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """True for the modules whose forward is a linear of their ``weight``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that ``fully_shard`` was called on, which changes its class."""
    return _made_by_fsdp(type(module))


def kind_of(module: nn.Module) -> str:
    """The name of a module's class, or of its class before ``fully_shard``."""
    kinds = (kind for kind in type(module).__mro__ if not _made_by_fsdp(kind))
    return next(kinds).__name__


def _made_by_fsdp(kind: type) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


def sizes_of(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """N (outputs) and K (inputs) of the linear that ``weight``, a matrix, has in ``module``."""
    rows, columns = weight.shape
    return (columns, rows) if is_conv1d(module) else (rows, columns)


def fp8_part(weight: Any) -> Any:
    """``weight``, or the local part of a DTensor, if that is one of the FP8 types; else None."""
    local = local_of(weight)
    held = weight if local is None else local
    return held if isinstance(held, FP8Base) else None


def why_unconvertible(module: nn.Module) -> str | None:
    """Why the weight of a linear cannot be converted where it is; None if it can."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by it without calling it"
    weight: Any = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (parametrized), not a parameter"
    known = type(weight) is nn.Parameter or local_of(weight) is not None
    if not (known or is_lazy(weight) or fp8_part(weight) is not None):
        return f"its weight is a {type(weight).__name__}, a type of another library"
    if not is_lazy(weight) and weight.ndim != 2:
        return f"its weight has {weight.ndim} dimensions"
    return None
