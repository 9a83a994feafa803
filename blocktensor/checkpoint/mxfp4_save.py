"""Write checkpoints in which weights on the grid of MXFP4 are in MXFP4."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..conversion.kept import warn_of_lost_changes
from ..model.names import check_module
from ..model.progress import check_progress
from ..ops.formats import MXFP4_GROUP
from .described import Described
from .export import Exported, Unit, exported, nbytes_of, units_of
from .mxfp4_export import Encoding, encoding_of
from .save import DEFAULT_SHARD, Folder, config_of, write_checkpoint


def save_mxfp4(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    separate_experts: bool = False,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Write a model whose weights lie on the grid of MXFP4: names and bytes of :func:`iter_mxfp4`.

    The folder is written as by :func:`save_fp8`, also by all ranks of a sharded model: each encodes
    and writes a share of the weights, which are gathered in FP8. The folder has the same bytes as
    one written by one process. It may replace the folder ``like``.

    The ``quantization_config`` of ``config.json`` is gpt-oss's (``mxfp4``) if all FP8 weights are
    stacks in its layout, else DeepSeek-V4's (``fp8``, and ``expert_dtype`` ``fp4``).

    Args:
        model: any module, converted or loaded with a recipe with ``weight_grid``.
        path: the folder to make.
        like, separate_experts: as for :func:`iter_mxfp4`.
        config, max_shard_bytes, overwrite, progress: as for :func:`save_fp8`.

    Returns:
        ``path``.

    Raises:
        ImportError: safetensors is not installed.
        TypeError, ValueError, NotImplementedError, CheckpointError: as :func:`iter_mxfp4`; an error
            of one rank raises on all.
        FileExistsError, OSError: as :func:`save_fp8`.

    Examples:
        >>> scale = blocktensor.Scales(weights="power_of_two")
        >>> recipe = blocktensor.Recipe(scale=scale, weight_grid="mxfp4")
        >>> model = nn.Sequential(nn.Linear(256, 512, bias=False)).bfloat16()
        >>> _ = blocktensor.convert(model, recipe, skip_small=False)
        >>> folder = blocktensor.save_mxfp4(model, "mxfp4")
        >>> fresh = nn.Sequential(nn.Linear(256, 512, bias=False)).bfloat16()
        >>> blocktensor.load_fp8(fresh, folder, recipe=recipe).rounded
        {}
    """
    check_module(model, "save_mxfp4")  # before its path, which may be the model
    folder = Folder("save_mxfp4", Path(path), max_shard_bytes, overwrite, progress)
    folder.check()
    check_progress(progress)
    found = exported(model, "save_mxfp4", separate_experts)
    encoding = encoding_of(found, like)
    warn_of_lost_changes(model, "save_mxfp4")
    content = config_of(model) if config is None else config
    content = {**content, "quantization_config": _described(found, encoding)}
    units = [unit._replace(nbytes=_nbytes(unit, found, encoding)) for unit in units_of(found)]
    write_checkpoint(folder, found, units, content, encoding.encode)
    return folder.path


def _described(found: Exported, encoding: Encoding) -> dict[str, Any]:
    """Return the ``quantization_config``."""
    of_fp8 = Described(found, ()).config
    stored = [x for group in found.written for x in group if not {*x.of}.isdisjoint(found.fp8)]
    if all(encoding.grids.get(x.name) for x in stored):
        plain = of_fp8["modules_to_not_convert"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    return {**of_fp8, "expert_dtype": "fp4"}


def _nbytes(unit: Unit, found: Exported, encoding: Encoding) -> int:
    """Return the bytes of a unit, weights on the grid in MXFP4."""
    total = 0
    for stored in unit.stored:
        if stored.name in encoding.grids:
            numbers = torch.Size(stored.shape).numel()
            total += numbers // 2 + numbers // MXFP4_GROUP
        else:
            total += nbytes_of(stored, found)
    return total
