"""Checkpoints in FP8 of models of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoint.save import save_fp8


def save_pretrained_fp8(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], **options: Any
) -> Path:
    """Write a converted model in FP8, 1 byte a weight, as DeepSeek-V3's checkpoints.

    ``from_pretrained(folder, quantization_config=BlockwiseFP8Config())`` reads its bytes again;
    transformers by itself reads it as its method "fp8". ``model.save_pretrained`` writes ordinary
    weights.

    Args:
        model: of transformers, converted; trainable, frozen, or both.
        save_directory: the folder to make.
        **options: of :func:`blocktensor.save_fp8`.

    Returns:
        The folder.

    Raises:
        TypeError: ``model`` is no PreTrainedModel.
        ValueError: adapters are loaded; as :func:`blocktensor.save_fp8`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a transformers.PreTrainedModel; "
            f"blocktensor.save_fp8 writes any module"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model has adapters, whose tensors no FP8 checkpoint holds: save them by "
            "model.save_pretrained, which writes adapters alone"
        )
    config = model.config.to_diff_dict()
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    folder = save_fp8(model, save_directory, **{"config": config, **options})
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return folder
