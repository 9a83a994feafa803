"""Blockwise FP8 training for plain PyTorch models: pip install, one line, no compiled extension."""

import torch as _torch

from . import dispatch as dispatch  # fills the tables of ops
from . import distributed as distributed  # fills the tables of ops further
from . import functional
from . import overrides as overrides  # fills the table of torch functions
from . import slicing as slicing  # fills the tables of ops further
from .autograd import quantize
from .checkpoint import CheckpointError, LoadReport, load_fp8, save_fp8
from .convert import (
    ConversionReport,
    SmallKN,
    convert,
    freeze,
    to_blockwise_fp8_weights,
    unfreeze,
)
from .explain import Explanation, explain
from .memory import MemoryReport, memory_report
from .recipe import Recipe
from .sharing import SharingReport, share_inputs
from .tensor import BlockwiseFP8Tensor
from .weight import BlockwiseFP8Weight, FP8Cache

_torch.serialization.add_safe_globals([BlockwiseFP8Tensor, BlockwiseFP8Weight, FP8Cache, Recipe])

__version__ = "0.1.0"

__all__ = [
    "BlockwiseFP8Tensor",
    "BlockwiseFP8Weight",
    "CheckpointError",
    "ConversionReport",
    "Explanation",
    "LoadReport",
    "MemoryReport",
    "Recipe",
    "SharingReport",
    "SmallKN",
    "convert",
    "explain",
    "freeze",
    "functional",
    "load_fp8",
    "memory_report",
    "quantize",
    "save_fp8",
    "share_inputs",
    "to_blockwise_fp8_weights",
    "unfreeze",
]
