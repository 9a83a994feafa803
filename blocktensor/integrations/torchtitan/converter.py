"""Convert a model of torchtitan while it is built.

torchtitan hands a converter the config of a model, and the model is built from it later. The
converter turns this config into the config of a subclass of the model's class. The subclass
converts itself while it is built, and refuses parallelism that FP8 lacks. The config stays the same
object, because the trainer already has a reference to it when overrides run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.tools.logging import logger

from ...autograd.saved_tensors import saved_tensors_in_fp8
from ...conversion.convert import convert
from ...fusion.fuse import fuse
from ...fusion.fused_class import fused_modules
from ...fusion.mlp import MLP
from ...ops import checks
from ...ops.formats import ScaleRounding, WeightGrid
from ...patches import SET_TIMEOUT, TORCHTITAN_CONFIG
from ...recipe import Backward, CachePolicy, Recipe, Scales, WgradInput
from .dispatch import dispatch_in_fp8
from .parallel import cut_linears

AUTO_FILTER = "auto_filter_small_kn"
"""In ``filter_fqns`` of torchtitan's converters this entry is a switch, not a name."""


class BlockwiseFP8Converter(QuantizationConverter):
    """Make a model train its linear layers and experts in FP8 (``blocktensor.convert``).

    torchtitan's ``model_registry(..., converters=[BlockwiseFP8Converter.Config(...)])`` takes it.
    The model converts itself while it is built, on the meta device, so that the choice sees the
    whole model: its head, tied weights and sizes. Parameters keep their names, and their values are
    drawn, sharded, optimized and saved as in high precision.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The choices: which weights are converted, and how they are cast."""

        filter_fqns: list[str] = field(default_factory=list)
        """
        Parts of names of modules: a linear layer, or a stack of experts, whose name contains one of
        them stays in high precision. "auto_filter_small_kn", which torchtitan's own converters take
        there, is no name: it sets ``skip_small``.
        """

        skip_small: bool = True
        """Leave weights alone that are too small to be faster in FP8."""

        experts: bool = True
        """Convert the stacks of GroupedExperts."""

        convert_head: bool = False
        """Convert lm_head too, unless it is tied to the embedding."""

        fuse: bool = False
        """Run gated MLPs with casts made where values are computed (``blocktensor.fuse``)."""

        dispatch_in_fp8: bool = False
        """
        Expert parallel: send tokens to their experts in FP8 (``all_to_all_fp8``). ``scale`` must
        have activations in powers of two.
        """

        saved_tensors_in_fp8: bool = False
        """Save activations for backward in FP8 (``blocktensor.saved_tensors_in_fp8``)."""

        scale: ScaleRounding | Scales = "fp32"
        """Rounding of scales; see blocktensor.Recipe."""

        cache_weight: CachePolicy = "backward"
        """Time for which the FP8 form of a weight is kept; see blocktensor.Recipe."""

        wgrad_input: WgradInput = "128x128"
        """The form of the input that weight gradients read; see blocktensor.Recipe."""

        batch_invariant: bool = False
        """Compute each row with the same bits for any other rows; see blocktensor.Recipe."""

        backward: Backward = "fp8"
        """The numbers of gradients; see blocktensor.Recipe."""

        weight_grid: WeightGrid | None = None
        """The grid to which casts round weights first; see blocktensor.Recipe."""

    def __init__(self, config: Config) -> None:
        """Check the choices.

        Raises:
            TypeError: ``filter_fqns`` is not a list of str; ``convert_head`` is no bool.
            ValueError: a choice that blocktensor.Recipe does not have; an empty name, which would
                match everything; ``dispatch_in_fp8`` with scales that are no powers of two.
        """
        self.config = config
        _check_names(config.filter_fqns)
        checks.flag(config.convert_head, "convert_head")
        self._recipe = Recipe(
            scale=config.scale,
            cache_weight=config.cache_weight,
            wgrad_input=config.wgrad_input,
            batch_invariant=config.batch_invariant,
            backward=config.backward,
            weight_grid=config.weight_grid,
        )
        if config.dispatch_in_fp8 and not self._recipe.activation_format.power_of_two:
            raise ValueError(
                f"dispatch_in_fp8=True with scale={config.scale!r}: experts would round the tokens "
                f"a second time for the gradients of their weights; set "
                f"scale=Scales(activations='power_of_two') or scale='power_of_two'"
            )

    def convert(self, model_config: Any) -> Any:
        """Make ``model_config`` build a model that trains in FP8; change it in place and return it.

        Raises:
            TypeError: it is not the config of a decoder (a language model).
            ValueError: it was converted already.
        """
        if not isinstance(model_config, Decoder.Config):
            raise TypeError(
                f"cannot convert a {type(model_config).__qualname__}: expected the config of a "
                f"torchtitan Decoder (llama3, qwen3, deepseek_v3, ...)"
            )
        model_class: Any = type(model_config)._owner
        if hasattr(model_class, _CONVERTER):
            raise ValueError(
                f"the model {model_class.__name__} is in blockwise FP8 already: keep one of the "
                f"converter and the override"
            )
        if not hasattr(torch.distributed, "set_timeout"):
            SET_TIMEOUT.apply()
        TORCHTITAN_CONFIG.give_class(model_config, self)
        return model_config

    def convert_built(self, model: nn.Module) -> None:
        """Convert the weights of a model that was just built, and log what was done.

        Routers stay in high precision, as torchtitan computes them in fp32.

        Raises:
            ValueError: a name in ``filter_fqns`` that no linear layer or stack of experts has.
        """
        config = self.config
        kinds = (TokenChoiceTopKRouter,) + (() if config.experts else (GroupedExperts,))
        left = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        parts = [part for part in config.filter_fqns if part != AUTO_FILTER]
        try:
            report = convert(
                model,
                self._recipe,
                skip=[*left, *(f"*{part}*" for part in parts)],
                skip_small=config.skip_small or AUTO_FILTER in config.filter_fqns,
                convert_head=config.convert_head,
            )
        except ValueError as error:
            raise ValueError(f"filter_fqns={parts}: {error}") from error
        logger.info("blockwise FP8: what was converted\n%s", report)
        if config.fuse:
            logger.info("blockwise FP8: what was fused\n%s", fuse(model))
        if config.dispatch_in_fp8:
            names = dispatch_in_fp8(model)
            logger.info("blockwise FP8: tokens are sent in FP8 to %s", ", ".join(names) or "no one")
        if config.saved_tensors_in_fp8:
            saved_tensors_in_fp8().register(model)


