"""Overrides for the command line: ``--override.imports blocktensor.integrations.torchtitan...``."""

from __future__ import annotations

from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder

from .activation_checkpoint import BlockwiseFP8SelectiveAC
from .converter import BlockwiseFP8Converter


@override(target=Decoder.Config, description="linears and experts in blockwise FP8")
def blockwise_fp8(config: Decoder.Config, **options: Any) -> Decoder.Config:
    """The model in blockwise FP8.

    Args:
        config: of the model; changed in place, because the trainer builds the one that it has.
        options: fields of :class:`BlockwiseFP8Converter.Config`.
    """
    model: Decoder.Config = BlockwiseFP8Converter.Config(**options).build().convert(config)
    return model


@override(target=SelectiveAC.Config, exact=True, description="counts FP8 products as mm")
def selective_ac(config: SelectiveAC.Config) -> BlockwiseFP8SelectiveAC.Config:
    """Selective activation checkpointing that saves products in FP8."""
    return derive(config, BlockwiseFP8SelectiveAC.Config)
