"""FP8 checkpoints as the world writes them: safetensors, e4m3 bytes beside 128x128 scales."""

from .layout import CheckpointError
from .load import LoadReport, load_fp8
from .save import save_fp8

__all__ = ["CheckpointError", "LoadReport", "load_fp8", "save_fp8"]
