"""A whole run of torchtitan in blockwise FP8, from the config of one in high precision."""

from __future__ import annotations

from typing import Any

from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.trainer import Trainer

from .activation_checkpoint import BlockwiseFP8SelectiveAC
from .converter import BlockwiseFP8Converter


def with_blockwise_fp8(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """Make a run train its model in blockwise FP8; changes ``config`` and returns it.

    Selective activation checkpointing then counts FP8 products as torchtitan's counts ``mm``.

    Args:
        config: of a run, as functions of torchtitan's ``config_registry`` return it.
        options: fields of :class:`BlockwiseFP8Converter.Config`.

    Raises:
        TypeError, ValueError, NotImplementedError: as the converter.
        ValueError: the config has no model.
    """
    if config.model_spec is None:
        raise ValueError("this Trainer.Config has no model_spec: set it first")
    converter = BlockwiseFP8Converter.Config(**options).build()
    config.model_spec.model = converter.convert(config.model_spec.model)
    policy = config.activation_checkpoint
    if type(policy) is SelectiveAC.Config:
        config.activation_checkpoint = derive(policy, BlockwiseFP8SelectiveAC.Config)
    return config
