"""Other libraries' kernels for the same work, each where it can be imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from blocktensor.ops.formats import Quantized

from .timing import Call

MODULES = {
    "torchao": "torchao.prototype.blockwise_fp8_training.kernels",
    "deepgemm": "deep_gemm",
}
"""Column of the results: the module that must be importable."""

CASTS = {
    "rowwise": "triton_fp8_blockwise_act_quant_lhs",
    "columnwise": "triton_fp8_blockwise_act_quant_transposed_lhs",
    "128x128": "triton_fp8_blockwise_weight_quant_transposed_rhs",
}
"""Our cast: torchao's kernel for it."""


@functools.cache
def _load(module: str) -> ModuleType | str:
    try:
        return importlib.import_module(module)
    # Whatever a library's import runs into, compiled parts included, it is absent here.
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def why_absent(name: str, module: str) -> dict[str, str]:
    """Return why a module cannot be imported here, by ``name``; empty if it can."""
    found = _load(module)
    return {name: found} if isinstance(found, str) else {}


def absent() -> dict[str, str]:
    """The peers that cannot be imported here, and why."""
    return {k: v for name, module in MODULES.items() for k, v in why_absent(name, module).items()}


def present(name: str) -> bool:
    """Return True if the peer can be imported."""
    return not why_absent(name, MODULES[name])


def torchao_gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Call:
    """A call of torchao's Triton GEMM; it takes B and its scales transposed, as views.

    Its kernels compile and tune themselves for every shape: the first run takes minutes.
    """
    module: Any = _load(MODULES["torchao"])
    square = b.format.rows > 1
    name = "triton_fp8_gemm_1x128_128x128" if square else "triton_fp8_gemm_1x128_128x1"
    gemm = getattr(module, name)
    operands = a.data, b.data.t(), a.scale, b.scale.t()
    return lambda: gemm(*operands, out_dtype=out_dtype)


def torchao_cast(op: str, x: Tensor) -> Call:
    """A call of torchao's cast of ``x`` that corresponds to ours."""
    module: Any = _load(MODULES["torchao"])
    cast = getattr(module, CASTS[op])
    return lambda: cast(x)


def torchao_linear(layer: nn.Linear) -> nn.Linear:
    """The blockwise linear of torchao over the weight of ``layer``, GEMMs by cuBLAS."""
    module: Any = importlib.import_module("torchao.prototype.blockwise_fp8_training.linear")
    converted: nn.Linear = module.Float8BlockwiseLinear.from_float(layer)
    return converted


TORCHAO_TRAINS = ("torchao tensorwise", "torchao rowwise")
"""Variants of models: torchao's float8 training by the recipe of that name."""


def without_torchao() -> dict[str, str]:
    """Return why torchao's float8 training is absent here; empty if it is not."""
    return why_absent("torchao", "torchao.float8")


def torchao_training(name: str, model: nn.Module) -> nn.Module:
    """Convert all linears of ``model`` but its head to torchao's float8 training, in place."""
    module: Any = importlib.import_module("torchao.float8")
    config = module.Float8LinearConfig.from_recipe_name(name.removeprefix("torchao "))
    converted: nn.Module = module.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, path: "lm_head" not in path
    )
    return converted


def deepgemm_fprop(a: Quantized, b: Quantized, out: Tensor) -> Call:
    """A call of DeepGEMM's 1x128 by 128x128 product into ``out``."""
    module: Any = _load(MODULES["deepgemm"])
    left, right = (a.data, a.scale), (b.data, b.scale.contiguous())
    return lambda: module.fp8_gemm_nt(
        left, right, out, recipe=(1, 128, 128), disable_ue8m0_cast=True
    )


def deepgemm_grouped(a: Quantized, b: Quantized, sizes: Sequence[int], out: Tensor) -> Call:
    """A call of DeepGEMM's grouped 1x128 by 128x128 product into ``out[T, N]``.

    Its groups are multiples of 128 rows; each row names its group.
    """
    module: Any = _load(MODULES["deepgemm"])
    counts = torch.tensor(sizes, device=out.device)
    groups = torch.arange(len(sizes), dtype=torch.int32, device=out.device)
    group_of_row = groups.repeat_interleave(counts)
    left, right = (a.data, a.scale), (b.data, b.scale.contiguous())
    return lambda: module.m_grouped_fp8_gemm_nt_contiguous(
        left, right, out, group_of_row, disable_ue8m0_cast=True
    )
