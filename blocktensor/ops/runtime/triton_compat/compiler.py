"""Change kernels between Triton and its assembler, and recognize failed compilations.

- **ptxas after 12.8.** Triton 3.6 and 3.7 assemble for sm_90 with ptxas 12.8, which lets the warp
  yield at every multiply-add; the newer one in the same folder does not. Where promotion is one
  multiply-add an element (128x128 blocks) it is 3-8% faster; where it is two operations (1x128),
  12.8 is faster. Triton 3.8 and later have no ptxas 12.8, and one for both.
- **Registers.** Triton after 3.6 limits how ptxas allocates them, because of a fault that it does
  not describe. ptxas 13.4 then spills four times as much in casts of several tensors, and SwiGLU's
  backward takes 1.22 times as long. ``default_allocation`` restores what ptxas does by itself, for
  casts alone, which are compared with the reference byte for byte; GEMMs are no faster with it.

A kernel requests the first change by a comment in its assembly. The pass is installed while such a
kernel is compiled or launched, and no longer: kernels of others, and their entries in the compiler
cache, do not change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.errors import TritonError

from ....patches import PTXAS

NEWER_PTXAS = "// blocktensor: ptxas after 12.8"
SLOW_PTXAS = "12.8"

Stage = Callable[[Any, Any], Any]


def with_newer_ptxas(assemble: Stage) -> Stage:
    """Wrap ``assemble``: where Triton takes ptxas 12.8, use the newer one for marked kernels."""

    def run(ptx: Any, metadata: Any) -> Any:
        tools = triton.knobs.nvidia
        if NEWER_PTXAS not in ptx or _ptxas_of_sm90().version != SLOW_PTXAS:
            return assemble(ptx, metadata)
        try:
            newer = tools.ptxas_blackwell.path
        except RuntimeError:  # this Triton was built without the newer ptxas
            return assemble(ptx, metadata)
        with tools.scope():
            tools.ptxas = newer
            return assemble(ptx, metadata)

    return run


def _ptxas_of_sm90() -> Any:
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(90)


@functools.cache
def default_allocation() -> dict[str, str]:
    """Return options of a launch with which ptxas allocates registers as by default."""
    from triton.backends.nvidia.compiler import CUDABackend

    if "--regAllocOptLevel" not in inspect.getsource(CUDABackend.make_cubin):
        return {}
    return {"ptx_options": "--regAllocOptLevel=4"}  # the last such option counts


@contextmanager
def hopper_gemm() -> Iterator[None]:
    """Add the pass to Triton's compiler, after any hook already set, until the ``with`` ends."""
    with PTXAS.during():
        yield


@PTXAS.made_by
def _hook_after(before: Callable[..., Any] | None) -> Callable[..., Any]:
    def hook(*args: Any) -> tuple[str, str] | None:
        if not args:  # Triton 3.7 and later: a part of the compiler's cache key, and its hash
            return ("", "") if before is None else before()
        if before is not None:
            before(*args)
        stages = args[1]
        stages["cubin"] = with_newer_ptxas(stages["cubin"])
        return None

    return hook


def is_failed_compilation(error: Exception) -> bool:
    """Return True if Triton cannot compile a kernel or the GPU cannot hold it."""
    if isinstance(error, TritonError):
        return True
    return isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)
