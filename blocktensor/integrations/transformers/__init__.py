"""FP8 in transformers: ``from_pretrained(path, quantization_config=BlockwiseFP8Config())``.

The import registers the quantization method "blocktensor" in transformers.
"""

from .config import BlockwiseFP8Config
from .loading import announce_loading as _announce_loading
from .loading import prefer_given_config as _prefer_given_config
from .quantizer import BlockwiseFP8Quantizer, save_pretrained_fp8

_prefer_given_config()
_announce_loading()

__all__ = ["BlockwiseFP8Config", "BlockwiseFP8Quantizer", "save_pretrained_fp8"]
