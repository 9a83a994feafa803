"""Errors of the FP8 types that several files raise."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ..ops.formats import BlockFormat


def refuse_rebuilding(cls: type) -> NoReturn:
    """Raise for ``type(parameter)(values, requires_grad=...)``, which would lose the recipe."""
    raise NotImplementedError(
        f"{cls.__name__} cannot be rebuilt from plain values, as the offload and dispatch helpers "
        f"of accelerate do with parameters: load and dispatch the model first and convert it then, "
        f"and offload with fully_shard(..., offload_policy=CPUOffloadPolicy())"
    )


def refuse(func: Any) -> NoReturn:
    """Raise for an op that FP8 bytes cannot serve: never a silent dequantize."""
    writes = (
        "; to write to a frozen weight (merge an adapter into it, say), call "
        "blocktensor.unfreeze(model) first and blocktensor.freeze(model) after"
    )
    raise NotImplementedError(
        f"{func} is not implemented for BlockwiseFP8Tensor, which keeps its values in FP8: call "
        f".dequantize() first to work on a plain tensor{writes if func._schema.is_mutable else ''}"
    )


def refuse_bytes(weight: Tensor, source: Tensor) -> None:
    """Raise TypeError for FP8 values that are to be copied into an FP8 weight without scales."""
    if source.is_floating_point() and source.dtype.itemsize == 1:
        raise TypeError(
            f"{source.dtype} {list(source.shape)} is copied into an FP8 weight "
            f"{list(weight.shape)} without the scales of a checkpoint in FP8: load that with "
            f"blocktensor.load_fp8; if these are the values, pass .to({weight.dtype})"
        )


def refuse_to_pick(func: Any, stack: Tensor, to_plain: str) -> NoReturn:
    """Raise for an index that copies matrices of a stack, with which products would run then."""
    raise NotImplementedError(
        f"{func} of a stack of FP8 weights {list(stack.shape)} would copy matrices in high "
        f"precision, and products with them would run in it: multiply the whole stack by groups "
        f"(torch.nn.functional.grouped_mm; in transformers experts_implementation='grouped_mm'), "
        f"or one matrix at a time (w[i]); to read values, index {to_plain}"
    )


def check_same_scaling(a: BlockFormat, b: BlockFormat) -> None:
    """Refuse operands whose scales are rounded differently.

    Raises:
        ValueError: they are.
    """
    if a.scale_rounding != b.scale_rounding:
        raise ValueError(
            f"mixed recipes: one operand was cast with Recipe(scale={a.scale_rounding!r}), the "
            f"other with Recipe(scale={b.scale_rounding!r}); cast both with one recipe, e.g. "
            f"blocktensor.quantize(x, recipe=weight.recipe)"
        )
