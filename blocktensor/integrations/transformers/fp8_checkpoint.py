"""A checkpoint in FP8 that transformers is loading: its FP8 weights are read here instead.

transformers reads every tensor by its name and knows of no scales. It is told to drop the values of
FP8 weights, so that these stay on meta and take no memory, and :func:`blocktensor.load_fp8` reads
the bytes in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ...checkpoint.contents import entries_of, scales_of
from ...checkpoint.load import load_fp8
from ...checkpoint.match import matched, names_of
from ...checkpoint.names import spellings
from ...checkpoint.on_disk import SCALE_SUFFIXES, CheckpointError
from ...recipe import Recipe


class FP8Checkpoint:
    """The FP8 weights of a checkpoint.

    Args:
        model: on meta.
        files: of the checkpoint, as transformers has found them.

    Raises:
        CheckpointError: as :func:`blocktensor.load_fp8`; FP8 weights that transformers would load
            into parameters of other names.
        NotImplementedError: the files are no safetensors, or have other blocks.
    """

    def __init__(self, model: nn.Module, files: Sequence[str] | None) -> None:
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise NotImplementedError(
                f"an FP8 checkpoint in {files!r}: expected safetensors in one folder"
            )
        self.folder = Path(files[0]).parent
        entries = entries_of(self.folder)
        scales = set(scales_of(entries).values())
        stored = {name for name in entries if name not in scales}
        found = matched(self.folder, spellings(model), stored)
        self.weights = {name for name, way in found.items() if entries[names_of(way)[0]].is_fp8}
        """Names in the model."""
        taken = {name for way in found.values() for name in names_of(way)}
        left = [name for name in stored - taken if entries[name].is_fp8]
        known = model.state_dict(keep_vars=True).keys() - found.keys()
        for name in left:
            if any(x.endswith(f".{name}") or name.endswith(f".{x}") for x in known):
                raise CheckpointError(
                    f"{self.folder}: tensor {name!r} is in FP8 and has another name in a "
                    f"{type(model).__name__}: load it into the class that the checkpoint was "
                    f"saved from, and take its part"
                )

    def load(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        """Read all, the FP8 weights frozen, on ``device``.

        Raises:
            CheckpointError: as :func:`blocktensor.load_fp8`; a weight that is not read.
        """
        load_fp8(model, self.folder, strict=False, device=device, recipe=recipe)
        left = [name for name, x in model.named_parameters() if x.is_meta]
        if left:
            raise CheckpointError(f"{self.folder}: {len(left)} weights were not read, {left[:5]}")


class DropValues(ConversionOps):  # type: ignore[misc,unused-ignore]
    """Leaves a parameter on meta, as one that will be read later."""

    def convert(self, input_dict: Mapping[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        if kwargs.get("missing_keys") is not None:
            kwargs["missing_keys"].discard(kwargs["full_layer_name"])
        return {}


SCALES = {rf"{suffix}$" for suffix in SCALE_SUFFIXES.values()}
"""Patterns of names that transformers shall not report as unexpected."""
