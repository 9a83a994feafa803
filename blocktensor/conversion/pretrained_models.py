"""Let methods of transformers' models work on FP8 weights.

They know plain parameters only. They are wrapped when a weight becomes FP8, in the class
of all models, if transformers is imported by then; models without FP8 weights do as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..model.weights import fp8_form
from ..sharding.dtensor import fp8_part
from ..tensor.compat.callers import callers
from ..tensor.compat.swap_in import swap_in
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .state_dict import register_state_hooks


def follow_pretrained_models() -> None:
    """Wrap the methods of transformers' models, once."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None or hasattr(kind.save_pretrained, "is_of_blocktensor"):
        return
    _wrap(kind, "save_pretrained", _save_pretrained)
    _wrap(kind, "resize_token_embeddings", _resize_token_embeddings)
    _wrap(kind, "from_pretrained", _from_pretrained)


def _wrap(kind: Any, name: str, ours: Callable[..., Any]) -> None:
    method = vars(kind)[name]
    theirs = method.__func__ if isinstance(method, classmethod) else method

    @functools.wraps(theirs)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(theirs, self, *args, **kwargs)

    wrapped.is_of_blocktensor = True  # type: ignore[attr-defined]
    setattr(kind, name, classmethod(wrapped) if isinstance(method, classmethod) else wrapped)


def _save_pretrained(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write high-precision values, of frozen weights too."""
    call = inspect.signature(theirs).bind(model, *args, **kwargs)
    is_frozen = any(isinstance(x, BlockwiseFP8Tensor) for x in model.parameters())
    if is_frozen and not getattr(model, "_hf_peft_config_loaded", False):
        given = call.arguments.get("state_dict")
        state = model.state_dict() if given is None else given
        call.arguments["state_dict"] = {
            name: values_of(x) if isinstance(x, BlockwiseFP8Tensor) else x
            for name, x in state.items()
        }
    return theirs(*call.args, **call.kwargs)


def _resize_token_embeddings(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep an FP8 head in FP8: transformers makes a plain one in its place."""
    head = model.get_output_embeddings()
    weight: Any = getattr(head, "weight", None)
    if weight is None or fp8_part(weight) is not weight:
        return theirs(model, *args, **kwargs)
    plain = nn.Parameter(values_of(weight), requires_grad=weight.requires_grad)
    exchange(model, weight, plain)
    try:
        return theirs(model, *args, **kwargs)
    finally:
        head = model.get_output_embeddings()
        if head.weight is plain and plain.shape == weight.shape:
            exchange(model, plain, weight)
        else:
            swap_in(head.weight, fp8_form(head, "weight", head.weight, weight.recipe))
            register_state_hooks(head)


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


def _from_pretrained(theirs: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn if trl makes a reference model in high precision for a policy in FP8."""
    made = theirs(kind, *args, **kwargs)
    trainers = (x.local("self") for x in callers() if x.module.startswith("trl."))
    trainer = next((x for x in trainers if x is not None), None)
    policy = getattr(trainer, "model", None)
    is_copy = policy is not None and _source(policy) == _source(made)
    if is_copy and _has_fp8(policy) and not _has_fp8(made):
        warnings.warn(
            f"{type(trainer).__name__} has made a reference model in high precision, and the "
            f"policy is in FP8: their log-probabilities differ by the rounding of FP8, and the "
            f"first KL is not 0. Give ref_model=copy.deepcopy(model), or to trainers without "
            f"that argument model_init_kwargs={{'quantization_config': BlockwiseFP8Config()}} "
            f"in their config, with the choices of the policy",
            stacklevel=3,
        )
    return made


def _source(model: Any) -> Any:
    config = getattr(model, "config", None)
    return type(config), getattr(config, "_name_or_path", None)


def _has_fp8(model: Any) -> bool:
    return any(fp8_part(x) is not None for x in model.parameters())
