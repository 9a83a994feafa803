"""Internal: FP8 checkpoints, safetensors with e4m3 bytes and the scales of 128x128 blocks."""

from .export import iter_fp8
from .load import LoadReport, load_fp8
from .mxfp4_export import iter_mxfp4
from .mxfp4_save import save_mxfp4
from .on_disk import CheckpointError
from .save import save_fp8

__all__ = [
    "CheckpointError",
    "LoadReport",
    "iter_fp8",
    "iter_mxfp4",
    "load_fp8",
    "save_fp8",
    "save_mxfp4",
]
