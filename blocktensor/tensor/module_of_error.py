"""Name the module and the weight in the error of a refused product."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves


@_disable_dynamo  # it looks at frames, which no compiler can trace
def name_module(error: Exception, operands: Any) -> None:
    """Add to ``error`` the module whose code runs, and the weights that a refused op reads.

    They are looked for on the stack, for their names: nothing is known of modules here.

    Args:
        error: raised for an op of an FP8 type; NotImplementedError of one that is refused.
        operands: those of the op, one of which may be a weight or a view of one.
    """
    if getattr(error, "names_module", False):
        return
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module not in modules:
            modules.append(module)
        frame = frame.f_back
    if not modules:
        return
    model = modules[-1]
    name = next((name for name, x in model.named_modules() if x is modules[0]), "")
    text = f"{error}; in {name!r}, a {type(modules[0]).__name__}" if name else str(error)
    is_refused = isinstance(error, NotImplementedError)
    if is_refused and (weights := _weights_of(model, operands)):
        text += f", by {' and '.join(map(repr, weights))}; to compute that in high precision, "
        patterns = list(dict.fromkeys(map(_pattern, weights)))
        text += f"convert(model, skip={patterns})" if all(patterns) else "leave it unconverted"
    error.args = (text,)
    error.names_module = True  # type: ignore[attr-defined]


def _pattern(weight: str) -> str:
    """A skip pattern for the module of a weight, in all layers alike."""
    *parts, _ = weight.split(".")
    of_layers = ["*" if part.isdigit() else part for part in parts]
    return ".".join(parts if len(parts) == 1 else of_layers)


def _weights_of(model: nn.Module, operands: Any) -> list[str]:
    """The names of the FP8 parameters of ``model`` that operands are views of."""
    read = {part for x in tree_leaves(operands) for part in _memory(x)}
    return [name for name, p in model.named_parameters() if read & _memory(p)]


def _memory(x: Any) -> set[int]:
    """The storages of an FP8 tensor: they stay those of a weight in its views."""
    if hasattr(x, "counted"):
        parts = [x.counted]
    elif hasattr(x, "columnwise_data"):
        parts = [part for part in (x.rowwise_data, x.columnwise_data) if part is not None]
    else:
        return set()
    return {part.untyped_storage()._cdata for part in parts}
