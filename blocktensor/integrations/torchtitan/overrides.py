"""Run torchtitan in blockwise FP8: overrides for the command line, and a function for code.

``--override.imports blocktensor.integrations.torchtitan.overrides.NAME`` takes the overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from .converter import BlockwiseFP8Converter


@override(target=Decoder.Config, description="linears and experts in blockwise FP8")
def blockwise_fp8(config: Decoder.Config, **options: Any) -> Decoder.Config:
    """Make a model train in blockwise FP8.

    Args:
        config: the config of the model; changed in place, because the trainer builds the model from
            its own reference to it.
        options: fields of :class:`BlockwiseFP8Converter.Config`.
    """
    model: Decoder.Config = BlockwiseFP8Converter.Config(**options).build().convert(config)
    return model


def with_blockwise_fp8(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """Make a run train its model in blockwise FP8; changes ``config`` and returns it.

    Selective activation checkpointing then counts FP8 matmuls as torchtitan's counts ``mm``.

    Args:
        config: the config of a run, as functions of torchtitan's ``config_registry`` return it.
        options: fields of :class:`BlockwiseFP8Converter.Config`.

    Raises:
        TypeError, ValueError, NotImplementedError: as the converter.
        ValueError: the config has no model.
    """
    if config.model_spec is None:
        raise ValueError("this Trainer.Config has no model_spec: set it first")
    config.model_spec.model = blockwise_fp8(config.model_spec.model, **options)
    policy = config.activation_checkpoint
    if type(policy) is SelectiveAC.Config:
        config.activation_checkpoint = selective_ac(policy)
    return config


class BlockwiseFP8SelectiveAC(SelectiveAC):
    """torchtitan's ``SelectiveAC``, which counts matmuls in FP8 as matmuls.

    torchtitan's policy goes by ops: it saves the results of ``aten.mm``, all but every second, and
    does not know ``blocktensor::gemm`` and ``blocktensor::linear_fprop``. Here the results of every
    second matmul, in FP8 or not, are saved; casts are made again. Matmuls of experts are computed
    again, as torchtitan does in high precision.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """The fields of ``SelectiveAC.Config``."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped: Any = super()._wrap_block(module, base_fqn=base_fqn)
        contexts = wrapped.checkpoint_fn.keywords["context_fn"]

        def counting_fp8() -> Any:
            policy = contexts()[0].policy_fn
            return create_selective_checkpoint_contexts(_gemm_as_linear(policy))

        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, context_fn=counting_fp8)
        block: nn.Module = wrapped
        return block


_MATMULS = (torch.ops.blocktensor.gemm.default, torch.ops.blocktensor.linear_fprop.default)
"""The matmuls of forwards: op by op, and in compiled graphs."""


def _gemm_as_linear(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Make a checkpointing policy decide about FP8 matmuls as about ``aten.linear``."""

    def of_both(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op in _MATMULS:
            x, _, _, weight, *_ = args  # without scales and formats
            return policy(context, torch.ops.aten.linear.default, x, weight)
        return policy(context, op, *args, **kwargs)

    return of_both


@override(target=SelectiveAC.Config, exact=True, description="counts FP8 matmuls as mm")
def selective_ac(config: SelectiveAC.Config) -> BlockwiseFP8SelectiveAC.Config:
    """Make selective activation checkpointing save matmuls in FP8."""
    return derive(config, BlockwiseFP8SelectiveAC.Config)
