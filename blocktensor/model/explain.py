"""Which backend each product of a model runs on, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from ..ops.gemm.choose_backend import GemmProblem, choose_gemm
from ..ops.grouped_gemm.choose_backend import GroupedProblem, choose_grouped
from ..ops.scale_layouts import columnwise_width
from ..text_table import collapse_alike, text_table
from .experts import experts_per_token
from .linears import fp8_part
from .product_weights import fp8_weights, label_of, sizes_of

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Product:
    """One GEMM of one layer: ``[M, N]`` output, contraction K.

    Attributes:
        groups: into which the tokens of a stack's experts are cut; else 1. Their sizes are known to
            the device alone. The fprop has M rows for all of them, the wgrad contracts K.
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
    """The products of a model; ``print(explanation)`` shows them as a table."""

    products: tuple[Product, ...]

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends in use, sorted."""
        return tuple(sorted({p.backend for p in self.products}))

    def __str__(self) -> str:
        if not self.products:
            return "no FP8 layers: convert the model first with blocktensor.convert(model)"
        rows = collapse_alike(
            (p.layer or "(model)", p.kind, p.sizes, p.backend, p.reason) for p in self.products
        )
        return text_table(("layer", "product", "M x N x K", "backend", "why"), rows)


def explain(
    model_or_shapes: nn.Module | Sequence[Shape],
    tokens: int = 4096,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Explanation:
    """The backend of every FP8 product, forward and backward, and why it was chosen.

    Args:
        model_or_shapes: a converted model, or linears as (M tokens, N out, K in).
        tokens: rows of the input (batch x sequence) for a model. Experts get as many for each
            expert that the router picks for a token, as ``num_experts_per_tok`` of the module's
            config says; where there is none, one is assumed.
        dtype: dtype of activations and their gradients. Weight gradients have the weight's dtype;
            for shapes, this one.
        device: for shapes; default CUDA if available, else CPU.

    Raises:
        ValueError: a shape that is not three sizes, or a ``BLOCKTENSOR_GEMM`` that cannot run them.
    """
    products: list[Product] = []
    if isinstance(model_or_shapes, nn.Module):
        for name, module in model_or_shapes.named_modules():
            for key in fp8_weights(module):
                weight: Any = module._parameters[key]
                fp8 = fp8_part(weight)  # a shard's sizes are not those of the weight
                kinds = ("fprop", "dgrad", "wgrad") if weight.requires_grad else ("fprop", "dgrad")
                formats = fp8.recipe.activation_format, fp8.recipe.weight_format
                sizes = sizes_of(module, key, weight)
                label, where = label_of(name, key), weight.device
                if weight.ndim == 3:
                    shape = (tokens * experts_per_token(module), *sizes)
                    dtypes = dtype, weight.dtype
                    products += _grouped(label, shape, len(weight), kinds, formats, dtypes, where)
                    continue
                bias = None if getattr(module, "bias", None) is None else dtype
                shape = (tokens, *sizes)
                products += _products(
                    label, shape, kinds, formats, bias, dtype, weight.dtype, where
                )
        return Explanation(tuple(products))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for shape in model_or_shapes:
        if len(shape) != 3:
            raise ValueError(f"shape {tuple(shape)}: expected (M tokens, N out, K in)")
        label, kinds = "x".join(str(s) for s in shape), ("fprop", "dgrad", "wgrad")
        products += _products(
            label, shape, kinds, (BLOCKS_1X128, BLOCKS_128X128), None, dtype, dtype, where
        )
    return Explanation(tuple(products))


def _products(
    layer: str,
    shape: Shape,
    kinds: Sequence[str],
    formats: tuple[BlockFormat, BlockFormat],
    bias: torch.dtype | None,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> list[Product]:
    (m, n, k), (rows, squares) = shape, formats
    problems = {
        "fprop": GemmProblem(m, n, k, rows, squares, dtype, device, bias=bias),
        "dgrad": GemmProblem(m, k, n, rows, squares, dtype, device),
        "wgrad": GemmProblem(n, k, columnwise_width(m, rows), rows, rows, weight_dtype, device),
    }
    sizes: dict[str, Shape] = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    products = []
    for kind in kinds:
        choice = choose_gemm(problems[kind])
        products.append(Product(layer, kind, *sizes[kind], choice.name, choice.reason))
    return products


def _grouped(
    layer: str,
    shape: Shape,
    experts: int,
    kinds: Sequence[str],
    formats: tuple[BlockFormat, BlockFormat],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> list[Product]:
    """The products with a stack; ``dtypes``: of activations and of the weight."""
    (m, n, k), (rows, squares), (dtype, weight_dtype) = shape, formats, dtypes
    problems = {
        "fprop": GroupedProblem("gemm", m, n, k, experts, rows, squares, dtype, device),
        "dgrad": GroupedProblem("gemm", m, k, n, experts, rows, squares, dtype, device),
        "wgrad": GroupedProblem("wgrad", m, n, k, experts, rows, rows, weight_dtype, device),
    }
    sizes: dict[str, Shape] = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    products = []
    for kind in kinds:
        choice = choose_grouped(problems[kind])
        products.append(Product(layer, kind, *sizes[kind], choice.name, choice.reason, experts))
    return products
