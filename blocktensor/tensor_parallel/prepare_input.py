"""Cast and gather an input once for several parallel linear layers (q, k, v; gate, up).

The result is a BlockwiseFP8Tensor with the rowwise form of all tokens. Autograd adds the partial
gradients of the linear layers that read it, and one reduction over ranks gives the gradient of this
rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.compiler import (
    allow_in_graph,
    assume_constant_result,
    is_compiling,
    is_dynamo_compiling,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from ..autograd.backward import FP8Function, Gradients, run_backward
from ..autograd.matmuls import Saved
from ..autograd.plan import autocast_dtype
from ..autograd.quantize import cast_activation
from ..ops import checks
from ..ops.cast.ops import quantize_forms
from ..ops.runtime.specialize import PLAIN
from ..recipe import Recipe
from ..sharding.dtensor import parallel_kind
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .collectives import Reduction, TokenShards
from .parallel_forward import (
    Agreement,
    ColwiseForward,
    as_constant,
    fp8_local,
    from_constant,
    layout_of,
    local_input,
    token_dim,
)
from .parallel_matmuls import SharedGather, is_gathered_in_fp8


class PrepareModuleInput(torch_styles.PrepareModuleInput):
    """``torch.distributed.tensor.parallel.PrepareModuleInput`` for modules of FP8 linear layers.

    An input with the layout ``Shard(...)`` of tokens and the desired layout ``Replicate()`` is cast
    once and gathered once as e4m3 and scales, for all linear layers of the module with
    :class:`ColwiseParallel` (q, k, v; gate, up). In backward, the sum of their data gradients is
    reduced once, in high precision, and the tokens are gathered once for their weight gradients. An
    input with the layout ``Replicate()`` is cast once, and its gradient reduced once.

    The module gets the input as a BlockwiseFP8Tensor: it may pass it, or views of its leading
    dimensions, to those linear layers. Unless all of them are converted, the input is gathered in
    its own dtype, as torch's style does.

    Args:
        input_layouts, desired_input_layouts: see torch's style.
        input_kwarg_layouts, desired_input_kwarg_layouts: see torch's style.
        use_local_output: see torch's style.
        reduce_dtype: the dtype in which ranks send sums of data gradients; default: the input's.
        in_rank_order: see :class:`ColwiseParallel`.

    Raises:
        TypeError: ``reduce_dtype`` is not bf16, fp16 or fp32.
        ValueError: in forward, if the linear layers have unequal recipes.
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
        if reduce_dtype is not None:
            checks.given_dtype(reduce_dtype, "reduce_dtype")
        self.reduce_dtype, self.in_rank_order = reduce_dtype, in_rank_order

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepared = _OnMesh(self, device_mesh)
        # functions, since a copy of the module shares them and passes itself
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
    """The value that torch's style passes to ``_prepare_input_arg`` in place of a mesh."""

    mesh: DeviceMesh
    module: nn.Module


class _OnMesh(torch_styles.PrepareModuleInput):
    """The style on one mesh, which finds the linear layers of the running module."""

    def __init__(self, style: PrepareModuleInput, mesh: DeviceMesh) -> None:
        vars(self).update(vars(style))
        self._mesh = mesh
        self._reduction = Reduction(mesh.get_group(), style.reduce_dtype, style.in_rank_order)
        self._agreement = Agreement("inputs of tensor parallel linear layers", mesh)
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
        """Check that all ranks cast with the same recipe, or all gather in high precision."""
        self._agreement.check("gathered in high precision" if recipe is None else recipe)

    @assume_constant_result
    def _agree_while_traced(self, names: Sequence[str], *weights: Any) -> None:
        self._agree(_common_recipe(dict(zip(names, weights, strict=True))))

    def _run(self, x: Any, given: Placement, recipe: Recipe | None) -> Any:
        """Return x with all tokens; ``given`` is the layout of a plain x."""
        layout = layout_of(x, given)
        dim = token_dim(layout, x)
        if recipe is not None and (dim is not None or layout.is_replicate()):
            return self._in_fp8(x, layout, dim, recipe)
        return super()._prepare_input_arg(x, self._mesh, given, Replicate())

    def _in_fp8(self, x: Any, layout: Placement, dim: int | None, recipe: Recipe) -> Tensor:
        x = local_input(x, layout)  # DTensor counts a gradient of all tokens once
        tokens = None if dim is None else TokenShards.of(x.shape, dim, self._mesh.get_group())
        return prepare(x, recipe, tokens, self._reduction)


def _weights_of(module: nn.Module) -> dict[str, Any]:
    """Return the weights of the linear layers that read the input of ``module``, by name."""
    return {
        name: linear.weight
        for name, linear in module.named_modules()
        if parallel_kind(linear) == ColwiseForward.kind
    }


