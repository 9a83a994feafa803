"""peft's DoRA on a base that is frozen in FP8: ``import blocktensor.integrations.peft``.

DoRA divides by the norms of ``W + B A``. The import makes peft compute them from the dequantized
values of W, which are freed after the norm is computed; matmuls with W stay in FP8. Peft 0.21.0
and 0.21.2 compute the same bits without the import, and no other adapter needs it.
"""

from __future__ import annotations

import functools
from typing import Any

from peft.tuners.lora.dora import DoraLinearLayer

from ..tensor.fp8_tensor import BlockwiseFP8Tensor

_theirs = DoraLinearLayer.get_weight_norm


@functools.wraps(_theirs)
def _norms_of_values(self: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    values = weight.dequantize() if isinstance(weight, BlockwiseFP8Tensor) else weight
    return _theirs(self, values, *args, **kwargs)


setattr(DoraLinearLayer, "get_weight_norm", _norms_of_values)  # noqa: B010
