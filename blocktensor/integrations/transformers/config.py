"""The choices of a conversion as transformers carries them, in memory and in ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...conversion.report import MinSizes
from ...recipe import DEFAULT_RECIPE, Recipe

METHOD = "blocktensor"
"""``quant_method`` in a ``config.json``."""


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
        mark: ``save_pretrained`` writes this config into ``config.json``, so that
            ``from_pretrained`` converts again by itself where this module is imported. transformers
            without it warns and loads the ordinary weights; other libraries may refuse a method
            that they do not know. False: nothing in the checkpoint tells of FP8, and the config is
            ``model.hf_quantizer.quantization_config``, not ``model.config.quantization_config``.

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
    mark: bool = False
    quant_method: str = field(default=METHOD, init=False)  # type: ignore[assignment,unused-ignore]

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"recipe={self.recipe!r} is a {type(self.recipe).__name__}: expected a "
                f"blocktensor.Recipe, e.g. Recipe(scale='power_of_two')"
            )
        if isinstance(self.skip, str) or not all(isinstance(x, str) for x in self.skip):
            raise TypeError(f"skip={self.skip!r}: expected a list of patterns of module names")
        self.skip = list(self.skip)
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
        for name in ("frozen", "fuse", "mark", "convert_head"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected True or False")

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Make the config of a ``config.json``; ``kwargs`` replace its entries.

        Raises:
            ValueError: an entry that this version does not know.
        """
        known = {x.name for x in fields(cls) if x.init}
        entries = {key: value for key, value in config_dict.items() if key != "quant_method"}
        _check_known(entries, known, "quantization_config")
        for key, kind in (("recipe", Recipe), ("skip_small", MinSizes)):
            if isinstance(entries.get(key), Mapping):
                entries[key] = _made(kind, entries[key], key)
        entries |= {key: kwargs.pop(key) for key in sorted(known & kwargs.keys())}
        config = cls(**entries)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return all entries, of the types of JSON, with ``quant_method``."""
        return asdict(self)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield the items of ``dict(config)``."""
        yield from self.to_dict().items()


def _made(kind: Any, entries: Mapping[str, Any], name: str) -> Any:
    _check_known(entries, {x.name for x in fields(kind)}, f"{name} of quantization_config")
    try:
        return kind(**entries)
    except TypeError as error:
        raise ValueError(f"quantization_config: {name}={dict(entries)!r}: {error}") from None


def _check_known(entries: Mapping[str, Any], known: Set[str], what: str) -> None:
    unknown = sorted(entries.keys() - known)
    if unknown:
        raise ValueError(
            f"{what} has the unknown entries {unknown}: expected some of {sorted(known)}; they may "
            f"be those of a later version of blocktensor"
        )