def _common_recipe(weights: dict[str, Any]) -> Recipe | None:
    """Return the recipe of all weights; None if one is not converted, or there are none."""
    parts: dict[str, Any] = {name: fp8_local(weight) for name, weight in weights.items()}
    if not parts or None in parts.values():
        return None
    recipes = {local.recipe: name for name, local in parts.items()}
    if len(recipes) > 1:
        lines = "; ".join(f"{name!r} has {recipe}" for recipe, name in recipes.items())
        raise ValueError(
            f"one input of {len(parts)} FP8 linear layers of unequal recipes cannot be cast once: "
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
    """Run ``_OnMesh._run``; Dynamo puts this call into its graph."""
    style = PrepareModuleInput(
        input_layouts=from_constant(given),
        desired_input_layouts=Replicate(),
        use_local_output=use_local_output,
        reduce_dtype=reduce_dtype,
        in_rank_order=in_rank_order,
    )
    recipe = _common_recipe(dict(zip(names, weights, strict=True)))
    return _OnMesh(style, weights[0].device_mesh)._run(x, from_constant(given), recipe)


Parts = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The inner tensors of a prepared input, which compilers see."""


@dataclass(frozen=True, eq=False)
class SharedInput:
    """Facts about a prepared input, for the linear layers that read it.

    Attributes:
        tokens: how tokens are cut; None if every rank has all of them.
        saved: this rank's tokens, in the form that wgrad reads.
        gather: gathers ``saved`` in backward, once for all linear layers.
        runs: ``[0, tokens.outer, tokens.inner]``, without elements; None until a compiler asks.
    """

    tokens: TokenShards | None
    saved: Saved
    gather: SharedGather = field(default_factory=SharedGather)
    runs: Tensor | None = None

    @property
    def parts(self) -> Parts:
        """Return data, scales, and a tensor without elements (:func:`runs_of`)."""
        if self.tokens is None:
            return *self.saved, None
        data, scale = self.saved
        assert data is not None
        return data, scale, runs_of(data, self.tokens) if self.runs is None else self.runs

    @property
    def context(self) -> SharedInputContext:
        """Return the facts without tensors, as a value that compilers compare and copy."""
        if self.tokens is None:
            return SharedInputContext(None, 0)
        return SharedInputContext(self.tokens.group.group_name, self.tokens.dim)


class SharedInputContext(NamedTuple):
    """The cut of tokens between ranks; without a group, every rank has all of them."""

    group_name: str | None
    dim: int

    def of(self, data: Tensor | None, scale: Tensor | None, runs: Tensor | None) -> SharedInput:
        """Return the facts about a prepared input in a graph, given its inner tensors."""
        if self.group_name is None:
            return SharedInput(None, (data, scale))
        assert runs is not None
        _, outer, inner = runs.shape
        group = dist.distributed_c10d._resolve_process_group(self.group_name)  # type: ignore[attr-defined, arg-type]
        return SharedInput(TokenShards(group, self.dim, outer, inner), (data, scale), runs=runs)


def runs_of(x: Tensor, tokens: TokenShards) -> Tensor:
    """Return the sizes of ``tokens`` as a tensor's shape, which may change between batches."""
    return x.new_empty((0, tokens.outer, tokens.inner))


def prepare(
    x: Tensor, recipe: Recipe, tokens: TokenShards | None, reduction: Reduction
) -> BlockwiseFP8Tensor:
    """Cast this rank's tokens ``x[..., K]`` and gather them in FP8.

    Args:
        x: bf16, fp16 or fp32.
        recipe: the recipe of the weights that read it.
        tokens: how tokens are cut; None if ``x`` has all of them.
        reduction: adds the sums of the linear layers' data gradients over ranks.
    """
    dtype = autocast_dtype(x)
    made: BlockwiseFP8Tensor = _Prepare.apply(
        x if dtype is None else x.to(dtype), recipe, tokens, reduction
    )
    return made


class _Prepare(FP8Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recipe: Recipe, tokens: TokenShards | None, reduction: Reduction
    ) -> BlockwiseFP8Tensor:
        ctx.tokens, ctx.reduction = tokens, reduction
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        if tokens is None:
            prepared = cast_activation(x, recipe)
            saved: Saved = prepared.source, None
            if prepared.source is None:
                saved = prepared.columnwise_data, prepared.columnwise_scale
            prepared.prepared = SharedInput(None, saved)
            return prepared
        format, other = recipe.activation_format, recipe.wgrad_input_format
        in_fp8 = is_gathered_in_fp8(other, tokens)
        row, col = quantize_forms(x, format, other if in_fp8 else None)
        assert row is not None
        pending = tokens.gather_rowwise(row)
        source = x.detach()
        prepared = BlockwiseFP8Tensor(
            pending.wait(),
            None,
            shape=tokens.whole_shape(x.shape),
            dtype=x.dtype,
            recipe=recipe,
            formats=(format, other or format),
            source=source if other is None else None,
        )
        # functional tensors outlive the mode in which others can be made of them
        runs = runs_of(x, tokens) if is_compiling() or type(x) not in PLAIN else None
        own: Saved = (source, None) if col is None else col[:2]
        prepared.prepared = SharedInput(tokens, own, runs=runs)
        return prepared

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _input_gradients, ())


def _input_gradients(ctx: Any, saved: object, grads: list[Any], asked: list[bool]) -> Gradients:
    grad: Tensor | None = grads.pop()
    if grad is None:
        return (None,) * 4
    reduction: Reduction = ctx.reduction
    partial = grad.to(reduction.wire(ctx.dtype)).reshape(-1, grad.shape[-1])
    if ctx.tokens is None:
        dx = reduction.all_reduce(partial.contiguous()).wait()
    else:
        dx = ctx.tokens.reduce_scatter(partial, reduction).wait()
    return dx.to(ctx.dtype).view(ctx.shape), None, None, None
