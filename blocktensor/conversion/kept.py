"""Measure which share of the changes since ``unfreeze`` rounding to FP8 keeps.

The values of an unfrozen master are FP8 numbers times scales. A change of less than half a step
rounds back, and most changes by a merged adapter are smaller. So ``unfreeze`` notes a sample of
each weight, and ``freeze`` and ``save_fp8`` warn if most of a change is lost.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.matrix import all_fp8_weights
from ..ops.formats import BlockFormat, Quantized
from ..ops.reference import quantize_stochastically
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight

SAMPLE = 8192
"""Number of values of a weight that are compared, at random places."""

ENOUGH = 0.9
"""The kept share of a change above which there is no warning."""

BLOCKS_AT_ONCE = 8
"""Rows of blocks that are rounded together, in fp32 copies."""

_SAME = 2**-5
"""Relative difference below which values are one FP8 number: neighbors differ by 2^-4 or more."""

_NOISE = 2**-3
"""Part of the least step in a block that is no change: a merge that is undone leaves as much."""


class Origin(NamedTuple):
    """The frozen form from which a master was made.

    Attributes:
        scale: the scales of its blocks.
        values: a sample of the master at that time, fp32.
        format: the format of the form.
        is_columnwise: True if the form was the columnwise one.
    """

    scale: Tensor
    values: Tensor
    format: BlockFormat
    is_columnwise: bool


def held_form(fp8: BlockwiseFP8Tensor) -> tuple[Quantized, bool]:
    """Return a form that a frozen weight holds, and True if it is the columnwise one."""
    row, col = fp8.operand
    return (fp8.columnwise(), True) if row is None and col is not None else (fp8.rowwise(), False)


def remember(parameter: Tensor, frozen: BlockwiseFP8Tensor, master: Tensor) -> None:
    """Store on a parameter the frozen form from which ``master`` was made."""
    form, is_columnwise = held_form(frozen)
    values = _sample(master, is_columnwise).float()
    parameter._frozen_as = Origin(form.scale.clone(), values, form.format, is_columnwise)  # type: ignore[attr-defined]


def origin_of(parameter: Any) -> Origin | None:
    """Return what :func:`remember` stored on a parameter."""
    return parameter.__dict__.get("_frozen_as")


def forget(parameter: Any) -> None:
    """Drop what :func:`remember` stored on a parameter."""
    parameter.__dict__.pop("_frozen_as", None)


class Kept:
    """The share of the changes to several weights that their FP8 forms keep."""

    def __init__(self) -> None:
        self._change = self._kept = self._moved = self._same = 0.0

    def add(self, origin: Origin | None, master: Tensor, fp8: BlockwiseFP8Tensor) -> None:
        """Compare the FP8 form of a master with the form from which the master was made."""
        form, is_columnwise = held_form(fp8)
        if origin is None or master.is_meta or is_columnwise != origin.is_columnwise:
            return
        old = origin.values.to(master.device)
        now = _sample(master, is_columnwise).float()
        # a change of the dtype is no change of values
        converted = [old, *(old.to(dtype).float() for dtype in (torch.bfloat16, torch.float16))]
        rounded, step = _sample_of_form(form)
        new = rounded.to(master.dtype).float() - old
        moved = torch.stack([now != each for each in converted]).all(0)
        moved &= now.isfinite() & new.isfinite() & ((now - old).abs() > _NOISE * step)
        change, new = ((now - old).where(moved, 0), new.where(moved, 0))
        places = master.numel() / max(1, len(old))
        same = moved & (new.abs() <= _SAME * old.abs())
        sums = torch.stack([(change * change).sum(), (new * change).sum(), moved.sum(), same.sum()])
        total, kept, count, unmoved = (sums.double() * places).tolist()
        self._change, self._kept = self._change + total, self._kept + kept
        self._moved, self._same = self._moved + count, self._same + unmoved

    def warn(self, caller: str, stacklevel: int) -> None:
        """Warn if less than :data:`ENOUGH` of the changes is kept."""
        if self._change == 0 or (share := self._kept / self._change) >= ENOUGH:
            return
        warnings.warn(
            f"{caller} keeps {max(share, 0):.0%} of what was added to the weights since unfreeze: "
            f"{self._same / self._moved:.0%} of the values that changed round to the FP8 numbers "
            f"that they were. Store the weights in high precision, or round at random: "
            f'blocktensor.freeze(model, rounding="stochastic")',
            stacklevel=stacklevel,
        )


def warn_of_lost_changes(model: nn.Module, caller: str) -> None:
    """Warn if the FP8 forms of trainable weights lose most of their changes since ``unfreeze``."""
    kept = Kept()
    for matrix in all_fp8_weights(model):
        weight = matrix.parameter
        if isinstance(weight, BlockwiseFP8Weight) and (origin := origin_of(weight)) is not None:
            kept.add(origin, weight.master, matrix.frozen_form(weight.master, weight.recipe))
    kept.warn(caller, stacklevel=4)


def round_at_random_(
    fp8: BlockwiseFP8Tensor, master: Tensor, origin: Origin | None, generator: torch.Generator
) -> None:
    """Write the values of ``master``, rounded stochastically, into a frozen weight of its own.

    Blocks keep the scales of the form that the master was made of, where these fit.
    """
    form, is_columnwise = held_form(fp8)
    values = master.detach().transpose(-1, -2) if is_columnwise else master.detach()
    scale = None
    if origin is not None and origin[2:] == (form.format, is_columnwise):
        scale = origin.scale.to(master.device)
    scales = [None] * len(values) if scale is None else _matrices(scale)
    step = form.format.rows * BLOCKS_AT_ONCE
    for x, data, own, old in zip(
        _matrices(values), _matrices(form.data), _matrices(form.scale), scales, strict=False
    ):
        for i in range(0, len(x), step):
            rows, blocks = slice(i, i + step), slice(i // form.format.rows, None)
            known = None if old is None else old[blocks][:BLOCKS_AT_ONCE]
            rounded = quantize_stochastically(x[rows], form.format, generator, known)
            data[rows].copy_(rounded.data)
            own[blocks][:BLOCKS_AT_ONCE].copy_(rounded.scale)


def _matrices(x: Tensor) -> list[Tensor]:
    """Return the matrices of a stack, or the one matrix."""
    return [x] if x.ndim == 2 else list(x)


def _places(count: int) -> Tensor:
    """Return ``count`` random indices, the same for every tensor of this size."""
    generator = torch.Generator().manual_seed(count)
    size = (min(count, SAMPLE),)
    return torch.randint(max(1, count), size, generator=generator, device=generator.device)


def _indices(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    return torch.unravel_index(_places(shape.numel()).to(device), shape)


def _sample(master: Tensor, is_columnwise: bool) -> Tensor:
    values = master.detach().transpose(-1, -2) if is_columnwise else master.detach()
    return values[_indices(values.shape, values.device)]


def _sample_of_form(form: Quantized) -> tuple[Tensor, Tensor]:
    """Return a sample of the values, and the least steps between values in their blocks."""
    data, scale, format = form
    places = _indices(data.shape, data.device)
    blocks = *places[:-2], places[-2] // format.rows, places[-1] // format.cols
    values = data.view(torch.uint8)[places].view(format.dtype).float()
    numbers = torch.finfo(format.dtype)
    return values * scale[blocks], numbers.smallest_normal * numbers.eps * scale[blocks]
