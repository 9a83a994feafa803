"""Layouts as constants of a graph, which holds no objects.

Strings: Dynamo takes numbers that differ between two linears for symbolic ones.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard


def as_constant(layout: Placement) -> str:
    """``layout`` for :func:`from_constant`.

    Raises:
        NotImplementedError: it is none of ``Shard``, ``Replicate`` and ``Partial``.
    """
    if type(layout) is Replicate:
        return "replicate"
    if type(layout) is Shard:
        return f"shard {layout.dim}"
    if type(layout) is Partial:
        return f"partial {layout.reduce_op}"
    raise NotImplementedError(
        f"a layout {layout} of a tensor parallel linear: expected Shard, Replicate or Partial"
    )


def from_constant(constant: str) -> Placement:
    """The layout that :func:`as_constant` was given."""
    kind, _, argument = constant.partition(" ")
    if kind == "replicate":
        return Replicate()
    return Shard(int(argument)) if kind == "shard" else Partial(argument)
