"""Let methods of transformers' models work on FP8 weights.

These methods know plain parameters only. They are wrapped in the base class of all models when a
weight becomes FP8, if transformers is imported by then. Models without FP8 weights behave as
before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..patches import RESIZE_TOKEN_EMBEDDINGS, SAVE_PRETRAINED
from ..sharding.dtensor import fp8_part
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight


@SAVE_PRETRAINED.around
def _save_pretrained(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the values in high precision; frozen weights are dequantized."""
    call = inspect.signature(theirs).bind(model, *args, **kwargs)
    is_frozen = any(isinstance(x, BlockwiseFP8Tensor) for x in model.parameters())
    if is_frozen and not getattr(model, "_hf_peft_config_loaded", False):
        given = call.arguments.get("state_dict")
        state = model.state_dict() if given is None else given
        call.arguments["state_dict"] = {
            name: values_of(x) if isinstance(x, BlockwiseFP8Tensor) else x
            for name, x in state.items()
        }
    with _in_high_precision(model):
        return theirs(*call.args, **call.kwargs)


@contextmanager
def _in_high_precision(model: Any) -> Iterator[None]:
    """Keep transformers from quantizing what it saves of a model with FP8 weights.

    transformers reverts the rules by which it has loaded a model. If it has dequantized a
    checkpoint, it would write FP8 and scales, which ``config.json`` does not mention: a load would
    take the bytes for values. Without these rules it writes the usual names of the model.
    """
    rules = vars(model).get("_weight_conversions")
    operations = (op for rule in rules or () for op in getattr(rule, "operations", None) or ())
    has_quantized = any(type(op).__name__.endswith("Dequantize") for op in operations)
    if not has_quantized or all(fp8_part(x) is None for x in model.parameters()):
        yield
        return
    model._weight_conversions = None
    try:
        yield
    finally:
        model._weight_conversions = rules


@RESIZE_TOKEN_EMBEDDINGS.around
def _resize_token_embeddings(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to resize an FP8 head: transformers makes a plain one in its place."""
    given = inspect.signature(theirs).bind(model, *args, **kwargs).arguments
    size, multiple = given.get("new_num_tokens"), given.get("pad_to_multiple_of")
    weight: Any = getattr(model.get_output_embeddings(), "weight", None)
    if fp8_part(weight) is not None and (multiple or size not in (None, weight.shape[0])):
        raise NotImplementedError(
            f"resize_token_embeddings to {size} tokens: the head, {list(weight.shape)}, is in FP8, "
            f"and would become a plain one. Resize before the conversion: load the model without "
            f"FP8, from model.save_pretrained(folder) if it is converted, resize it, then convert"
        )
    return theirs(model, *args, **kwargs)


def values_of(weight: Any) -> Tensor:
    """Return an FP8 weight's values in high precision: its master, or the frozen bytes' values."""
    if isinstance(weight, BlockwiseFP8Weight):
        return weight.master.detach()
    values: Tensor = weight.dequantize().contiguous()
    return values


def exchange(model: nn.Module, old: Any, new: Any) -> None:
    """Replace a parameter by another in all modules that hold it."""
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is old:
                module._parameters[name] = new
