"""peft's DoRA on a base that is frozen in FP8: ``import blocktensor.integrations.peft``.

DoRA divides by the norms of ``W + B A``. The import makes peft compute them from the dequantized
values of W, which are freed after the norm is computed; products with W stay in FP8. All other
adapters that work on a frozen base need no import.
"""

from __future__ import annotations

import functools
from typing import Any

from peft.tuners.lora.dora import DoraLinearLayer

from ..tensor.fp8_tensor import BlockwiseFP8Tensor


def _norms_of_values() -> None:
    """Wrap the method that computes the norms, once."""
    theirs = DoraLinearLayer.get_weight_norm
    if getattr(theirs, "is_of_blocktensor", False):
        return

    @functools.wraps(theirs)
    def get_weight_norm(self: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        values = weight.dequantize() if isinstance(weight, BlockwiseFP8Tensor) else weight
        return theirs(self, values, *args, **kwargs)

    get_weight_norm.is_of_blocktensor = True  # type: ignore[attr-defined]
    setattr(DoraLinearLayer, "get_weight_norm", get_weight_norm)  # noqa: B010


_norms_of_values()
