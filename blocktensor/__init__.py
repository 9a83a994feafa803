"""Blockwise FP8 training for plain PyTorch models: pip install, one line, no compiled extension.

Public: the names in ``__all__``, and ``blocktensor.functional``, ``blocktensor.distributed`` and
``blocktensor.reports``.
"""

from . import distributed, functional, reports
from . import registration as _registration  # noqa: F401  (fills the tables of ops)
from .autograd.quantize import quantize
from .autograd.saved_tensors import saved_tensors_in_fp8
from .checkpoint import CheckpointError, iter_fp8, iter_mxfp4, load_fp8, save_fp8, save_mxfp4
from .conversion.convert import convert, to_blockwise_fp8_weights
from .conversion.freeze import freeze, unfreeze
from .conversion.report import MinSizes
from .fusion.fuse import fuse, unfuse
from .fusion.share_inputs import share_inputs, unshare_inputs
from .recipe import Recipe, Scales
from .reports.audit import audit, audit_step
from .reports.explain import explain
from .reports.monitor import monitor
from .reports.plan.plan import plan
from .tensor.fp8_tensor import BlockwiseFP8Tensor
from .tensor.weight import BlockwiseFP8Weight

__version__ = "0.1.0"

__all__ = [
    "BlockwiseFP8Tensor", "BlockwiseFP8Weight", "CheckpointError", "MinSizes", "Recipe", "Scales",
    "audit", "audit_step", "convert", "distributed", "explain", "freeze", "functional", "fuse",
    "iter_fp8", "iter_mxfp4", "load_fp8", "monitor", "plan", "quantize", "reports", "save_fp8",
    "save_mxfp4", "saved_tensors_in_fp8", "share_inputs", "to_blockwise_fp8_weights", "unfreeze",
    "unfuse", "unshare_inputs",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
