"""Raise the errors of the FP8 types, and name the module and the weight in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from ..ops.formats import BlockFormat
from ..recipe import Recipe
from .torch_internals.callers import modules_that_run

UNFREEZE = "call blocktensor.unfreeze(model) first and blocktensor.freeze(model) after"
"""The remedy for a write to a frozen weight."""

FOR_ADAPTERS = (
    "to begin adapters from the values of a frozen weight (PiSSA, OLoRA, DeLoRA), call "
    "blocktensor.unfreeze(model), then get_peft_model, then blocktensor.freeze(model)"
)
"""The remedy for operations by which peft begins adapters."""

FOR_AVERAGES = (
    "average what trains, and pass such a list to update_parameters too: "
    "AveragedModel(nn.ParameterList(p for p in model.parameters() if p.requires_grad))"
)
"""The remedy for averages of frozen weights."""

_BEGIN_ADAPTERS = {"aten::_linalg_svd", "aten::linalg_qr", "aten::linalg_vector_norm"}


def with_remedy(text: str) -> NotImplementedError:
    """Return an error whose text says what to do; :func:`name_module` adds no other remedy."""
    error = NotImplementedError(text)
    error.has_remedy = True  # type: ignore[attr-defined]
    return error


def refuse_rebuilding(cls: type) -> NoReturn:
    """Raise for ``type(parameter)(values, requires_grad=...)``, which would lose the recipe."""
    raise NotImplementedError(
        f"{cls.__name__} cannot be rebuilt from plain values, as the offload and dispatch helpers "
        f"of accelerate do with parameters: load and dispatch the model first and convert it then, "
        f"and offload with fully_shard(..., offload_policy=CPUOffloadPolicy())"
    )


def refuse(func: Any) -> NoReturn:
    """Raise for an op that cannot run on FP8 bytes, instead of a silent dequantize."""
    kind: Callable[[str], NotImplementedError] = NotImplementedError
    remedy = "call .dequantize() first to work on a plain tensor"
    if func._schema.is_mutable:
        kind = with_remedy
        remedy += f"; to write to a frozen weight (merge an adapter into it, say), {UNFREEZE}"
    elif func._schema.name in _BEGIN_ADAPTERS:
        kind, remedy = with_remedy, f"{FOR_ADAPTERS}; or {remedy}"
    raise kind(
        f"{func} is not implemented for BlockwiseFP8Tensor, which keeps its values in FP8: {remedy}"
    )


def refuse_matmul(func: object) -> NoReturn:
    """Raise for a matmul that has no FP8 path, instead of computing it in high precision."""
    text = (
        f"{func} has no FP8 path, and computing it in high precision would be silent: use "
        f"F.linear, torch.mm, torch.matmul or torch.addmm, of a stack of experts F.grouped_mm or "
        f"torch.bmm; or say so on purpose with .high_precision() of a BlockwiseFP8Weight, "
        f".dequantize() of a BlockwiseFP8Tensor"
    )
    if func == "svd_lowrank":
        raise with_remedy(f"{text}; {FOR_ADAPTERS}")
    raise NotImplementedError(text)


def refuse_torch_func() -> NoReturn:
    """Raise for a matmul in a transform of ``torch.func``, which no override would see."""
    raise NotImplementedError(
        "an FP8 linear layer under torch.func (grad, vmap, jvp, jacrev, ...), which has no rule "
        "for it: use torch.autograd, and a loop in place of vmap, or leave these modules "
        "unconverted (convert(..., skip=[...]))"
    )


def refuse_one_tensor(*_: Any) -> NoReturn:
    """Raise for ``torch.distributed.checkpoint``, which would store FP8 bytes as one tensor."""
    raise NotImplementedError(
        "torch.distributed.checkpoint cannot save or load a frozen FP8 weight as one tensor: give "
        "it the state of get_model_state_dict(model) instead of model.state_dict(), which has the "
        "bytes and the scales as two tensors; or .dequantize() the weight"
    )


def refuse_bytes(weight: Tensor, source: Tensor) -> None:
    """Raise TypeError for a copy of FP8 values without scales into an FP8 weight."""
    if source.is_floating_point() and source.dtype.itemsize == 1:
        raise TypeError(
            f"{source.dtype} {list(source.shape)} is copied into an FP8 weight "
            f"{list(weight.shape)} without the scales of a checkpoint in FP8: load that with "
            f"blocktensor.load_fp8; if these are the values, pass .to({weight.dtype})"
        )


def refuse_to_pick(func: Any, stack: Tensor, to_plain: str) -> NoReturn:
    """Raise for an index that would copy matrices of a stack in high precision."""
    raise NotImplementedError(
        f"{func} of a stack of FP8 weights {list(stack.shape)} would copy matrices in high "
        f"precision, and matmuls with them would run in it: multiply the whole stack by groups "
        f"(torch.nn.functional.grouped_mm; in transformers experts_implementation='grouped_mm'), "
        f"or one matrix at a time (w[i]); to read values, index {to_plain}"
    )


def check_scaling(recipe: Recipe, format: BlockFormat) -> None:
    """Refuse an FP8 operand that this recipe would cast with scales rounded differently.

    Matmuls would multiply it, but no longer compute what the recipe says.

    Raises:
        ValueError: it would.
    """
    operand: Any = "weights" if format.transposes else "activations"
    if format.scale_rounding != (wanted := recipe.scale_of(operand)):
        raise ValueError(
            f"mixed recipes: {operand} are cast with scale={wanted!r} here, and one was cast with "
            f"scale={format.scale_rounding!r}; cast both operands with one recipe, e.g. "
            f"blocktensor.quantize(x, recipe=weight.recipe), or give both "
            f"Recipe(scale=Scales({operand}={format.scale_rounding!r}))"
        )


def check_grid(w: Any, recipe: Recipe, is_transposed: bool) -> None:
    """Check that the groups of the grid to which ``w`` is rounded lie along the contraction.

    ``is_transposed``: True if ``w`` is a transposed view of the parameter.

    Raises:
        ValueError: they lie along the outputs, or the recipe has another grid than the weight's.
    """
    grid = w.recipe.weight_grid
    if grid != recipe.weight_grid:
        raise ValueError(
            f"mixed recipes: a weight is cast with weight_grid={grid!r}, and the matmul has "
            f"weight_grid={recipe.weight_grid!r}: leave the recipe of the matmul out"
        )
    wanted = None if grid is None else "mxfp4_kn" if is_transposed else "mxfp4"
    if grid != wanted:
        shape = list(w.transpose(-1, -2).shape if is_transposed else w.shape)
        raise ValueError(
            f"the FP8 weight {shape} of a matmul that contracts its "
            f"{'second last' if is_transposed else 'last'} dimension has weight_grid={grid!r}, "
            f"whose groups lie along the other one: convert it with weight_grid={wanted!r}"
        )


@_disable_dynamo  # it looks at the stack, which no compiler can trace
def name_module(error: Exception, operands: Any) -> None:
    """Add the running module and the weights of a refused op to the message of ``error``.

    Args:
        error: the error of an op of an FP8 type; NotImplementedError for a refused op.
        operands: the operands of the op, which may include weights or views of weights.
    """
    modules = [] if getattr(error, "names_module", False) else modules_that_run()
    if not modules:
        return
    inner, model = modules[0], _of_user(modules[-1])
    name = next((name for name, x in model.named_modules() if x is inner), "")
    text = f"{error}; in {name!r}, a {type(inner).__name__}" if name else str(error)
    is_refused = isinstance(error, NotImplementedError)
    if is_refused and (weights := _weights_of(model, operands)):
        text += f", by {' and '.join(map(repr, weights))}"
        if isinstance(inner, AveragedModel):  # its update, not the forward of its copy
            text += f"; {FOR_AVERAGES}"
        elif not getattr(error, "has_remedy", False):
            text += f"; to compute that in high precision, {_unconverted(weights)}"
    error.args = (text,)
    error.names_module = True  # type: ignore[attr-defined]


def _of_user(model: Any) -> nn.Module:
    """Return the outermost module that a user has a name for: peft's tuners only hold the model."""
    library: Any = sys.modules.get("peft.tuners.tuners_utils")
    held: nn.Module = model
    if library is not None and isinstance(model, library.BaseTuner):
        held = model.model
    return held


