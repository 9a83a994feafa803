"""Send tokens to other ranks as e4m3 bytes and scales, in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import allow_in_graph, is_compiling
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd.linear import refuse_prepared
from ..ops import checks
from ..ops.cast.ops import quantize_rowwise
from ..ops.cast.rows import packed, unpacked
from ..ops.formats import ScaleRounding
from ..recipe import OperandName, Recipe, Scales, check_recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor

Group = dist.ProcessGroup | DeviceMesh
Sizes = Sequence[int] | None

IN_POWERS = Recipe(scale=Scales(activations="power_of_two"))

_CHOICES = tuple(field.name for field in fields(Recipe) if field.name != "scale")
"""The fields of a recipe that are constants for a compiler."""


def all_to_all_fp8(
    x: Tensor,
    output_split_sizes: Sizes,
    input_split_sizes: Sizes,
    group: Group | None = None,
    *,
    recipe: Recipe | None = None,
) -> BlockwiseFP8Tensor:
    """Send rows of ``x[T, K]`` to the ranks of ``group`` in FP8, and return those that arrive.

    As torch's ``all_to_all_single_autograd``, with ``1 + 4/128`` bytes for each element on the wire
    instead of two. Each row travels with its scales, in one collective. Gradients return in the
    dtype of ``x``, without a cast.

    ``grouped_linear``, ``gated_experts`` and linear layers take the result. They compute the same
    bits as for ``x`` sent in FP8 from anywhere: a cast of a row depends on this row alone. Scales
    are powers of two, so that the columnwise blocks, which weight gradients read, are derived
    without a second rounding. ``result[order]`` brings the rows into another order.

    All ranks of the group must call it, as any collective.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, sorted by rank; or in FP8, with 1x128 blocks.
        output_split_sizes: the rows that arrive from each rank; None if all are equal.
        input_split_sizes: the rows that go to each rank; None if all are equal.
        group: the group, or a mesh of one dimension; None for all ranks.
        recipe: how to cast a plain ``x``: the recipe of the weights. Default
            ``Recipe(scale=Scales(activations="power_of_two"))``.

    Returns:
        ``[R, K]``, sorted by the rank that has sent them, of the dtype of ``x``.

    Raises:
        TypeError, ValueError: ``x`` is not such a matrix, or its sizes do not fit; the scales of
            activations are not powers of two.

    Examples:
        On each of two ranks: a row for rank 0 and two rows for rank 1.

        >>> x = torch.randn(3, 256, dtype=torch.bfloat16, requires_grad=True)
        >>> arriving = [1, 1] if rank == 0 else [2, 2]
        >>> rows = blocktensor.distributed.all_to_all_fp8(x, arriving, [1, 2])
        >>> y = blocktensor.functional.grouped_linear(rows[order], w, offs)
    """
    check_recipe(recipe)
    checks.tensor(x, "x")
    recipe = _checked(x, recipe)
    if not is_compiling():
        _check_sizes(x, input_split_sizes)
    arriving, leaving = (
        None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)
    )
    roundings = [recipe.scale_of(operand) for operand in get_args(OperandName)]
    choices = [getattr(recipe, name) for name in _CHOICES]
    return _sent(x, arriving, leaving, _name_of(group), roundings, choices)


def _name_of(group: Group | None) -> str:
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    whole: Any = dist.group.WORLD
    name: str = whole.group_name if group is None else group.group_name
    return name


@allow_in_graph
def _sent(
    x: Tensor,
    arriving: Sizes,
    leaving: Sizes,
    group: str,
    roundings: Sequence[ScaleRounding],
    choices: Sequence[Any],
) -> BlockwiseFP8Tensor:
    """Run :class:`_AllToAll`; Dynamo puts this call into its graph, which holds no objects.

    Args:
        x, arriving, leaving, group: see :class:`_AllToAll`.
        roundings: the fields of the recipe's scales.
        choices: its other fields, :data:`_CHOICES`.
    """
    recipe = Recipe(Scales(*roundings), **dict(zip(_CHOICES, choices, strict=True)))
    made: BlockwiseFP8Tensor = _AllToAll.apply(x, arriving, leaving, group, recipe)
    return made


def _checked(x: Tensor, recipe: Recipe | None) -> Recipe:
    """Check ``x``, and return the recipe of its cast."""
    if isinstance(x, BlockwiseFP8Tensor):
        refuse_prepared(x)
        if x.ndim != 2 or x.rowwise_data is None or x.rowwise_format.rows != 1:
            raise ValueError(
                f"all_to_all_fp8 of {x!r}: expected tokens [T, K] with a rowwise form in blocks of "
                f"one row, as blocktensor.quantize(x) makes them"
            )
        recipe, name = x.recipe, x.rowwise_format
    else:
        recipe = recipe or IN_POWERS
        name = recipe.activation_format
        checks.castable(x, name)
    if not name.power_of_two:
        raise ValueError(
            f"all_to_all_fp8 in {name.name} blocks: their scales are no powers of two, so experts "
            f"would round the tokens a second time for the gradients of their weights; convert "
            f"the experts with Recipe(scale=Scales(activations='power_of_two')) and pass "
            f"recipe=weight.recipe, or send x in high precision"
        )
    return recipe


def _check_sizes(x: Tensor, sizes: Sizes) -> None:
    if sizes is not None and sum(sizes) != x.shape[0]:
        raise ValueError(
            f"all_to_all_fp8 of {x.shape[0]} rows with input_split_sizes={list(sizes)}, a sum of "
            f"{sum(sizes)}: expected the number of rows that go to each rank"
        )


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arriving: Sizes, leaving: Sizes, group: str, recipe: Recipe
    ) -> BlockwiseFP8Tensor:
        ctx.sizes, ctx.group = (leaving, arriving), group
        if isinstance(x, BlockwiseFP8Tensor):
            row = x.rowwise()
        else:
            row = quantize_rowwise(x, recipe.activation_format)
        rows = _exchanged(packed(row), arriving, leaving, group)
        k = x.shape[1]
        made = unpacked(rows, k, row.format)
        formats = row.format, recipe.wgrad_input_format or row.format
        how: Any = {"dtype": x.dtype, "recipe": recipe, "formats": formats}
        return BlockwiseFP8Tensor(made, None, shape=(rows.shape[0], k), **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        leaving, arriving = ctx.sizes
        grad = _exchanged(grad.contiguous(), leaving, arriving, ctx.group)
        return grad, None, None, None, None


def _exchanged(rows: Tensor, arriving: Any, leaving: Any, group: Any) -> Tensor:
    """Return the rows that arrive; sizes are lists, ``group`` is a name."""
    made: Tensor = wait_tensor(all_to_all_single(rows, arriving, leaving, group))
    return made
