"""peft's adapters on a base in FP8: ``import blocktensor.integrations.peft``.

Adapters need these changes of peft:

- LoRA of linear layers: the import makes adapters of FP8 weights run as thin matmuls
  (``conversion/linear_adapters.py``).
- ``target_parameters`` adapt stacks of experts; the import makes adapters of FP8 stacks run as
  thin matmuls (``conversion/expert_adapters.py``), and cuts them between ranks as the stacks are
  (``conversion/cut_expert_adapters.py``).
- ``get_peft_model`` after ``fully_shard`` raises (``conversion/sharded_adapters.py``).

A conversion makes these changes as well if peft is imported by then: the import is needed only if
peft is imported after the model is converted or loaded.
"""

from __future__ import annotations

import peft.tuners.lora.layer  # noqa: F401  (is patched)

from ..patches import (
    ADAPTERS_OF_CUT_EXPERTS,
    ADAPTERS_OF_SHARDS,
    EXPERT_ADAPTERS,
    LINEAR_ADAPTERS,
)

EXPERT_ADAPTERS.apply()
LINEAR_ADAPTERS.apply()
ADAPTERS_OF_CUT_EXPERTS.apply()
ADAPTERS_OF_SHARDS.apply()
