"""MXFP4: 4-bit numbers with a power of two for each 32 of a row; read as FP8 weights, and encoded.

Two layouts are known. DeepSeek-V4 stores a matrix ``weight`` as int8 ``[N, K/2]``, two numbers a
byte, the first in the low half, and ``scale`` as e8m0 ``[N, K/32]``. gpt-oss stores a stack
``gate_up_proj`` as uint8 ``gate_up_proj_blocks`` ``[E, N, K/32, 16]`` and ``gate_up_proj_scales``
``[E, N, K/32]``; its module holds the transposes ``[E, K, N]``.

The numbers have two bits besides the sign. A block of 128x128 holds them exactly, with a
power-of-two scale, unless the scales in it are more than 14 binades apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.cast.ops import dequantize, quantize_rowwise, shard_amax, transpose
from ..ops.formats import BLOCKS_128X128_POW2, MXFP4_GROUP, Quantized
from ..ops.reference import mxfp4_scale
from .contents import Entry, names_of_scales
from .files import Computed, Read
from .on_disk import SCALE_SUFFIX
from .parts import Box, blocks_of, spelled, whole_blocks

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of e2m1, by their four bits (OCP Microscaling Formats 1.0, section 5.3.3)."""

_BLOCKS, _SCALES = "_blocks", "_scales"

_BIAS, _NAN = 127, 255
"""The codes of 1 and of NaN in e8m0."""


