"""Whether a module was parallelized with a style of this package, without importing the styles."""

from __future__ import annotations

from torch import nn


class Forward:
    """Base of the forwards that the styles bind to linears."""


def is_parallel(module: nn.Module) -> bool:
    """True for a linear with :class:`ColwiseParallel` or :class:`RowwiseParallel`."""
    return forward_of(module) is not None


def forward_of(module: nn.Module) -> Forward | None:
    """The forward that a style has bound to a module, if any."""
    bound = getattr(vars(module).get("forward"), "__func__", None)
    return bound if isinstance(bound, Forward) else None
