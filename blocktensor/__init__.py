"""Blockwise FP8 training for plain PyTorch models: pip install, one line, no compiled extension."""

import torch as _torch

from . import dispatch as dispatch  # fills the tables of ops
from . import functional
from . import overrides as overrides  # fills the table of torch functions
from .autograd import quantize
from .convert import ConversionReport, SmallKN, convert, to_blockwise_fp8_weights
from .explain import Explanation, explain
from .recipe import Recipe
from .sharing import SharingReport, share_inputs
from .tensor import BlockwiseFP8Tensor
from .weight import BlockwiseFP8Weight, FP8Cache

_torch.serialization.add_safe_globals([BlockwiseFP8Tensor, BlockwiseFP8Weight, FP8Cache, Recipe])

__version__ = "0.1.0"

__all__ = [
    "BlockwiseFP8Tensor",
    "BlockwiseFP8Weight",
    "ConversionReport",
    "Explanation",
    "Recipe",
    "SharingReport",
    "SmallKN",
    "convert",
    "explain",
    "functional",
    "quantize",
    "share_inputs",
    "to_blockwise_fp8_weights",
]
