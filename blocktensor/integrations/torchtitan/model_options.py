"""What a model that converts itself does, and how it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.tools.logging import logger

from ...model.conversion_report import ConversionReport
from ...model.convert import convert
from ...model.fuse import fuse
from ...recipe import Recipe


@dataclass(frozen=True)
class ModelOptions:
    """The choices of ``BlockwiseFP8Converter.Config``, checked.

    Raises:
        ValueError: ``head`` is neither "fp8" nor None.
    """

    recipe: Recipe
    filter_fqns: tuple[str, ...] = ()
    auto_filter_small_kn: bool = True
    experts: bool = True
    head: Literal["fp8"] | None = None
    fuse: bool = False

    def __post_init__(self) -> None:
        if self.head not in (None, "fp8"):
            raise ValueError(f"head={self.head!r}: expected 'fp8', or None to leave lm_head alone")


def convert_model(model: nn.Module, options: ModelOptions) -> ConversionReport:
    """Convert the weights of a model that was just built, and log what was done.

    Routers stay in high precision, as torchtitan computes them in fp32.

    Raises:
        ValueError: a name in ``filter_fqns`` that is in no name of a linear or stack of experts.
    """
    left = (TokenChoiceTopKRouter,) if options.experts else (TokenChoiceTopKRouter, GroupedExperts)
    names = [name for name, module in model.named_modules() if isinstance(module, left)]
    try:
        report = convert(
            model,
            options.recipe,
            skip=[*names, *(f"*{part}*" for part in options.filter_fqns)],
            auto_filter_small_kn=options.auto_filter_small_kn,
            head=options.head,
        )
    except ValueError as error:
        raise ValueError(f"filter_fqns={list(options.filter_fqns)}: {error}") from error
    logger.info("blockwise FP8: what was converted\n%s", report)
    if options.fuse:
        logger.info("blockwise FP8: what was fused\n%s", fuse(model))
    return report
