"""Sharded FP8 weights: FSDP2 gathers e4m3 bytes, and every rank computes as one process would.

:func:`all_to_all_fp8` sends tokens to experts on other ranks in FP8.

Public: the names below. The modules of this folder are internal.
"""

from .expert_parallel.all_to_all import all_to_all_fp8
from .fsdp.frozen import FrozenShard
from .fsdp.trainable import FP8Shard, precompute_block_amax

__all__ = ["FP8Shard", "FrozenShard", "all_to_all_fp8", "precompute_block_amax"]
