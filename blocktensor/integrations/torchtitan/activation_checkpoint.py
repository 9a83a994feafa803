"""Selective activation checkpointing that counts products in FP8 among the matrix products.

torchtitan's policy goes by ops: it saves the results of ``aten.mm``, all but every second, and
does not know ``blocktensor::gemm``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import SelectiveAC

_OUT_BY_IN = {torch.ops.aten.linear.default: 1, torch.ops.blocktensor.gemm.default: 3}
"""Products by the place of their weight ``[out, in]`` among the arguments."""

_PRODUCTS = {torch.ops.aten.mm.default, *_OUT_BY_IN}


class BlockwiseFP8SelectiveAC(SelectiveAC):
    """torchtitan's ``SelectiveAC`` for models with linears in FP8.

    The results of every second product, in FP8 or not, are saved; casts are made again. Products
    of experts are computed again, as torchtitan does in high precision.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """The fields of ``SelectiveAC.Config``."""

    def get_save_ops(self) -> set[Any]:
        """The ops whose results are saved: torchtitan's, and the FP8 product."""
        return {*super().get_save_ops(), torch.ops.blocktensor.gemm.default}

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config: Any = self.config
        recomputed = _shapes_of(module, base_fqn, config.force_recompute_mm_shapes_by_fqns)
        saved = self.get_save_ops()
        return checkpoint_wrapper(
            module,
            context_fn=lambda: create_selective_checkpoint_contexts(_policy(saved, recomputed)),
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=False,
            debug=config.debug,
        )


def _shapes_of(module: nn.Module, above: str | None, parts: list[str]) -> set[tuple[int, ...]]:
    """The shapes ``[out, in]`` of linears whose names contain one of ``parts``.

    Raises:
        ValueError: a name is that of another module.
    """
    shapes = set()
    for name, inner in module.named_modules():
        name = f"{above}.{name}" if above else name
        if any(part in name for part in parts):
            if not isinstance(inner, nn.Linear):
                raise ValueError(
                    f"force_recompute_mm_shapes_by_fqns={parts} matches {name!r}, a "
                    f"{type(inner).__name__}: expected names of linears"
                )
            shapes.add(tuple(inner.weight.shape))
    return shapes


def _policy(saved: set[Any], recomputed: set[tuple[int, ...]]) -> Callable[..., CheckpointPolicy]:
    """What is saved: as torchtitan's policy decides, with FP8 products among the products.

    Args:
        saved: ops whose results are saved.
        recomputed: shapes ``[out, in]`` of weights whose products are always computed again.
    """
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _is_copy_to_host(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        if op in _PRODUCTS:
            if _weight_shape(op, args) in recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _is_copy_to_host(op: Any, args: Any, kwargs: Any) -> bool:
    return (
        op is torch.ops.aten._to_copy.default
        and args[0].device.type == "cuda"
        and str(kwargs.get("device")) == "cpu"
    )


def _weight_shape(op: Any, args: Any) -> tuple[int, ...]:
    """The shape ``[out, in]`` of the weight of a product."""
    if op in _OUT_BY_IN:
        return tuple(args[_OUT_BY_IN[op]].shape)
    return tuple(reversed(args[1].shape))
