"""FP8 in transformers: ``from_pretrained(path, quantization_config=BlockwiseFP8Config())``.

The import registers the quantization method "blocktensor" in transformers.
"""

from .config import BlockwiseFP8Config
from .quantizer import BlockwiseFP8Quantizer
from .saving import save_pretrained_fp8
from .transformers_internals import announce_loading as _announce_loading
from .transformers_internals import prefer_given_config as _prefer_given_config

_prefer_given_config()
_announce_loading()

__all__ = ["BlockwiseFP8Config", "BlockwiseFP8Quantizer", "save_pretrained_fp8"]
