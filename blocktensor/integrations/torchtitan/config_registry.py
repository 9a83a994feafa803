"""Runs in blockwise FP8 for ``--module blocktensor.integrations.torchtitan --config NAME``."""

from __future__ import annotations

from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from .overrides import with_blockwise_fp8


def llama3_debugmodel() -> Trainer.Config:
    """Return the run of this name in torchtitan, with linears of any size in FP8."""
    return with_blockwise_fp8(llama3.llama3_debugmodel(), skip_small=False)


def llama3_8b() -> Trainer.Config:
    """Return the run of this name in torchtitan."""
    return with_blockwise_fp8(llama3.llama3_8b())


def llama3_70b() -> Trainer.Config:
    """Return the run of this name in torchtitan."""
    return with_blockwise_fp8(llama3.llama3_70b())


def qwen3_30b_a3b() -> Trainer.Config:
    """Return the run of this name in torchtitan."""
    return with_blockwise_fp8(qwen3.qwen3_30b_a3b())


def deepseek_v3_debugmodel() -> Trainer.Config:
    """Return the run of this name in torchtitan, with linears and experts of any size in FP8."""
    return with_blockwise_fp8(deepseek_v3.deepseek_v3_debugmodel(), skip_small=False)


def deepseek_v3_16b() -> Trainer.Config:
    """Return the run of this name in torchtitan."""
    return with_blockwise_fp8(deepseek_v3.deepseek_v3_16b())
