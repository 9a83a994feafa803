"""The numeric choices of a model or layer, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .ops.formats import ACTIVATION_FORMATS, WEIGHT_FORMATS, BlockFormat, ScaleRounding

ColumnwisePolicy = Literal["on_demand", "keep"]


@dataclass(frozen=True)
class Recipe:
    """How tensors are cast to FP8 and how long their FP8 forms are kept.

    Args:
        scale: ``"fp32"``: scale = amax / 448. ``"power_of_two"``: that, rounded up to a power of
            two (DeepSeek's UE8M0; scales then multiply exactly).
        columnwise: whether a 128x128 tensor keeps its columnwise form, which a data gradient needs:
            ``"on_demand"`` transposes the bytes each time and releases them (1 byte a parameter),
            ``"keep"`` keeps them with the tensor (2 bytes). The bits are the same.
        cache_weight: keep the FP8 form of a trainable weight for all uses of one weight version
            (one cast per optimizer step). ``False`` casts at every use and keeps nothing.

    Raises:
        ValueError: for a value outside the choices above.
    """

    scale: ScaleRounding = "fp32"
    columnwise: ColumnwisePolicy = "on_demand"
    cache_weight: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("scale", ScaleRounding), ("columnwise", ColumnwisePolicy)):
            value = getattr(self, name)
            if value not in get_args(choices):
                allowed = ", ".join(repr(c) for c in get_args(choices))
                raise ValueError(f"Recipe({name}={value!r}): expected one of {allowed}")
        if not isinstance(self.cache_weight, bool):
            raise ValueError(f"Recipe(cache_weight={self.cache_weight!r}): expected True or False")

    # Properties, not cached ones, whose lock compilers cannot trace.

    @property
    def activation_format(self) -> BlockFormat:
        """The format of activations and gradients."""
        return ACTIVATION_FORMATS[self.scale]

    @property
    def weight_format(self) -> BlockFormat:
        """The format of weights."""
        return WEIGHT_FORMATS[self.scale]

    @property
    def power_of_two(self) -> bool:
        """True where scales are rounded up to powers of two."""
        return self.scale == "power_of_two"


DEFAULT_RECIPE = Recipe()
