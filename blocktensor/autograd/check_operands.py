"""Whether the operands of a linear, dense or grouped, fit together; the dtype of its output."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import checks
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.refusals import check_same_scaling
from ..tensor.weight import BlockwiseFP8Weight


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives ``x``; None where it is off."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # which raises for meta
        return torch.get_autocast_dtype(kind)
    return None


def refuse_prepared(x: BlockwiseFP8Tensor) -> None:
    """Raise for an input of which the tensor parallel linears of several ranks compute a gradient.

    Raises:
        NotImplementedError: it is one, whose gradient a linear that every rank has would count once
            for each rank.
    """
    if x.prepared is not None:
        raise NotImplementedError(
            f"an input {list(x.shape)} that PrepareModuleInput of blocktensor.distributed has cast "
            f"reached a product that is not one of ColwiseParallel: apply ColwiseParallel of "
            f"blocktensor.distributed to every linear that reads it, or prepare it with "
            f"torch.distributed.tensor.parallel.PrepareModuleInput"
        )


def _refuse_export(w: Tensor) -> None:
    """Raise for a weight of an exported program, which would have no gradient of it.

    Raises:
        NotImplementedError: it wants a gradient, and gradients are recorded.
    """
    # the flag: torch 2.11 takes is_exporting() for True in whatever it compiles
    if torch.compiler._is_exporting_flag and torch.is_grad_enabled() and w.requires_grad:
        raise NotImplementedError(
            f"torch.export of an FP8 linear whose weight {list(w.shape)} is trained: the program "
            f"would have no gradient of it. Call blocktensor.freeze(model) before, or export under "
            f"torch.no_grad() a program that casts the weights of every call and is not trained"
        )


def check_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> torch.dtype:
    """The output dtype of ``linear(x, w, bias, recipe=recipe)``.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    for tensor, what in ((x, "the input"), (w, "the weight")):
        checks.high_precision(tensor, f"{what} of an FP8 linear")
    checks.rank(w, (2,), "the weight of an FP8 linear", "stacks of experts need grouped_mm")
    if x.ndim == 0:
        raise ValueError("the input of an FP8 linear is a scalar: expected shape [..., K]")
    _refuse_export(w)
    _check_blocks(x, w, recipe)
    if isinstance(x, BlockwiseFP8Tensor) and torch.is_grad_enabled() and w.requires_grad:
        _check_wgrad_input(x, recipe)
    _check_bias(x, w, bias)
    return _output_dtype(x, w, bias)


def check_grouped(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, recipe: Recipe
) -> torch.dtype:
    """The output dtype of ``grouped_linear(x, w, offs, bias, recipe=recipe)``.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    for tensor, what in ((x, "the input"), (w, "the weight")):
        checks.high_precision(tensor, f"{what} of a grouped FP8 linear")
    checks.rank(x, (2,), "the input of a grouped FP8 linear", "flatten tokens to [T, K]")
    checks.rank(
        w, (3,), "the weight of a grouped FP8 linear", "stacks of experts are [E, N, K]; a matrix "
        "needs functional.linear",
    )  # fmt: skip
    _refuse_export(w)
    _check_blocks(x, w, recipe)
    if isinstance(w, BlockwiseFP8Tensor) and not w.format.transposes:
        raise ValueError(
            f"the weight of a grouped FP8 linear has blocks of {w.block_shape}: expected "
            f"{recipe.weight_format.block_shape}"
        )
    checks.group_ends(offs, x, "the input")
    if len(offs) != len(w):
        raise ValueError(
            f"offs ends {len(offs)} groups, and the weight {list(w.shape)} is a stack of {len(w)} "
            f"experts: expected one end for each"
        )
    if isinstance(x, BlockwiseFP8Tensor) and torch.is_grad_enabled() and w.requires_grad:
        _check_grouped_wgrad_input(x, recipe)
    _check_bias(x, w, bias)
    return _output_dtype(x, w, bias)


def _check_grouped_wgrad_input(x: BlockwiseFP8Tensor, recipe: Recipe) -> None:
    """``x`` is rowwise alone, as ``all_to_all_fp8`` returns it, and is cast again for wgrad."""
    if x.serves_wgrad:
        raise ValueError(
            "the input of a grouped FP8 linear is FP8 already, and its columnwise blocks, which "
            "the gradient of the weight needs, ignore the groups: pass the high-precision tensor; "
            "functional.grouped_linear(x, [w1, w3], offs) casts it once for several weights"
        )
    if recipe.wgrad_input_format is None:
        raise ValueError(
            "the gradient of the weight has wgrad_input='high_precision', and the input of the "
            "grouped FP8 linear is FP8 alone: dispatch it in high precision, or convert with "
            "another recipe"
        )


def _check_blocks(x: Tensor, w: Tensor, recipe: Recipe) -> None:
    checks.same_k(x, w, "input", "weight")
    checks.same_device(x, w, "the input", "the weight")
    expected = recipe.activation_format.block_shape
    if isinstance(x, BlockwiseFP8Tensor) and x.rowwise_format.block_shape != expected:
        raise ValueError(
            f"the input of an FP8 linear has blocks of {x.rowwise_format.block_shape}: expected "
            f"{expected}; blocktensor.quantize(x) makes them"
        )
    for tensor in (x, w):
        if isinstance(tensor, (BlockwiseFP8Tensor, BlockwiseFP8Weight)):
            check_same_scaling(recipe.activation_format, tensor.format)


def _check_wgrad_input(x: BlockwiseFP8Tensor, recipe: Recipe) -> None:
    """``x`` holds what the gradient of the weight reads."""
    wanted = recipe.wgrad_input_format
    if wanted is None or x.source is not None:
        fits = wanted is None and x.source is not None
    else:
        fits = x.columnwise_format.block_shape == wanted.block_shape
    if fits:
        return
    name = x.columnwise_format.name
    held = f"holds {name} blocks" if x.source is None else "is cast for 'high_precision'"
    raise ValueError(
        f"mixed recipes: the gradient of the weight has wgrad_input={recipe.wgrad_input!r}, and "
        f"the input, which is FP8 already, {held}; cast it with one recipe, e.g. "
        f"blocktensor.quantize(x, recipe=weight.recipe)"
    )


def _check_bias(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        checks.same_device(x, bias, "the input", "the bias")
        if bias.shape != w.shape[:-1]:
            expected = list(w.shape[:-1])
            raise ValueError(f"the bias has shape {list(bias.shape)}: expected {expected}")


def _output_dtype(x: Tensor, w: Tensor, bias: Tensor | None) -> torch.dtype:
    autocast = autocast_dtype(x)
    if autocast is not None:
        return autocast
    others = {"weight": w} if bias is None else {"weight": w, "bias": bias}
    for what, other in others.items():
        if other.dtype != x.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the {what} {other.dtype}: convert one of them, or "
                f"run under torch.autocast"
            )
    return x.dtype
