"""Refuse peft's adapters in a model that FSDP2 has sharded already.

``fully_shard`` manages the parameters that a model has by then. An adapter that is added later is a
plain parameter: each rank draws and trains its own, and no rank ever sees another's gradient.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..model.weights import full_name
from ..patches import ADAPTERS_OF_SHARDS
from ..sharding.fsdp.fsdp_internals import sharded_in
from ..sharding.fsdp.gather import GatheredInFP8


@ADAPTERS_OF_SHARDS.around
def _inject_adapter(
    theirs: Any, tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    if not tuner.peft_config[adapter_name].inference_mode:
        _check_not_sharded(model)
    theirs(tuner, model, adapter_name, *args, **kwargs)


def _check_not_sharded(model: nn.Module) -> None:
    """Check that FSDP2 shards no FP8 weight of a model.

    Raises:
        NotImplementedError: it does.
    """
    for (module, key), part in sharded_in(model).items():
        if not isinstance(part, GatheredInFP8):
            continue
        name = next(full_name(n, key) for n, x in model.named_modules() if x is module)
        raise NotImplementedError(
            f"adapters of a model with FP8 weights that FSDP2 has cut ({name!r}): peft would make "
            f"parameters that FSDP2 neither shards nor reduces, and each rank would train others. "
            f"Call get_peft_model on a new model before fully_shard; adapters that are not trained "
            f"(inference_mode=True) may come later"
        )
