"""Blockwise FP8 training in torchtitan 0.3, without a change to its files.

The guide is docs/guides/torchtitan.md. Public: the names below, and ``overrides`` for
``--override.imports``.
"""

from .converter import BlockwiseFP8Converter
from .overrides import BlockwiseFP8SelectiveAC, with_blockwise_fp8

__all__ = ["BlockwiseFP8Converter", "BlockwiseFP8SelectiveAC", "with_blockwise_fp8"]
