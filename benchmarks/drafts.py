"""The research drafts that our GEMMs grew from, as columns beside them: developers only.

``BLOCKTENSOR_DRAFTS`` names the folder that holds them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from blocktensor.ops.formats import Quantized

from .timing import Call

VARIABLE = "BLOCKTENSOR_DRAFTS"
VARIANTS = {
    "fprop": ("defer", "ring"),
    "wgrad": ("hold256r", "dbl96a", "half256ak"),
    "wgrad_add": ("hold256r", "dbl96a", "half256ak"),
}


def variants(kind: str) -> tuple[str, ...]:
    """The drafts to measure for this kind of GEMM; none unless the variable is set."""
    return VARIANTS.get(kind, ()) if os.environ.get(VARIABLE) else ()


@contextmanager
def _drafts_knobs(module: Any) -> Iterator[None]:
    """The drafts choose another ptxas and patch the compiler: our kernels must not see that."""
    import triton

    with triton.knobs.nvidia.scope(), triton.knobs.runtime.scope():
        path = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
        triton.knobs.nvidia.ptxas = str(path)
        triton.knobs.runtime.add_stages_inspection_hook = getattr(module, "_hook", None)
        yield


def _load(name: str) -> Any:
    folder = os.environ[VARIABLE]
    if folder not in sys.path:
        sys.path.append(folder)
    with _drafts_knobs(None):
        return importlib.import_module(name)


def prepare(kind: str, variant: str, a: Quantized, b: Quantized, out: Tensor) -> Call:
    """A call of the draft that launches on the stream current now, whichever is current then."""
    module = _load("gluon_fprop_draft" if kind == "fprop" else "gluon_wgrad_draft")
    options = () if kind == "fprop" else (kind == "wgrad_add",)
    with _drafts_knobs(module):
        launch: Call = module.prepared(variant, *a[:2], *b[:2], out, *options)[0]
    return launch