class Packed(NamedTuple):
    """The stored tensors of one MXFP4 weight.

    Attributes:
        codes, scales: its tensors.
        transposed: True if the model's weight is the transpose of what is stored.
    """

    codes: Entry
    scales: Entry
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's weight."""
        *lead, rows, groups = self.scales.shape
        cols = groups * MXFP4_GROUP
        return (*lead, cols, rows) if self.transposed else (*lead, rows, cols)

    def read(self, read: Read, blocks: Box) -> tuple[Quantized, Tensor]:
        """Return a box of 128x128 blocks of the weight in FP8, and which of them are not exact."""
        *lead, rows, cols = whole_blocks(blocks, self.shape)
        if self.transposed:
            rows, cols = cols, rows
        groups = _divided(cols, MXFP4_GROUP)
        is_grouped = len(self.codes.shape) > len(self.scales.shape)
        of_codes = (groups, slice(0, MXFP4_GROUP // 2)) if is_grouped else (_divided(cols, 2),)
        scales = read(self.scales, (*lead, rows, groups))
        codes = read(self.codes, (*lead, rows, *of_codes)).view(torch.uint8)
        forms, inexact = [], []
        n, g = scales.shape[-2:]
        matrices = codes.reshape(-1, n, g * MXFP4_GROUP // 2)
        for code, scale in zip(matrices, scales.reshape(-1, n, g), strict=True):
            values = _values(code, scale)
            form = quantize_rowwise(values, BLOCKS_128X128_POW2)
            is_other = dequantize(form, torch.float32) != values
            inexact.append(shard_amax(is_other.float(), form.format, 0, 0) > 0)
            forms.append(transpose(form) if self.transposed else form)
        data, scale, rounded = (
            torch.stack(parts).view(*scales.shape[:-2], *parts[0].shape)
            for parts in ([x.data for x in forms], [x.scale for x in forms], inexact)
        )
        if self.transposed:
            rounded = rounded.mT
        return Quantized(data, scale, BLOCKS_128X128_POW2), rounded


def _divided(run: slice, by: int) -> slice:
    return slice(run.start // by, run.stop // by)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of ``codes[N, K/2]`` with e8m0 ``scales[N, K/32]``."""
    halves = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
    numbers = torch.tensor(VALUES, device=codes.device)[halves.int()]
    factors = scales.view(torch.float8_e8m0fnu).float()
    return numbers * factors.repeat_interleave(MXFP4_GROUP, -1)


def encoded(values: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Return codes ``[N, K/2]`` and e8m0 scales ``[N, K/32]``, uint8, of fp32 ``values[N, K]``.

    They decode to these values, and zeros keep their signs. A group has the smallest scale that
    holds it, or its scale in ``known``, uint8 of as many scales, if that holds it.

    Returns:
        None if values are not on the grid.
    """
    groups = values.unflatten(-1, (-1, MXFP4_GROUP))
    smallest = mxfp4_scale(groups.abs().amax(-1)).view(torch.int32) >> 23
    scales = smallest
    if known is not None:
        given = known.to(values.device).view(smallest.shape).int()
        holds = _codes(groups, given)[1] & (given < _NAN)
        scales = torch.where(holds, given, smallest)
    codes, are_held = _codes(groups, scales)
    if not (are_held & (scales < _NAN)).all():
        return None
    codes = codes.flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.to(torch.uint8)


def _codes(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 4-bit codes of groups ``[..., 32]``, and whether scales hold all of a group."""
    factors = torch.exp2((scales - _BIAS).double())[..., None]
    numbers = groups.double().abs() / factors
    table = torch.tensor(VALUES[: len(VALUES) // 2], dtype=torch.float64, device=groups.device)
    codes = torch.searchsorted(table, numbers).clamp_(max=len(table) - 1)
    are_held = (table[codes] == numbers).all(-1)
    return (codes | groups.signbit() << 3).to(torch.uint8), are_held


class Unpacked:
    """A checkpoint in which MXFP4 weights stand as FP8 weights with scales; nothing is read yet.

    Attributes:
        entries: its tensors.
        computed: functions that compute boxes of those tensors which no file holds.
        rounded: by the name of each weight, its blocks read so far that are not exact, if any.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self.computed: Computed = {}
        self.rounded: dict[str, int] = {}
        self._inexact: dict[Packed, set[tuple[int, ...]]] = {}
        self._scales: dict[tuple[Packed, str], Tensor] = {}
        for weight, (scales, packed) in _found(entries).items():
            for each in (packed.codes, packed.scales):
                del self.entries[each.name]
            shape, file = packed.shape, packed.codes.file
            of_weight = Entry(file, "F8_E4M3", shape, weight)
            of_scales = Entry(file, "F32", BLOCKS_128X128_POW2.scale_shape(shape), scales)
            self.entries |= {weight: of_weight, scales: of_scales}
            self.computed[of_weight] = partial(self._data, packed)
            self.computed[of_scales] = partial(self._scale, packed)

    def _read(self, packed: Packed, read: Read, blocks: Box) -> Quantized:
        form, is_inexact = packed.read(read, blocks)
        if is_inexact.any():
            found = self._inexact.setdefault(packed, set())
            first = is_inexact.new_tensor([run.start for run in blocks], dtype=torch.long)
            found.update(map(tuple, (is_inexact.nonzero() + first).tolist()))
            self.rounded[packed.codes.name] = len(found)
        return form

    def _data(self, packed: Packed, read: Read, box: Box) -> Tensor:
        blocks = blocks_of(box)
        form = self._read(packed, read, blocks)
        self._scales[packed, spelled(blocks)] = form.scale  # asked for later
        whole = whole_blocks(blocks, packed.shape)
        inside = (
            slice(run.start - all_runs.start, run.stop - all_runs.start)
            for run, all_runs in zip(box, whole, strict=True)
        )
        return form.data[tuple(inside)]

    def _scale(self, packed: Packed, read: Read, blocks: Box) -> Tensor:
        known = self._scales.pop((packed, spelled(blocks)), None)
        return self._read(packed, read, blocks).scale if known is None else known


def packed_weights(entries: Mapping[str, Entry]) -> dict[str, Packed]:
    """Return the MXFP4 weights of a checkpoint by their names as FP8 weights."""
    return {name: packed for name, (_, packed) in _found(entries).items()}


def _found(entries: Mapping[str, Entry]) -> dict[str, tuple[str, Packed]]:
    """Return the MXFP4 weights by their names as FP8 weights, each with the name of its scales."""
    found = {}
    for name, entry in entries.items():
        if entry.dtype not in ("I8", "U8"):
            continue
        if name.endswith(_BLOCKS):
            stem = name.removesuffix(_BLOCKS)
            scales, weight, of_weight = entries.get(stem + _SCALES), stem, stem + SCALE_SUFFIX
        else:
            known = next((x for x in names_of_scales(name) if x in entries), "")
            scales, weight, of_weight = entries.get(known), name, known
        if scales is not None and _fit(entry, scales):
            found[weight] = of_weight, Packed(entry, scales, name.endswith(_BLOCKS))
    return found


def _fit(codes: Entry, scales: Entry) -> bool:
    """Return True if a tensor has two numbers a byte, and a scale for each 32 of a row."""
    width = MXFP4_GROUP // 2
    *lead, groups = scales.shape or (0,)
    shapes = (*lead, groups, width), (*lead, groups * width)
    return scales.dtype in ("F8_E8M0", "U8") and len(lead) in (1, 2) and codes.shape in shapes