_CONVERTER = "_blockwise_fp8_converter"
"""The attribute of a model class by which it is known to be in FP8."""


def _check_names(filter_fqns: Any) -> None:
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


@SET_TIMEOUT.made_by
def _set_timeout(_: None) -> Any:
    return torch.distributed.distributed_c10d._set_pg_timeout


@TORCHTITAN_CONFIG.made_by
def _config_in_fp8(config_class: Any, converter: BlockwiseFP8Converter) -> Any:
    return _in_fp8(config_class._owner, converter).Config


def _in_fp8(model_class: Any, converter: BlockwiseFP8Converter) -> Any:
    """Return a subclass of a torchtitan model class, of the same name.

    Its Config adds no fields, so that a config of the model can change its class to it.
    """

    class InFP8(model_class):
        @dataclass(kw_only=True, slots=True)
        class Config(model_class.Config):
            def to_dict(self) -> dict[str, Any]:
                """Return the fields, and the choices for FP8."""
                return {
                    **model_class.Config.to_dict(self),
                    "blockwise_fp8": converter.config.to_dict(),
                }

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            converter.convert_built(self)

        def parallelize(self, parallel_dims: Any) -> None:
            """Cut the model for tensor and expert parallelism.

            Raises:
                NotImplementedError: weights in FP8 cannot be cut so; fused MLPs would come apart.
            """
            _check_parallelism(parallel_dims)
            if parallel_dims.tp_enabled:
                cut_linears(self, parallel_dims.get_mesh("tp"))
            super().parallelize(parallel_dims)
            _check_fused(self)

    setattr(InFP8, _CONVERTER, converter)
    InFP8.__name__ = model_class.__name__
    InFP8.__qualname__ = model_class.__qualname__
    InFP8.__doc__ = model_class.__doc__
    InFP8.Config.__qualname__ = model_class.Config.__qualname__
    return InFP8


def _check_parallelism(parallel_dims: Any) -> None:
    if parallel_dims.spmd_backend != "partial_dtensor" and parallel_dims.world_size > 1:
        raise NotImplementedError(
            f"spmd_backend={parallel_dims.spmd_backend!r} on {parallel_dims.world_size} ranks cuts "
            f"weights before FSDP does, which blockwise FP8 does not follow: set "
            f"--parallelism.spmd_backend partial_dtensor"
        )


def _check_fused(model: nn.Module) -> None:
    """Raise if ``parallelize`` has replaced the forward of a linear layer of a fused MLP."""
    for name, module in fused_modules(model, MLP):
        why = module._fused_pattern.why_apart(module)
        if why is not None:
            raise NotImplementedError(
                f"fuse=True: torchtitan's parallelize takes {name!r} apart ({why}); set "
                f"--parallelism.spmd_backend partial_dtensor and no tensor or expert parallelism, "
                f"or fuse=False"
            )
