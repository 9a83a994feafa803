"""Fill the tables of ops that FP8 tensors implement, and register their types with torch.

``import blocktensor`` imports this module. The modules that it imports enter their functions into
tables of lower modules; they also complete the table of patches (``patches.py``), which are applied
later.
"""

import torch
import torch.nn.functional as F

from .autograd.any_linear import linear
from .checkpoint import save  # noqa: F401  (fills its tables, as modules below do)
from .conversion import (  # noqa: F401
    expert_adapters,
    linear_adapters,
    pretrained_models,
    sharded_adapters,
)
from .ops.formats import named
from .overrides.torch_functions import OVERRIDES
from .recipe import Recipe, Scales
from .sharding.fsdp import shards  # noqa: F401
from .tensor.adapted import WITH_ADAPTERS
from .tensor.aten import fp8_tensor, matmuls, picking, slicing, weight  # noqa: F401
from .tensor.base import TORCH_FUNCTIONS, rebuilt
from .tensor.fp8_tensor import BlockwiseFP8Tensor
from .tensor.weight import BlockwiseFP8Weight
from .tensor.weight_cache import FP8Cache

TORCH_FUNCTIONS.update(OVERRIDES)
WITH_ADAPTERS[F.linear] = linear

# For torch.load(weights_only=True) of frozen weights, and of whole models that are not fused: it
# refuses objects of a derived class.
torch.serialization.add_safe_globals(
    [BlockwiseFP8Tensor, BlockwiseFP8Weight, FP8Cache, Recipe, Scales, named, rebuilt]
)
