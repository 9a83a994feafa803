"""Sharded FP8 weights: what travels is e4m3, and every rank computes as one process would.

``fully_shard`` (FSDP2) gathers FP8 weights as they are. :class:`ColwiseParallel`,
:class:`RowwiseParallel` and :class:`PrepareModuleInput` are styles for ``parallelize_module``.

Public: the names below. The modules of this folder are internal.
"""

from .fsdp.frozen import FrozenShard
from .fsdp.trainable import FP8Shard, precompute_block_amax
from .tensor_parallel.prepare_input import PrepareModuleInput
from .tensor_parallel.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "FP8Shard",
    "FrozenShard",
    "PrepareModuleInput",
    "RowwiseParallel",
    "precompute_block_amax",
]
