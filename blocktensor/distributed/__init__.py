"""Sharded FP8 weights: FSDP2 gathers e4m3 bytes, and every rank computes as one process would.

Public: the names below. The modules of this folder are internal.
"""

from .fsdp.frozen import FrozenShard
from .fsdp.trainable import FP8Shard, precompute_block_amax

__all__ = ["FP8Shard", "FrozenShard", "precompute_block_amax"]
