"""``python -m blocktensor``: ``doctor``, the environment, what runs fast, and a self-check;
``plan MODEL``, the memory and the speed of a training run, without a GPU.

``--json`` prints the same for scripts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

import blocktensor

from . import patches
from .conversion.fast_path import FAMILIES, FastPath
from .model import progress
from .ops import reference
from .ops.devices import HOPPER, capability, card
from .ops.runtime import build_player
from .recipe import DEFAULT_RECIPE
from .reports.plan import command
from .reports.predict import tokens_to_gain
from .text_table import Table, filled, human_bytes

OPTIONAL = (
    "triton",
    "safetensors",
    "numpy",
    "tqdm",
    "transformers",
    "accelerate",
    "peft",
    "torchtitan",
)
"""Packages that parts of the library need."""

VARIABLES = (
    "BLOCKTENSOR_CACHE_DIR",
    "BLOCKTENSOR_CHECK_RECORDINGS",
    "BLOCKTENSOR_FAST_PATH",
    "BLOCKTENSOR_GEMM",
    "BLOCKTENSOR_PLAYER",
    progress.VARIABLE,
    patches.VARIABLE,
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that change what runs."""

MAX_ERROR = 4e-3
"""Largest relative error against the reference: bf16 results of fp32 sums in another order."""

MAX_FP8_ERROR = 0.06
"""Largest relative error against fp32; a matmul of two e4m3 operands has 0.04."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = argparse.ArgumentParser("python -m blocktensor")
    parser.set_defaults(command="doctor")
    commands = parser.add_subparsers(dest="command", metavar="{doctor,plan}")
    doctors = commands.add_parser("doctor", help="the environment, and a self-check")
    plans = commands.add_parser("plan", help="memory and speed of a training run, without a GPU")
    command.add_arguments(plans)
    parser.add_argument("--json", action="store_true", help="print JSON")
    for each in (doctors, plans):  # SUPPRESS: do not overwrite an option before the command
        each.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
        )
    options = parser.parse_args(arguments)
    return planned(options, plans) if options.command == "plan" else doctor(options.json)


def planned(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan of a training run; return 0 if it fits, else 1."""
    try:
        report = command.run(options)
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0 if report.fits else 1


def doctor(as_json: bool) -> int:
    """Print the environment and a self-check; return 0 if the self-check holds, else 1."""
    devices = _devices()
    if as_json:
        told = {str(x): facts(x) | {"self_check": checked(x)} for x in devices}
        whole = {"environment": environment_of(), "devices": told, "patches": patches.facts()}
        print(json.dumps(whole, indent=2))
        return 0 if all(found["self_check"]["holds"] for found in told.values()) else 1
    print(environment())
    for device in devices:
        print(f"\n{backends(device)}")
    if not torch.cuda.is_available():
        print("fast path: no (there is no GPU; an H100 or H200 has it)")
    print(f"\n{patches.table()}\n")
    passed = True
    for device in devices:
        found = checked(device)
        passed = passed and found["holds"]
        said = f"FAILED, {found['error']} above" if "error" in found else _said(found)
        print(filled(f"self-check on {device}: {said}"))
    return 0 if passed else 1


def environment_of() -> dict[str, str]:
    """Return versions, devices and variables."""
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
    return found


def environment() -> str:
    """Return versions, devices and variables, one line each."""
    found = environment_of()
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())


def facts(device: torch.device) -> dict[str, Any]:
    """Return all backends, the best of each family first, and what runs fast on a GPU."""
    found: dict[str, Any] = {
        "backends": [
            {"ops": family, "backend": backend.name, "why_not": backend.unusable(device)}
            for family, family_backends in FAMILIES.items()
            for backend in family_backends
        ]
    }
    if device.type == "cuda":
        found["fast_path"] = str(FastPath.of(device))
        found["slow_launches"] = build_player.why_none() or None
        if capability(device) == HOPPER:
            found["host_us"] = host = host_us(device)
            found["tokens_to_gain"] = tokens_to_gain(4096, 4096, host, card(device))
    return found


def backends(device: torch.device) -> str:
    """Format :func:`facts` as text."""
    found = facts(device)
    rows = [
        (x["ops"], x["backend"], "no" if x["why_not"] else "yes", x["why_not"] or "")
        for x in found["backends"]
    ]
    parts = [str(Table((f"ops on {device}", "backend", "runs", "why not"), rows))]
    if "fast_path" in found:
        parts.append(filled(found["fast_path"]))
        reason = found["slow_launches"]
        parts.append(
            f"launches: by Triton, several times the host time ({reason})"
            if reason
            else "launches: repeated in C++"
        )
    if "host_us" in found:
        parts.append(hint(found["host_us"], found["tokens_to_gain"]))
    return "\n".join(parts)


def host_us(device: torch.device) -> dict[str, float]:
    """Return median host microseconds of a small linear layer, forward + backward, by dtype."""
    layers = {
        name: torch.nn.Linear(512, 512, bias=False).to(device, torch.bfloat16)
        for name in ("bf16", "fp8")
    }
    layers["fp8"].apply(blocktensor.to_blockwise_fp8_weights)
    x = torch.randn(256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(80):
        for name, layer in layers.items():
            x.grad = layer.weight.grad = None
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            layer(x).backward(grad)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(median(found[20:]), 1) for name, found in times.items()}


def hint(host: dict[str, float], tokens: int) -> str:
    """Say from which number of tokens on FP8 is faster in eager mode on this host."""
    return (
        f"host time of a linear layer, forward + backward: {host['fp8']:.0f} us in FP8, "
        f"{host['bf16']:.0f} in bf16\n"
        f"in eager mode layers of 4096 x 4096 gain from {tokens:,} tokens on; use CUDA graphs for "
        f"smaller ones"
    )


def checked(device: torch.device) -> dict[str, Any]:
    """Run the self-check; return whether it passes, with its errors or the exception it raised."""
    try:
        errors = self_check(device)
    except Exception as error:  # an error of any library: show it and go on
        traceback.print_exc()
        return {"holds": False, "error": type(error).__name__}
    return {"holds": _holds(errors), "errors": errors}


def _said(found: dict[str, Any]) -> str:
    return ("ok" if found["holds"] else "FAILED") + f", {_listed(found['errors'])}"


def self_check(device: torch.device) -> dict[str, tuple[float, float]]:
    """Run a small FP8 linear layer forward and backward, with sizes that are not whole blocks.

    Returns:
        For fprop, dgrad and wgrad the relative error against the reference on the CPU, and against
        matmuls in fp32. Both errors are the norm of the difference over the norm of the expected
        values.
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
    x_col = reference.quantize_columnwise(x, DEFAULT_RECIPE.wgrad_input_format or rows)
    cast, gemm = reference.quantize_rowwise, reference.gemm
    y = gemm(cast(x, rows), cast(w, squares), None, x.dtype)
    dx = gemm(cast(grad, rows), cast(w.t().contiguous(), squares), None, x.dtype)
    dw = gemm(cast(grad.t().contiguous(), rows), x_col, None, w.dtype)
    return y, dx, dw


def _error(found: Tensor, wanted: Tensor) -> float:
    difference = found.cpu().double() - wanted.double()
    return float(difference.norm() / wanted.double().norm())


def _holds(errors: dict[str, tuple[float, float]]) -> bool:
    """Return True if all errors are within their bounds; NaN counts as outside."""
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
