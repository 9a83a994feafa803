"""FP8 in transformers: ``from_pretrained(path, quantization_config=BlockwiseFP8Config())``.

The import registers the quantization method "blocktensor" in transformers, and the implementation
"all_to_all_fp8" of expert parallelism if transformers has some to choose from (5.23).
"""

import importlib.util

from .config import BlockwiseFP8Config
from .quantizer import BlockwiseFP8Quantizer, save_pretrained_fp8

__all__ = ["BlockwiseFP8Config", "BlockwiseFP8Quantizer", "save_pretrained_fp8"]

if importlib.util.find_spec("transformers.distributed.expert_parallel") is not None:
    from . import expert_parallel  # noqa: F401  (registers it)
