"""Sharded FP8 weights: FSDP2 gathers their e4m3 bytes, and every rank computes what one would."""

from .frozen import FrozenShard
from .shard import FP8Shard, precompute_block_amax

__all__ = ["FP8Shard", "FrozenShard", "precompute_block_amax"]
