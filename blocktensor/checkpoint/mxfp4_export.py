"""Export weights on the grid of MXFP4 as 4-bit numbers and scales of groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..model.matrix import all_fp8_weights
from ..ops.cast.ops import dequantize
from ..ops.formats import BLOCKS_128X128_POW2, MXFP4_GROUP, Quantized
from ..sharding.dtensor import fp8_part
from ..sharding.ranks import Ranks
from .contents import entries_of
from .export import Exported, exported, pairs
from .files import Files
from .mxfp4 import Packed, encoded, packed_weights
from .on_disk import SCALE_SUFFIX


def iter_mxfp4(
    model: nn.Module,
    *,
    like: str | os.PathLike[str] | None = None,
    separate_experts: bool = False,
    rank: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model whose weights lie on the grid of MXFP4, those in MXFP4.

    Weights whose recipe has a ``weight_grid`` become 4-bit numbers and a power of two for each 32
    of a row. They are the values that the next forward reads, bit for bit, trained or frozen. Other
    tensors are yielded as by :func:`iter_fp8`, whose notes on sharded models hold here too: ranks
    exchange FP8 bytes, and those that get tensors encode them.

    A matrix ``a.weight`` ``[N, K]`` becomes int8 ``a.weight`` ``[N, K/2]`` and e8m0 ``a.scale``
    ``[N, K/32]``, as in DeepSeek-V4; a stack ``a`` ``[E, K, N]`` becomes uint8 ``a_blocks``
    ``[E, N, K/32, 16]`` and ``a_scales`` ``[E, N, K/32]``, as in gpt-oss.

    Several scales may describe the same values: a group whose largest number is 3 may as well have
    the number 6 and half the scale. Each group gets the smallest scale that holds its values, or
    the scale that it has in ``like`` if that holds them. So what was loaded from ``like`` and was
    not trained has the bytes of ``like``.

    Args:
        model: any module, converted or loaded with a recipe with ``weight_grid``.
        like: a folder of a checkpoint in MXFP4. Weights with the same names get its layout, and its
            scales where they hold the values.
        separate_experts, rank: as in :func:`iter_fp8`.

    Yields:
        Name and tensor.

    Raises:
        TypeError, ValueError: as :func:`iter_fp8`; no weight has a ``weight_grid``; a weight that
            is not on the grid, of rows that are no multiple of 32, or of another shape in ``like``.
        NotImplementedError: a stack ``[E, N, K]`` (pass ``separate_experts=True``), or a matrix
            ``[K, N]``: no layout is known; a weight that ranks have cut inside of groups.
        CheckpointError: ``like`` cannot be read.

    Examples:
        >>> scale = blocktensor.Scales(weights="power_of_two")
        >>> recipe = blocktensor.Recipe(scale=scale, weight_grid="mxfp4")
        >>> model = nn.Sequential(nn.Linear(256, 512, bias=False)).bfloat16()
        >>> _ = blocktensor.convert(model, recipe, skip_small=False)
        >>> for name, tensor in blocktensor.iter_mxfp4(model):
        ...     print(name, list(tensor.shape), tensor.dtype)
        0.weight [512, 128] torch.int8
        0.scale [512, 8] torch.float8_e8m0fnu
    """
    weights = exported(model, "iter_mxfp4", separate_experts)
    return pairs(weights, rank, encoding_of(weights, like).encode)


