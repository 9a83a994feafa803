"""peft's adapters on a base in FP8: ``import blocktensor.integrations.peft``.

Adapters need these changes of peft:

- DoRA divides by the norms of ``W + B A``. The import makes peft compute them from the dequantized
  values of W, which are freed after the norm is computed; matmuls with W stay in FP8. Peft 0.21.0
  and 0.21.2 compute the same bits without the import.
- LoRA of linear layers: the import makes adapters of FP8 weights run as thin matmuls
  (``conversion/linear_adapters.py``).
- ``target_parameters`` adapt stacks of experts; the import makes adapters of FP8 stacks run as
  thin matmuls (``conversion/expert_adapters.py``), and cuts them between ranks as the stacks are
  (``conversion/cut_expert_adapters.py``).
- ``get_peft_model`` after ``fully_shard`` raises (``conversion/sharded_adapters.py``).

A conversion makes these changes as well, except for DoRA, if peft is imported by then: the import
is needed only if peft is imported after the model is converted or loaded.
"""

from __future__ import annotations

from typing import Any

import peft.tuners.lora.dora  # noqa: F401  (is patched, as peft.tuners.lora.layer is)

from ..patches import (
    ADAPTERS_OF_CUT_EXPERTS,
    ADAPTERS_OF_SHARDS,
    DORA_NORMS,
    EXPERT_ADAPTERS,
    LINEAR_ADAPTERS,
)
from ..tensor.fp8_tensor import BlockwiseFP8Tensor


@DORA_NORMS.around
def _get_weight_norm(theirs: Any, layer: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    values = weight.dequantize() if isinstance(weight, BlockwiseFP8Tensor) else weight
    return theirs(layer, values, *args, **kwargs)


DORA_NORMS.apply()
EXPERT_ADAPTERS.apply()
LINEAR_ADAPTERS.apply()
ADAPTERS_OF_CUT_EXPERTS.apply()
ADAPTERS_OF_SHARDS.apply()
