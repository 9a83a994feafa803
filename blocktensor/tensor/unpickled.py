"""Checks of a BlockwiseFP8Tensor that a file has put together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..ops.formats import BlockFormat, Quantized
from ..ops.scale_layouts import columnwise_width, laid_out
from ..recipe import Recipe

_SIDES = ("rowwise", "columnwise")


def checked(x: Tensor, parts: Mapping[str, Any]) -> dict[str, Any]:
    """``parts``, the attributes of ``x`` in a file, if they fit each other and ``x``.

    Values are not looked at: a block with NaN or Inf has a scale of NaN or Inf, and a load does not
    wait for a GPU.

    Raises:
        ValueError: they do not fit. Scales that are laid out otherwise are copied.
    """
    what = f"a BlockwiseFP8Tensor {list(x.shape)} from a file"
    recipe, source = parts.get("recipe"), parts.get("source")
    formats: list[BlockFormat] = []
    for side in _SIDES:
        format = parts.get(f"{side}_format")
        if not isinstance(format, BlockFormat) or not isinstance(recipe, Recipe):
            raise ValueError(
                f"{what} has format {format!r} and recipe {recipe!r}: expected a BlockFormat and a "
                f"Recipe; the file is damaged or was not written by blocktensor"
            )
        if format.scale_rounding != recipe.scale:
            raise ValueError(f"{what} has blocks {format.name} and scale={recipe.scale!r}")
        formats.append(format)
    is_weight = all(format.transposes for format in formats)
    fitting, sides = dict(parts), 0
    for side, transposed, format in zip(_SIDES, (False, True), formats, strict=True):
        data, scale = parts.get(f"{side}_data"), parts.get(f"{side}_scale")
        if data is None and scale is None:
            continue
        if not isinstance(data, Tensor) or not isinstance(scale, Tensor):
            raise ValueError(f"{what} has {side} data and scales that are not both tensors")
        form = Quantized(data, scale, format)
        try:
            checks.gemm_output(x.dtype)
            checks.quantized(form)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}: its {side} form does not fit: {error}") from None
        expected = _data_shape(x.shape, is_weight, transposed)
        shapes = [expected]
        if not is_weight:  # with the zeros of a columnwise cast
            shapes.append((*expected[:-1], columnwise_width(expected[-1], format)))
        if tuple(data.shape) not in shapes or not _matrices_are_contiguous(data):
            raise ValueError(
                f"{what} has {side} data {list(data.shape)} with strides {list(data.stride())}: "
                f"expected {list(expected)}, contiguous matrices"
            )
        if data.device.type != x.device.type:
            raise ValueError(f"{what} is on {x.device}, its {side} data on {data.device}")
        fitting[f"{side}_scale"] = laid_out(*form).scale
        sides += 1
    if source is not None and not (
        isinstance(source, Tensor)
        and (source.shape, source.dtype, source.device) == (x.shape, x.dtype, x.device)
    ):
        raise ValueError(f"{what} has a source that is no {x.dtype} {list(x.shape)} on {x.device}")
    if not sides:
        raise ValueError(f"{what} has neither a rowwise nor a columnwise form")
    return fitting


def _matrices_are_contiguous(data: Tensor) -> bool:
    """Rows cut from a stack lie apart from each other; no element lies in two places."""
    if data.ndim == 2 or data.numel() == 0:
        return data.is_contiguous()
    apart = data.shape[0] == 1 or data.stride(0) >= data[0].numel()
    return apart and data[0].is_contiguous()


def _data_shape(shape: torch.Size, is_weight: bool, transposed: bool) -> tuple[int, ...]:
    """The shape of the data of a form of a tensor of ``shape``: see BlockwiseFP8Tensor."""
    *lead, cols = shape
    if not is_weight:
        lead = [math.prod(lead)]
    return (*lead[:-1], cols, lead[-1]) if transposed else (*lead, cols)
