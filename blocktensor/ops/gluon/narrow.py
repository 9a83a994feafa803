"""Products of 96 columns, which Gluon 3.6 cannot say: its tensors are powers of two wide.

The kernel is written with products of 128 columns whose last quarter nobody uses; between Triton
and ptxas the quarter is dropped from the instruction. Without this pass the kernel is right but
takes 1.8 times as long, so tiles of this width are for the Triton versions whose compiler is known.

Only kernels that carry the mark are touched: what the compiler cache holds of others stays theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import triton

MARK = "// blocktensor: products of 96 columns"
KNOWN = triton.__version__.startswith("3.6.")
"""Whether this is a Triton whose compiler stages are known."""

_PRODUCT_128 = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3 \{([^}]*)\}"
)

Stage = Callable[[Any, Any], Any]


def narrow_products(ptx: str) -> str:
    """``ptx`` with its products of 128 columns made products of 96, if it carries the mark.

    Raises:
        RuntimeError: a marked kernel has no such products, or others too.
    """
    if MARK not in ptx:
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


def install() -> None:
    """Add the pass to Triton's compiler, behind whatever hook is there; again does nothing."""
    before = triton.knobs.runtime.add_stages_inspection_hook
    if not KNOWN or getattr(before, "narrows_products", False):
        return

    def hook(
        backend: Any, stages: dict[str, Stage], options: Any, language: Any, capability: Any
    ) -> None:
        if before is not None:
            before(backend, stages, options, language, capability)
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda source, metadata: narrow_products(make_ptx(source, metadata))

    hook.narrows_products = True  # type: ignore[attr-defined]
    triton.knobs.runtime.add_stages_inspection_hook = hook
