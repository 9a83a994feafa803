"""Blockwise FP8 training for plain PyTorch models: pip install, one line, no compiled extension.

Public: the names in ``__all__``, and ``blocktensor.functional`` and ``blocktensor.distributed``.
"""

import torch as _torch

from . import distributed as distributed
from . import functional
from . import tensor as _tensor
from .autograd import torch_functions as _torch_functions
from .autograd.quantize import quantize
from .checkpoint import CheckpointError, LoadReport, load_fp8, save_fp8
from .checkpoint.save import STORAGE_READERS as _STORAGE_READERS
from .distributed import dtensor as _dtensor
from .distributed.fsdp import shards as _shards
from .model.audit import audit, audit_step
from .model.audit_report import AuditReport
from .model.conversion_report import ConversionReport, SmallKN
from .model.convert import convert, to_blockwise_fp8_weights
from .model.explain import Explanation, explain
from .model.forward_reads import Reads as _Reads
from .model.freeze import freeze, unfreeze
from .model.fuse import PATTERNS as _PATTERNS
from .model.fuse import FusionEntry, FusionReport, fuse, unfuse
from .model.fuse_experts import RoutedExperts as _RoutedExperts
from .model.fused_class import rebuild as _rebuild_fused
from .model.memory import MemoryReport, memory_report
from .model.share_inputs import SharingReport, share_inputs
from .ops.formats import named as _named
from .recipe import Recipe
from .tensor import aten_products, aten_slicing, aten_tensor, aten_weight
from .tensor.base import TORCH_FUNCTIONS as _TORCH_FUNCTIONS
from .tensor.base import rebuilt as _rebuilt
from .tensor.fp8_tensor import ATEN_OPS as _ATEN_OPS
from .tensor.fp8_tensor import BlockwiseFP8Tensor
from .tensor.weight import WEIGHT_OPS as _WEIGHT_OPS
from .tensor.weight import BlockwiseFP8Weight
from .tensor.weight_cache import FP8Cache as _FP8Cache

_TORCH_FUNCTIONS.update(_torch_functions.OVERRIDES)
_TORCH_FUNCTIONS.update(_STORAGE_READERS)
_ATEN_OPS.update(_shards.FROZEN_SHARDS)
_ATEN_OPS.update(_dtensor.FROZEN_CUTS)
_WEIGHT_OPS.update(_shards.TRAINABLE_SHARDS)
del aten_products, aten_slicing, aten_tensor, aten_weight  # which have filled the tables of ops

# For torch.load(weights_only=True) of frozen weights and of whole models.
_torch.serialization.add_safe_globals(
    [BlockwiseFP8Tensor, BlockwiseFP8Weight, _FP8Cache, Recipe, _named, _rebuilt]
)
_torch.serialization.add_safe_globals([_Reads, *_PATTERNS, _RoutedExperts, _rebuild_fused])

# The name of frozen weights in files from before they moved.
_OLD_NAME = "blocktensor.tensor.BlockwiseFP8Tensor"
_torch.serialization.add_safe_globals([(BlockwiseFP8Tensor, _OLD_NAME)])
_tensor.BlockwiseFP8Tensor = BlockwiseFP8Tensor  # type: ignore[attr-defined]

__version__ = "0.1.0"

__all__ = [
    "AuditReport", "BlockwiseFP8Tensor", "BlockwiseFP8Weight", "CheckpointError",
    "ConversionReport", "Explanation", "FusionEntry", "FusionReport", "LoadReport",
    "MemoryReport", "Recipe", "SharingReport", "SmallKN", "audit", "audit_step", "convert",
    "explain", "freeze", "functional", "fuse", "load_fp8", "memory_report", "quantize",
    "save_fp8", "share_inputs", "to_blockwise_fp8_weights", "unfreeze", "unfuse",
]  # fmt: skip
