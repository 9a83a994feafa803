"""``python -m blocktensor``: the environment, the backends and a self-check, for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import traceback

import torch
from torch import Tensor

import blocktensor

from .conversion.fast_path import FAMILIES, described
from .ops import reference
from .recipe import DEFAULT_RECIPE
from .text_table import human_bytes, text_table

OPTIONAL = ("triton", "safetensors", "numpy", "transformers", "accelerate", "peft", "torchtitan")
"""Packages that some part works with."""

VARIABLES = (
    "BLOCKTENSOR_FAST_PATH",
    "BLOCKTENSOR_GEMM",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that change what runs."""

MAX_ERROR = 4e-3
"""The largest relative error against the reference: sums of fp32 in another order, in bf16."""

MAX_FP8_ERROR = 0.06
"""The largest relative error against fp32: a product of two e4m3 operands has 0.04."""


def main() -> int:
    """Print the report; 0 if the self-check holds, else 1."""
    devices = _devices()
    print(environment())
    for device in devices:
        print(f"\n{backends(device)}")
    print()
    passed = True
    for device in devices:
        try:
            errors = self_check(device)
        except Exception as error:  # of any library: the report shows it and goes on
            traceback.print_exc()
            passed, said = False, f"FAILED, {type(error).__name__} above"
        else:
            holds = _holds(errors)
            passed, said = passed and holds, ("ok" if holds else "FAILED") + f", {_listed(errors)}"
        print(f"self-check on {device}: {said}")
    return 0 if passed else 1


def environment() -> str:
    """Return versions and devices, a line each."""
    found = {
        "blocktensor": blocktensor.__version__,
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, {_cuda()}",
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = human_bytes(gpu.total_memory)
        found[f"cuda:{index}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {memory}"
    if not torch.cuda.is_available():
        found["gpu"] = "none"
    found.update((name, _version(name)) for name in OPTIONAL)
    found.update((name, os.environ[name]) for name in VARIABLES if name in os.environ)
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())


def backends(device: torch.device) -> str:
    """Return a line for each backend, best first in its family, and why one cannot run."""
    rows = [
        (family, backend.name, "no" if reason else "yes", reason or "")
        for family, family_backends in FAMILIES.items()
        for backend in family_backends
        for reason in [backend.why_not(device)]
    ]
    table = text_table((f"ops on {device}", "backend", "runs", "why not"), rows)
    return table if device.type != "cuda" else f"{table}\n{described(device)}"


def self_check(device: torch.device) -> dict[str, tuple[float, float]]:
    """Run a small FP8 linear, forward and backward, of sizes that are no multiples of a block.

    Returns:
        For fprop, dgrad and wgrad the relative error against the reference on the CPU, and against
        products in fp32. Both are norms of differences over norms.
    """
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((192, 272), (160, 272), (192, 160))
    )
    leaves = [t.detach().to(device).requires_grad_() for t in (x, w)]
    y = blocktensor.functional.linear(*leaves)
    dx, dw = torch.autograd.grad(y, leaves, grad.to(device))
    precise = (x.float() @ w.float().t(), grad.float() @ w.float(), grad.float().t() @ x.float())
    triples = zip((y.detach(), dx, dw), _reference(x, w, grad), precise, strict=True)
    return {
        name: (_error(found, wanted), _error(found, exact))
        for name, (found, wanted, exact) in zip(("fprop", "dgrad", "wgrad"), triples, strict=True)
    }


def _reference(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, dx and dw by the reference ops alone."""
    rows, squares = DEFAULT_RECIPE.activation_format, DEFAULT_RECIPE.weight_format
    cast, gemm = reference.quantize_rowwise, reference.gemm
    y = gemm(cast(x, rows), cast(w, squares), None, x.dtype)
    dx = gemm(cast(grad, rows), cast(w.t().contiguous(), squares), None, x.dtype)
    dw = gemm(cast(grad.t().contiguous(), rows), cast(x.t().contiguous(), rows), None, w.dtype)
    return y, dx, dw


def _error(found: Tensor, wanted: Tensor) -> float:
    difference = found.cpu().double() - wanted.double()
    return float(difference.norm() / wanted.double().norm())


def _holds(errors: dict[str, tuple[float, float]]) -> bool:
    """Return True if all errors are within their bounds; NaN is not."""
    return all(a <= MAX_ERROR and b <= MAX_FP8_ERROR for a, b in errors.values())


def _listed(errors: dict[str, tuple[float, float]]) -> str:
    to_reference, to_fp32 = (
        ", ".join(f"{error:.2g}" for error in each) for each in zip(*errors.values(), strict=True)
    )
    return f"errors of {', '.join(errors)}: {to_reference} to reference, {to_fp32} to fp32"


def _devices() -> list[torch.device]:
    """Return the CPU, and the current GPU if there is one."""
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


def _cuda() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