class Encoding(NamedTuple):
    """The weights of an export that become MXFP4.

    Attributes:
        grids: by their names, True if groups lie along columns.
        layouts: the weights of the checkpoint ``like`` by name.
    """

    grids: Mapping[str, bool]
    layouts: Mapping[str, Packed]

    def encode(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a unit, weights on the grid in MXFP4."""
        made: dict[str, Tensor] = {}
        for name, x in stored.items():
            weight = name.removesuffix(SCALE_SUFFIX)
            if name == weight + SCALE_SUFFIX and weight in self.grids:
                continue  # the scales of an FP8 weight
            if name not in self.grids:
                made[name] = x
                continue
            form = Quantized(x, stored[name + SCALE_SUFFIX], BLOCKS_128X128_POW2)
            made |= _as_mxfp4(name, form, self.grids[name], self.layouts.get(name))
        return made


def encoding_of(found: Exported, like: str | os.PathLike[str] | None) -> Encoding:
    """Find the weights of an export that become MXFP4, and check them, except for their values.

    Raises:
        ValueError, NotImplementedError, CheckpointError: see :func:`iter_mxfp4`.
    """
    layouts: dict[str, Packed] = {}
    if like is not None:
        ranks, folder = Ranks.of(found.tensors.values()), Path(like)
        layouts = ranks.together(lambda: packed_weights(entries_of(folder)))
    return Encoding(_on_grids(found, layouts), layouts)


def _on_grids(found: Exported, layouts: Mapping[str, Packed]) -> dict[str, bool]:
    """Return the stored weights that become MXFP4: by name, True if groups lie along columns."""
    transposed = {id(x.parameter) for x in all_fp8_weights(found.model) if x.is_transposed}
    grids = {}
    for name in found.fp8:
        x = found.tensors[name]
        grid = fp8_part(x).recipe.weight_grid
        if grid is not None:
            grids[name] = grid == "mxfp4_kn" or id(x) in transposed
    if not grids:
        raise ValueError(
            "no weight of the model has a recipe with weight_grid: convert it, or load it by "
            "load_fp8, with Recipe(scale=Scales(weights='power_of_two'), weight_grid='mxfp4'); "
            "iter_fp8 exports FP8 weights"
        )
    made = {}
    for group in found.written:
        for stored in group:
            parts = {grids[name] for name in stored.of if name in grids}
            if parts:
                (is_kn,) = parts  # all parts of a stored weight have one layout
                _check_layout(stored.name, stored.shape, is_kn)
                _check_like(stored.name, stored.shape, layouts.get(stored.name))
                made[stored.name] = is_kn
    return made


def _check_layout(name: str, shape: tuple[int, ...], is_kn: bool) -> None:
    """Check that a layout of MXFP4 is known for a weight."""
    if (len(shape) == 3) != is_kn:
        what, remedy = (
            (f"a stack [E, N, K] {list(shape)}", "pass separate_experts=True")
            if len(shape) == 3
            else (f"a matrix [K, N] {list(shape)}", "convert it without weight_grid")
        )
        raise NotImplementedError(f"{name}, {what}, has no known layout in MXFP4: {remedy}")
    columns = shape[-2] if is_kn else shape[-1]
    if columns % MXFP4_GROUP:
        raise ValueError(
            f"{name} has {columns} inputs: MXFP4 stores multiples of {MXFP4_GROUP}; convert it "
            f"without weight_grid"
        )


def _check_like(name: str, shape: tuple[int, ...], layout: Packed | None) -> None:
    """Check that a weight has the same shape in the checkpoint ``like``."""
    if layout is not None and layout.shape != tuple(shape):
        raise ValueError(
            f"{name} is {list(shape)} here and {list(layout.shape)} in {layout.codes.file}: pass "
            f"the checkpoint of a model of the same sizes as like"
        )


def _as_mxfp4(name: str, form: Quantized, is_kn: bool, layout: Packed | None) -> dict[str, Tensor]:
    """Return the two tensors of a weight in MXFP4, by name."""
    known = None if layout is None else Files().whole(layout.scales).view(torch.uint8)
    stack = (
        form if form.data.ndim == 3 else form._replace(data=form.data[None], scale=form.scale[None])
    )
    codes, scales = [], []
    for e in range(len(stack.data)):
        values = dequantize(Quantized(stack.data[e], stack.scale[e], form.format), torch.float32)
        of_matrix = None if known is None else known.view(len(stack.data), -1)[e]
        pair = encoded(values.mT.contiguous() if is_kn else values, of_matrix)
        if pair is None:
            raise ValueError(
                f"{name} has values that are not on the grid of MXFP4: it was not cast with "
                f"weight_grid; load or convert it with a recipe without one"
            )
        codes.append(pair[0])
        scales.append(pair[1])
    both = torch.stack(codes), torch.stack(scales)
    if layout is not None:
        places = _places_in(layout)
    elif is_kn:
        places = _places_of_stack(name, tuple(both[1].shape))
    else:
        places = _places_of_matrix(name, *both)
    return {
        place.name: x.reshape(place.shape).view(place.dtype)
        for place, x in zip(places, both, strict=True)
    }


class _Place(NamedTuple):
    """Name, dtype and shape of a stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places_in(layout: Packed) -> list[_Place]:
    """Return the places of codes and scales in a checkpoint."""
    return [
        _Place(entry.name, _DTYPES[entry.dtype], entry.shape)
        for entry in (layout.codes, layout.scales)
    ]


def _places_of_stack(name: str, groups: tuple[int, ...]) -> list[_Place]:
    """Return the places that gpt-oss gives to codes and scales of a stack."""
    return [
        _Place(f"{name}_blocks", torch.uint8, (*groups, MXFP4_GROUP // 2)),
        _Place(f"{name}_scales", torch.uint8, groups),
    ]


def _places_of_matrix(name: str, codes: Tensor, scales: Tensor) -> list[_Place]:
    """Return the places that DeepSeek-V4 gives to codes and scales of a matrix."""
    module, _, last = name.rpartition(".")
    of_scales = f"{module}.scale" if last == "weight" else f"{name}_scale"
    return [
        _Place(name, torch.int8, tuple(codes.shape[1:])),
        _Place(of_scales, torch.float8_e8m0fnu, tuple(scales.shape[1:])),
    ]


_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "F8_E8M0": torch.float8_e8m0fnu}
"""The dtypes of tensors in MXFP4, by their names in safetensors files."""
