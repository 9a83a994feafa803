"""What Gluon 3.6 cannot say of our GEMMs, changed between Triton and ptxas.

- **Products of 96 columns.** Gluon's tensors are powers of two wide, so these are written as
  products of 128 columns whose last quarter nobody uses; here the quarter is dropped from the
  instruction. Without this pass the kernel is right but takes 1.8 times as long.
- **Another ptxas.** Triton 3.6 assembles for sm_90 with ptxas 12.8, which lets the warp yield at
  every multiply-add; the 12.9 that lies beside it does not. Where promotion is one multiply-add an
  element (128x128 blocks) 12.9 is 3-8% faster, where it is two operations (1x128) 12.8 is.

Kernels ask by a comment in their assembly, and no others are touched: what the compiler cache holds
of them stays theirs. With a Triton that is not known, nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

NARROW = "// blocktensor: products of 96 columns"
NEWER_PTXAS = "// blocktensor: ptxas 12.9"
KNOWN = triton.__version__.startswith("3.6.")
"""Whether this is a Triton whose compiler stages are known."""

_PRODUCT_128 = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3 \{([^}]*)\}"
)

Stage = Callable[[Any, Any], Any]


def narrow_products(ptx: str) -> str:
    """``ptx`` with its products of 128 columns made products of 96, if it asks for it.

    Raises:
        RuntimeError: it asks, but has no such products, or others too.
    """
    if NARROW not in ptx:
        return ptx

    def narrow(match: re.Match[str]) -> str:
        registers = match[1].split(",")
        used = ",".join(registers[: len(registers) * 3 // 4])
        return f"wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {{{used}}}"

    narrowed, count = _PRODUCT_128.subn(narrow, ptx)
    found = ptx.count("wgmma.mma_async.")
    if count == 0 or count != found:
        raise RuntimeError(
            f"a GEMM of 96 columns has {found} products, {count} of them of 128 columns: expected "
            f"all of them; this Triton ({triton.__version__}) writes them differently"
        )
    return narrowed


def with_newer_ptxas(assemble: Stage) -> Stage:
    """``assemble``, but with ptxas 12.9 for kernels that ask for it, where there is one."""

    def run(ptx: Any, metadata: Any) -> Any:
        newer = Path(triton.knobs.nvidia.ptxas.path).with_name("ptxas-blackwell")
        if NEWER_PTXAS not in ptx or not newer.exists():
            return assemble(ptx, metadata)
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.ptxas = str(newer)
            return assemble(ptx, metadata)

    return run


def install() -> None:
    """Add both to Triton's compiler, behind whatever hook is there; again does nothing."""
    before = triton.knobs.runtime.add_stages_inspection_hook
    if not KNOWN or getattr(before, "is_blocktensors", False):
        return

    def hook(
        backend: Any, stages: dict[str, Stage], options: Any, language: Any, capability: Any
    ) -> None:
        if before is not None:
            before(backend, stages, options, language, capability)
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda source, metadata: narrow_products(make_ptx(source, metadata))
        stages["cubin"] = with_newer_ptxas(stages["cubin"])

    hook.is_blocktensors = True  # type: ignore[attr-defined]
    triton.knobs.runtime.add_stages_inspection_hook = hook
