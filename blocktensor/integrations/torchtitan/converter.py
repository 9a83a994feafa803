"""The converter: what a run in blockwise FP8 chooses, in the form of torchtitan's converters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.decoder import Decoder

from ...ops.formats import ScaleRounding
from ...recipe import CachePolicy, ColumnwisePolicy, Recipe, WgradInput
from .fp8_model import build_in_fp8
from .model_options import ModelOptions

AUTO_FILTER = "auto_filter_small_kn"
"""In ``filter_fqns`` of torchtitan's own converters this is no name but switches the filter on."""


class BlockwiseFP8Converter(QuantizationConverter):
    """Makes a model train its linears and experts in blockwise FP8 (``blocktensor.convert``).

    torchtitan's ``model_registry(..., converters=[BlockwiseFP8Converter.Config(...)])`` takes it.
    The model converts itself as it is built, on the meta device, so that the choice sees the whole
    model: its head, tied weights and sizes. Parameters keep their names, and their values are
    drawn, sharded, optimized and saved as those of a model in high precision.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What is converted, and how it is cast."""

        filter_fqns: list[str] = field(default_factory=list)
        """
        Parts of names of modules: a linear, or a stack of experts, whose name contains one of them
        stays in high precision. "auto_filter_small_kn" is no name: it sets that option.
        """

        auto_filter_small_kn: bool = True
        """Leave weights alone that are too small to be faster in FP8."""

        experts: bool = True
        """Convert the stacks of GroupedExperts."""

        head: Literal["fp8"] | None = None
        """"fp8" converts lm_head too, unless it is tied to the embedding."""

        fuse: bool = False
        """Run gated MLPs with casts made where values are computed (``blocktensor.fuse``)."""

        scale: ScaleRounding = "fp32"
        """Rounding of scales; see blocktensor.Recipe."""

        columnwise: ColumnwisePolicy = "on_demand"
        """Whether FP8 weights keep their transpose; see blocktensor.Recipe."""

        cache_weight: CachePolicy = "backward"
        """How long the FP8 form of a weight is kept; see blocktensor.Recipe."""

        wgrad_input: WgradInput = "1x128"
        """The form of the input that weight gradients read; see blocktensor.Recipe."""

    def __init__(self, config: Config) -> None:
        """Check the choices.

        Raises:
            TypeError: ``filter_fqns`` is not a list of str.
            ValueError: a choice outside those of blocktensor.Recipe; ``head`` is not "fp8" or None;
                an empty name, which would match everything.
        """
        self.config = config
        names = _checked_names(config.filter_fqns)
        self._options = ModelOptions(
            recipe=Recipe(
                scale=config.scale,
                columnwise=config.columnwise,
                cache_weight=config.cache_weight,
                wgrad_input=config.wgrad_input,
            ),
            filter_fqns=tuple(name for name in names if name != AUTO_FILTER),
            auto_filter_small_kn=config.auto_filter_small_kn or AUTO_FILTER in names,
            experts=config.experts,
            head=config.head,
            fuse=config.fuse,
        )

    def convert(self, model_config: Any) -> Any:
        """Make ``model_config``, in place, build a model that trains in FP8; returns it.

        Raises:
            TypeError: it is not the config of a decoder (a language model).
            ValueError: it was converted already.
        """
        if not isinstance(model_config, Decoder.Config):
            raise TypeError(
                f"cannot convert a {type(model_config).__qualname__}: expected the config of a "
                f"torchtitan Decoder (llama3, qwen3, deepseek_v3, ...)"
            )
        return build_in_fp8(model_config, self._options)


def _checked_names(filter_fqns: Any) -> Sequence[str]:
    is_list = isinstance(filter_fqns, (list, tuple))
    if not is_list or not all(isinstance(name, str) for name in filter_fqns):
        raise TypeError(
            f"filter_fqns={filter_fqns!r}: expected a list of parts of module names, e.g. "
            f"['attention.wo']"
        )
    if "" in filter_fqns:
        raise ValueError(
            "filter_fqns holds an empty name, which every module contains: remove it; without the "
            "converter the whole model stays in high precision"
        )
    names: Sequence[str] = filter_fqns
    return names
