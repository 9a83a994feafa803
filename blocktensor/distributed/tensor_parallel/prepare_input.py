"""The style that gathers the input of several parallel linears once, in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.compiler import allow_in_graph, assume_constant_result, is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ...recipe import Recipe
from .agreement import Agreement
from .collectives import Reduction
from .in_graph import as_constant, from_constant
from .is_parallel import parallel_kind
from .parallel_forward import ColwiseForward, fp8_local, layout_of, local_input, token_dim
from .shared_input import prepare
from .styles import checked_dtype
from .token_shards import TokenShards


class PrepareModuleInput(torch_styles.PrepareModuleInput):
    """``torch.distributed.tensor.parallel.PrepareModuleInput`` for modules of FP8 linears.

    An input that comes as ``Shard(...)`` of tokens and is wanted as ``Replicate()`` is cast once
    and gathered once as e4m3 and scales, for all linears of the module with
    :class:`ColwiseParallel` (q, k, v; gate, up). In backward, the sum of their data gradients is
    reduced once, in high precision, and the tokens are gathered once for their weight gradients.
    An input that comes as ``Replicate()`` is cast once, and its gradient reduced once.

    The module gets the input as a BlockwiseFP8Tensor: it may pass it to those linears, or to views
    of its leading dimensions. If one of the linears is not converted, or none of them is, the input
    is gathered in its own dtype, as by torch's style.

    Args:
        input_layouts, desired_input_layouts: as of torch's style.
        input_kwarg_layouts, desired_input_kwarg_layouts: as of torch's style.
        use_local_output: as of torch's style.
        reduce_dtype: in which the sums of data gradients travel; default: the input's dtype.
        in_rank_order: as of :class:`ColwiseParallel`.

    Raises:
        TypeError: ``reduce_dtype`` is not bf16, fp16 or fp32.
        ValueError: from forward, if the linears have unequal recipes.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        reduce_dtype: torch.dtype | None = None,
        in_rank_order: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.reduce_dtype, self.in_rank_order = checked_dtype(reduce_dtype), in_rank_order

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepared = _OnMesh(self, device_mesh)
        # functions: a copy of the module shares them, and passes itself
        if self.with_kwargs:
            module.register_forward_pre_hook(
                lambda m, args, kwargs: prepared._prepare_input_kwarg_fn(
                    args, kwargs, _Place(device_mesh, m)
                ),
                with_kwargs=True,
            )
        else:
            module.register_forward_pre_hook(
                lambda m, args: prepared._prepare_input_fn(args, _Place(device_mesh, m))
            )
        return module


class _Place(NamedTuple):
    """What torch's style hands on to ``_prepare_input_arg`` in place of a mesh."""

    mesh: DeviceMesh
    module: nn.Module


class _OnMesh(torch_styles.PrepareModuleInput):
    """The style, which finds the linears of the module that runs."""

    def __init__(self, style: PrepareModuleInput, mesh: DeviceMesh) -> None:
        vars(self).update(vars(style))
        self._mesh = mesh
        self._reduction = Reduction(mesh.get_group(), style.reduce_dtype, style.in_rank_order)
        self._agreement = Agreement("inputs of tensor parallel linears", mesh)
        self._constants = style.use_local_output, style.reduce_dtype, style.in_rank_order

    def _prepare_input_arg(  # type: ignore[override]
        self,
        input: Any,
        place: _Place,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if isinstance(desired_layout, Replicate) and isinstance(input, Tensor):
            assert input_layout is not None
            weights = _weights_of(place.module)
            if weights and is_dynamo_compiling():
                names, given = tuple(weights), as_constant(input_layout)
                self._agree_while_traced(names, *weights.values())
                return _whole(input, names, [*weights.values()], given, *self._constants)
            recipe = _common_recipe(weights)
            self._agree(recipe)
            return self._run(input, input_layout, recipe)
        return super()._prepare_input_arg(input, place.mesh, input_layout, desired_layout)

    def _agree(self, recipe: Recipe | None) -> None:
        """Compare ranks."""
        self._agreement.check("gathered in high precision" if recipe is None else recipe)

    @assume_constant_result
    def _agree_while_traced(self, names: Sequence[str], *weights: Any) -> None:
        self._agree(_common_recipe(dict(zip(names, weights, strict=True))))

    def _run(self, x: Any, given: Placement, recipe: Recipe | None) -> Any:
        """The whole input; ``given``: the layout of a plain one."""
        layout = layout_of(x, given)
        dim = token_dim(layout, x)
        if recipe is not None and (dim is not None or layout.is_replicate()):
            return self._in_fp8(x, layout, dim, recipe)
        return super()._prepare_input_arg(x, self._mesh, given, Replicate())

    def _in_fp8(self, x: Any, layout: Placement, dim: int | None, recipe: Recipe) -> Tensor:
        if dim is None:
            if isinstance(x, DTensor):  # which counts a gradient of all tokens once
                x = x.to_local(grad_placements=[Replicate()])
            return prepare(x, recipe, None, self._reduction)
        x = local_input(x, layout)
        tokens = TokenShards.of(x.shape, dim, self._mesh.get_group())
        return prepare(x, recipe, tokens, self._reduction)


def _weights_of(module: nn.Module) -> dict[str, Any]:
    """Of the linears that read the input of ``module``, by their names."""
    return {
        name: linear.weight
        for name, linear in module.named_modules()
        if parallel_kind(linear) == ColwiseForward.kind
    }


def _common_recipe(weights: dict[str, Any]) -> Recipe | None:
    """The recipe of all; None if one is not converted, or there are none."""
    found = {name: fp8_local(weight) for name, weight in weights.items()}
    if not found or None in found.values():
        return None
    recipes = {local.recipe: name for name, local in found.items() if local is not None}
    if len(recipes) > 1:
        lines = "; ".join(f"{name!r} has {recipe}" for recipe, name in recipes.items())
        raise ValueError(
            f"one input of {len(found)} FP8 linears of unequal recipes cannot be cast once: "
            f"{lines}. Convert them with one recipe, or leave out "
            f"blocktensor.distributed.PrepareModuleInput and pass "
            f"ColwiseParallel(input_layouts=Shard(...))"
        )
    return next(iter(recipes))


@allow_in_graph
def _whole(
    x: Any,
    names: Sequence[str],
    weights: Sequence[Any],
    given: str,
    use_local_output: bool,
    reduce_dtype: torch.dtype | None,
    in_rank_order: bool,
) -> Any:
    """``_OnMesh._run`` for Dynamo, which puts it into its graph as it is (``in_graph.py``)."""
    style = PrepareModuleInput(
        input_layouts=from_constant(given),
        desired_input_layouts=Replicate(),
        use_local_output=use_local_output,
        reduce_dtype=reduce_dtype,
        in_rank_order=in_rank_order,
    )
    recipe = _common_recipe(dict(zip(names, weights, strict=True)))
    return _OnMesh(style, weights[0].device_mesh)._run(x, from_constant(given), recipe)