def _unconverted(weights: list[str]) -> str:
    """Say how to leave weights of these names unconverted."""
    patterns = list(dict.fromkeys(map(_pattern, weights)))
    return f"convert(model, skip={patterns})" if all(patterns) else "leave it unconverted"


def _pattern(weight: str) -> str:
    """Return a pattern for ``skip`` that matches the module of a weight in every layer.

    It matches before and after ``get_peft_model``, which adds a prefix, and wraps the module.
    """
    *parts, _ = weight.split(".")
    if "base_layer" in parts:
        parts = [part for part in parts if part != "base_layer"]
        parts = parts[2:] if parts[:2] == ["base_model", "model"] else parts
        parts[0] = f"*{parts[0]}"
    of_layers = ["*" if part.isdigit() else part for part in parts]
    return ".".join(parts if len(parts) == 1 else of_layers)


def _weights_of(model: nn.Module, operands: Any) -> list[str]:
    """Return the names of the FP8 parameters of ``model`` whose memory operands share."""
    read = {storage for x in tree_leaves(operands) for storage in _storages(x)}
    return [name for name, p in model.named_parameters() if read & _storages(p)]


def _storages(x: Any) -> set[int]:
    """Return the storages of an FP8 tensor, which its views share."""
    names = ("rowwise_data", "columnwise_data") if hasattr(x, "columnwise_data") else ("_counted",)
    parts = [part for name in names if (part := getattr(x, name, None)) is not None]
    return {part.untyped_storage()._cdata for part in parts}
