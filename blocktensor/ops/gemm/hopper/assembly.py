"""Changes to the compiled Hopper GEMM, between Triton and ptxas, that Gluon 3.6 cannot express.

- **Products of 96 columns.** Gluon's tensors are powers of two wide, so the kernel has products of
  128 columns whose last quarter is unused; this pass drops the quarter from the instruction.
  Without it the kernel is correct but takes 1.8 times as long.
- **ptxas 12.9.** Triton 3.6 assembles for sm_90 with ptxas 12.8, which lets the warp yield at every
  multiply-add; 12.9, in the same folder, does not. Where promotion is one multiply-add an element
  (128x128 blocks) 12.9 is 3-8% faster; where it is two operations (1x128), 12.8 is faster.

A kernel requests a change by a comment in its assembly; other kernels and their entries in the
compiler cache do not change. With an unknown Triton no kernel is changed.
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
"""True for a Triton whose compiler stages are known."""

_PRODUCT_128 = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3 \{([^}]*)\}"
)

Stage = Callable[[Any, Any], Any]


def narrow_products(ptx: str) -> str:
    """``ptx`` with its products of 128 columns narrowed to 96, if it has the marker ``NARROW``.

    Raises:
        RuntimeError: it has the marker, but no such products, or others too.
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
    """``assemble``, with ptxas 12.9 (if installed) for kernels that have the marker for it."""

    def run(ptx: Any, metadata: Any) -> Any:
        newer = Path(triton.knobs.nvidia.ptxas.path).with_name("ptxas-blackwell")
        if NEWER_PTXAS not in ptx or not newer.exists():
            return assemble(ptx, metadata)
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.ptxas = str(newer)
            return assemble(ptx, metadata)

    return run


def install() -> None:
    """Add both passes to Triton's compiler, after any hook already set; a repetition is a no-op."""
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
