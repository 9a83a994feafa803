"""Explain which backend each matmul of a model runs on, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..conversion.fast_path import described
from ..model.weights import (
    experts_per_token,
    fp8_part,
    fp8_weights,
    label_of,
    local_stack,
    sizes_of,
)
from ..ops.formats import BlockFormat
from ..ops.gemm.choose_backend import GemmProblem, choose_gemm
from ..ops.grouped_gemm.choose_backend import GroupedProblem, choose_grouped
from ..ops.registry import Choice
from ..ops.scale_layouts import columnwise_width
from ..recipe import DEFAULT_RECIPE, Recipe
from ..sharding.dtensor import is_parallel
from ..text_table import collapse, text_table

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Product:
    """One GEMM of one layer: ``[M, N]`` output, contraction K.

    Attributes:
        groups: number of groups of tokens, one for each expert of a stack; else 1. Only the device
            knows their sizes. The fprop has M rows for all of them, the wgrad contracts K.
    """

    layer: str
    kind: str
    m: int
    n: int
    k: int
    backend: str
    reason: str
    groups: int = 1

    @property
    def sizes(self) -> str:
        """M x N x K, and the number of groups."""
        sizes = f"{self.m} x {self.n} x {self.k}"
        return sizes if self.groups == 1 else f"{sizes} in {self.groups} groups"


@dataclass(frozen=True)
class Explanation:
    """The matmuls of a model; ``print(explanation)`` shows them as a table.

    Attributes:
        products: every GEMM of every layer.
        fast_path: says if the fast kernels run on the GPU, or why not; None without a GPU.
    """

    products: tuple[Product, ...]
    fast_path: str | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends in use, sorted."""
        return tuple(sorted({p.backend for p in self.products}))

    def __str__(self) -> str:
        if not self.products:
            return "no FP8 layers: convert the model first with blocktensor.convert(model)"
        cells = (
            (p.layer or "(model)", p.kind, p.sizes, p.backend, p.reason) for p in self.products
        )
        rows = collapse(cells, across=True)
        table = text_table(("layer", "product", "M x N x K", "backend", "why"), rows)
        return table if self.fast_path is None else f"{table}\n{self.fast_path}"


def explain(
    model_or_shapes: nn.Module | Sequence[Shape],
    tokens: int = 4096,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
) -> Explanation:
    """Return the backend of every FP8 matmul, forward and backward, and why it was chosen.

    Args:
        model_or_shapes: a converted model, or linear layers as (M tokens, N out, K in).
        tokens: rows of the input (batch x sequence) for a model. Experts get as many for each
            expert that the router picks for a token, as ``num_experts_per_tok`` of the module's
            config says; where there is none, one is assumed.
        dtype: dtype of activations and their gradients. Weight gradients have the weight's dtype;
            for shapes, this one.
        device: for shapes; default CUDA if available, else CPU.
        recipe: for shapes; a model's weights have theirs.

    Raises:
        ValueError: a shape that is not three sizes, or a ``BLOCKTENSOR_GEMM`` that cannot run them.
    """
    given: Any = model_or_shapes
    if not isinstance(given, (nn.Module, Sequence)) or isinstance(given, str):
        raise TypeError(
            f"explain takes a model, or a list of shapes (M, N, K): got a {type(given).__name__}"
        )
    products: list[Product] = []
    if isinstance(model_or_shapes, nn.Module):
        devices: set[torch.device] = set()
        for name, module in model_or_shapes.named_modules():
            for key in fp8_weights(module):
                weight: Any = module._parameters[key]
                fp8 = fp8_part(weight)  # a shard's sizes are not those of the weight
                kinds = ("fprop", "dgrad", "wgrad") if weight.requires_grad else ("fprop", "dgrad")
                casts = fp8.recipe
                # ranks that share a stack or a tensor parallel linear each multiply by a part
                part = fp8 if is_parallel(module) else local_stack(weight)
                multiplied = weight if part is None else part
                sizes = sizes_of(module, key, multiplied)
                label, where = label_of(name, key), weight.device
                devices.add(where)
                if weight.ndim == 3:
                    experts, bias = len(multiplied), None
                    shape = (tokens * experts_per_token(module), *sizes)
                else:
                    experts, bias = None, None if getattr(module, "bias", None) is None else dtype
                    shape = (tokens, *sizes)
                dtypes = dtype, weight.dtype
                products += _products(label, shape, kinds, casts, dtypes, where, bias, experts)
        return Explanation(tuple(products), _fast_path(devices))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shapes: Sequence[Any] = model_or_shapes
    for shape in shapes:
        if not isinstance(shape, Sequence) or len(shape) != 3:
            raise ValueError(f"shape {shape!r}: expected (M tokens, N out, K in)")
        label, kinds = "x".join(str(s) for s in shape), ("fprop", "dgrad", "wgrad")
        products += _products(label, shape, kinds, recipe, (dtype, dtype), where)
    return Explanation(tuple(products), _fast_path({where}))


def _fast_path(devices: set[torch.device]) -> str | None:
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    return described(gpus[0]) if gpus else None


def _products(
    layer: str,
    shape: Shape,
    kinds: Sequence[str],
    recipe: Recipe,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    bias: torch.dtype | None = None,
    experts: int | None = None,
) -> list[Product]:
    """Return the matmuls with a weight, or a stack; ``dtypes``: of activations and the weight."""
    (m, n, k), (dtype, weight_dtype) = shape, dtypes
    rows, squares, x_format = (
        recipe.activation_format, recipe.weight_format, recipe.wgrad_input_format,
    )  # fmt: skip
    of_x = "" if x_format is None or not x_format.transposes else f"x in {x_format.name} blocks; "
    products = []
    for kind in kinds:
        sizes = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[kind]
        if kind != "wgrad":
            added = bias if kind == "fprop" else None
            invariant = kind == "fprop" and recipe.batch_invariant
            formats = rows, squares
            choice = _chosen(kind, sizes, formats, dtype, device, added, experts, invariant)
            backend, reason = choice.name, choice.reason
        elif x_format is not None:
            choice = _chosen(kind, sizes, (rows, x_format), weight_dtype, device, None, experts)
            backend, reason = choice.name, of_x + choice.reason
        else:
            name = str(dtype).removeprefix("torch.")
            backend, reason = "torch", f"{name}, by Recipe(wgrad_input='high_precision')"
        groups = 1 if experts is None else experts
        products.append(Product(layer, kind, *sizes, backend, reason, groups))
    return products


def _chosen(
    kind: str,
    sizes: Shape,
    formats: tuple[BlockFormat, BlockFormat],
    out_dtype: torch.dtype,
    device: torch.device,
    bias: torch.dtype | None,
    experts: int | None,
    batch_invariant: bool = False,
) -> Choice[Any]:
    m, n, k = sizes
    if experts is None:
        if kind == "wgrad":
            k = columnwise_width(k, formats[1])
        of = GemmProblem(
            m, n, k, *formats, out_dtype, device, bias=bias, batch_invariant=batch_invariant
        )
        return choose_gemm(of)
    if kind == "wgrad":
        problem = GroupedProblem("wgrad", k, m, n, experts, *formats, out_dtype, device)
    else:
        problem = GroupedProblem("gemm", m, n, k, experts, *formats, out_dtype, device)
    return choose_grouped(problem)
