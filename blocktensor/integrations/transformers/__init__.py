"""FP8 in transformers: ``from_pretrained(path, quantization_config=BlockwiseFP8Config())``.

The import registers the quantization method "blocktensor" in transformers.
"""

from .config import BlockwiseFP8Config
from .quantizer import BlockwiseFP8Quantizer, save_pretrained_fp8

__all__ = ["BlockwiseFP8Config", "BlockwiseFP8Quantizer", "save_pretrained_fp8"]
