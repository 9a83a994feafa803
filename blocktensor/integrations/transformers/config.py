"""The choices of a conversion, as ``from_pretrained`` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...conversion.report import MinSizes
from ...model.names import check_patterns
from ...ops import checks
from ...patches import FP8_LOADING, GIVEN_CONFIG
from ...recipe import DEFAULT_RECIPE, Recipe, Scales

METHOD = "blocktensor"
"""The name of the quantization method in transformers."""


@register_quantization_config(METHOD)
@dataclass(kw_only=True, repr=False)
class BlockwiseFP8Config(QuantizationConfigMixin):  # type: ignore[misc,unused-ignore]
    """Options of ``from_pretrained(path, quantization_config=...)`` for the weights it has loaded.

    Args:
        recipe: numeric choices.
        skip: shell-style patterns of module names that stay in high precision, as
            :func:`blocktensor.convert` takes them.
        skip_small: skip weights that are too small to be faster in FP8: True for the
            measured sizes, False for none, or a :class:`blocktensor.MinSizes`.
        experts: True converts the stacks of experts that transformers marks, False none; a mapping
            names others, as :func:`blocktensor.convert` takes it.
        convert_head: convert the head too, unless it is tied to an embedding.
        frozen: the whole model requires no gradient, and its FP8 weights take 1 byte each: for
            inference, and for adapters. False: it trains.
        fuse: call :func:`blocktensor.fuse` on the model.

    Raises:
        TypeError, ValueError: for a value that :func:`blocktensor.convert` would refuse for any
            model.
    """

    recipe: Recipe = DEFAULT_RECIPE
    skip: Sequence[str] = ()
    skip_small: bool | MinSizes = True
    experts: bool | Mapping[str, Sequence[str]] = True
    convert_head: bool = False
    frozen: bool = False
    fuse: bool = False
    quant_method: str = METHOD  # type: ignore[assignment,unused-ignore]

    def __new__(cls, *args: Any, **kwargs: Any) -> BlockwiseFP8Config:
        """Prepare transformers, also for copies and pickles of a config."""
        GIVEN_CONFIG.apply()
        FP8_LOADING.apply()
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"recipe={self.recipe!r} is a {type(self.recipe).__name__}: expected a "
                f"blocktensor.Recipe, e.g. Recipe(scale='power_of_two')"
            )
        self.skip = list(check_patterns(self.skip, "skip", "*.router"))
        if not isinstance(self.skip_small, (bool, MinSizes)):
            raise TypeError(
                f"skip_small={self.skip_small!r}: expected True, False or a blocktensor.MinSizes"
            )
        if isinstance(self.experts, Mapping):
            self.experts = {pattern: list(names) for pattern, names in self.experts.items()}
        elif not isinstance(self.experts, bool):
            raise TypeError(
                f"experts={self.experts!r}: expected True, False, or the names of stacks by "
                f"patterns of module names, e.g. {{'*.moe': ['w_up', 'w_down']}}"
            )
        for name in ("frozen", "fuse", "convert_head"):
            checks.flag(getattr(self, name), name)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the config whose :meth:`to_dict` returned ``config_dict``, from JSON too."""
        entries = dict(config_dict)
        if isinstance(recipe := entries.get("recipe"), Mapping):
            scale = recipe.get("scale")
            scales = {"scale": Scales(**scale)} if isinstance(scale, Mapping) else {}
            entries["recipe"] = Recipe(**{**recipe, **scales})
        if isinstance(sizes := entries.get("skip_small"), Mapping):
            entries["skip_small"] = MinSizes(**sizes)
        return super().from_dict(entries, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all entries, of the types of JSON, with ``quant_method``."""
        return asdict(self)
