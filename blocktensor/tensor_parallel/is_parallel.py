"""Recognise modules parallelized by a style of this package, without importing the styles."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn


def bind(forward: Callable[[nn.Linear, Tensor], Tensor], kind: str, module: nn.Linear) -> None:
    """Give a linear a forward, which copies of it share and pass themselves to.

    ``kind``: what :func:`parallel_kind` returns from now on.
    """

    # Dynamo takes functions as methods, and no other callables
    def parallel_forward(module: nn.Linear, input: Tensor) -> Tensor:
        return forward(module, input)

    module.forward = MethodType(parallel_forward, module)  # type: ignore[method-assign]
    module._parallel_kind = kind  # type: ignore[assignment]
    module._of_this_process = _OfThisProcess()  # type: ignore[assignment]


class _OfThisProcess:
    """An attribute that raises if its linear is pickled; copies of the linear share it.

    ``pickle`` would write the forward by its name, under which no process finds it.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfThisProcess:
        return self

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            "a linear with ColwiseParallel or RowwiseParallel cannot be pickled, as torch.save("
            "model) does: its forward and its mesh belong to this process. Save "
            "model.state_dict() with torch.distributed.checkpoint, and load it into a model that "
            "is parallelized alike"
        )


def parallel_kind(module: nn.Module) -> str | None:
    """Return ``"colwise"`` or ``"rowwise"`` for a linear with one of the styles, else None.

    Dynamo traces this.
    """
    kind: str | None = getattr(module, "_parallel_kind", None)
    return kind


def is_parallel(module: nn.Module) -> bool:
    """Return True for a linear with :class:`ColwiseParallel` or :class:`RowwiseParallel`."""
    return parallel_kind(module) is not None
