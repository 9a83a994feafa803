"""What the integration knows of transformers beyond its documented hooks.

- ``from_pretrained`` of a checkpoint whose ``config.json`` names a quantization method takes the
  config in the file, and raises for one of another class. The weights of a checkpoint in FP8 are
  ours to read, and those of one marked "blocktensor" are ordinary: what the caller gives decides.
- ``save_pretrained(state_dict=...)`` of a quantized model drops its argument for what the quantizer
  returns, and asks it for that without the argument. Trainer gathers the state of a model under
  FSDP into this argument.
"""

from __future__ import annotations

import copy
from types import FrameType
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer

from .config import METHOD, BlockwiseFP8Config

_FP8_METHODS = ("fp8", "compressed-tensors")
"""The methods of checkpoints that ``load_fp8`` reads, by their names in ``config.json``."""


def prefer_given_config() -> None:
    """Make ``from_pretrained`` take a given BlockwiseFP8Config, whatever the file says."""
    theirs = AutoHfQuantizer.merge_quantization_configs
    if getattr(theirs, "is_of_blocktensor", False):
        return

    def merged(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if not isinstance(quantization_config_from_args, BlockwiseFP8Config):
            return theirs(quantization_config, quantization_config_from_args)
        stored = dict(quantization_config).get("quant_method")
        stored = getattr(stored, "value", stored)
        if stored == METHOD:
            return quantization_config_from_args
        if stored not in _FP8_METHODS:
            raise ValueError(
                f"the checkpoint is quantized by {stored!r}, which blocktensor does not read: "
                f"expected {', '.join(map(repr, _FP8_METHODS))} or a checkpoint in high precision; "
                f"dequantize it with the library that wrote it, then convert"
            )
        config = copy.deepcopy(quantization_config_from_args)
        config.reads_fp8 = True
        return config

    merged.is_of_blocktensor = True  # type: ignore[attr-defined]
    setattr(AutoHfQuantizer, "merge_quantization_configs", staticmethod(merged))  # noqa: B010


def state_given_to_save(caller: FrameType | None) -> dict[str, Any] | None:
    """The ``state_dict`` argument of the ``save_pretrained`` that asks for a state."""
    if caller is None or caller.f_code.co_name != "save_pretrained":
        return None
    given = caller.f_locals.get("state_dict")
    return given if isinstance(given, dict) else None
