"""peft's DoRA on a base that is frozen in FP8: ``import blocktensor.integrations.peft``.

DoRA divides by the norms of ``W + B A``. The import makes peft compute them from the dequantized
values of W, which are freed after the norm is computed; matmuls with W stay in FP8. Peft 0.21.0
and 0.21.2 compute the same bits without the import, and no other adapter needs it.
"""

from __future__ import annotations

import functools
from typing import Any

import peft.tuners.lora.dora  # noqa: F401  (is patched)

from ..patches import DORA_NORMS
from ..tensor.fp8_tensor import BlockwiseFP8Tensor


@DORA_NORMS.made_by
def _of_values(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def get_weight_norm(self: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        values = weight.dequantize() if isinstance(weight, BlockwiseFP8Tensor) else weight
        return theirs(self, values, *args, **kwargs)

    return get_weight_norm


DORA_NORMS.apply()
