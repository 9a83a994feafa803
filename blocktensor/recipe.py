"""Define ``Recipe``: the numeric choices of a model or layer, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .ops.formats import (
    ACTIVATION_FORMATS,
    GRID_FORMATS,
    ROUNDINGS,
    WEIGHT_FORMATS,
    BlockFormat,
    ScaleRounding,
    WeightGrid,
)

OperandName = Literal["activations", "gradients", "weights"]
CachePolicy = Literal["backward", False]
WgradInput = Literal["1x128", "128x128", "high_precision", "dequantized"]
Backward = Literal["fp8", "high_precision", "dequantized"]


@dataclass(frozen=True)
class Scales:
    """A rounding of scales for each operand, where ``Recipe(scale=...)`` shall have several.

    Matmuls take operands of any roundings, at the same speed.

    Args:
        activations: of inputs, in both of their forms.
        gradients: of gradients of outputs, in both of their forms.
        weights: of weights.

    Raises:
        ValueError: for a value that ``Recipe(scale=...)`` does not have.

    Examples:
        >>> recipe = blocktensor.Recipe(scale=blocktensor.Scales(activations="power_of_two"))
        >>> recipe.scale
        Scales(activations='power_of_two', gradients='fp32', weights='fp32')
        >>> blocktensor.Recipe(scale=blocktensor.Scales()).scale
        'fp32'
    """

    activations: ScaleRounding = "fp32"
    gradients: ScaleRounding = "fp32"
    weights: ScaleRounding = "fp32"

    def __post_init__(self) -> None:
        for operand in get_args(OperandName):
            value = getattr(self, operand)
            if not isinstance(value, str) or value not in ROUNDINGS:
                choices = ", ".join(map(repr, ROUNDINGS))
                raise ValueError(f"Scales({operand}={value!r}): expected one of {choices}")


@dataclass(frozen=True)
class Recipe:
    """The numeric choices of FP8 casts, and how long FP8 forms are kept.

    Args:
        scale: ``"fp32"``: scale = amax / 448. ``"power_of_two"``: amax / 448, rounded up to a power
            of two (DeepSeek's UE8M0; products with such scales are exact). A
            :class:`~blocktensor.Scales` has one of them for each operand.
        cache_weight: how long the FP8 form of a trainable weight is kept. Every forward casts the
            current weight.

            - ``"backward"``: from a forward to the last backward that needs it.
            - ``False``: not at all; backward casts the weight again.

        wgrad_input: the form of the input that forward saves and wgrad reads. Gradients are always
            cast in 1x128 blocks.

            - ``"128x128"``: FP8 in blocks of 128 tokens by 128 features. wgrad then runs as fast as
              fprop. Its SQNR is up to 2.1 dB lower than with 1x128 blocks if tokens or features
              differ in size (the inputs of docs/guides/recipes.md). Stacks of experts ``[E, K, N]``
              still use 1x128 blocks.
            - ``"1x128"``: FP8 in blocks of 128 tokens of one feature.
            - ``"high_precision"``: the input itself. wgrad is then computed in its dtype, and the
              saved input takes twice the memory.
            - ``"dequantized"``: the rowwise FP8 form, which fprop has read. wgrad is then computed
              of its values in high precision.

        batch_invariant: compute each row of an output with the same bits for any other rows.
            Matmuls of few tokens are then not split along K, which makes them slower
            (docs/guides/rl.md); with 2,048 tokens or more nearly nothing changes.
        backward: the numbers of dgrad and wgrad. fprop is always in FP8 (docs/guides/recipes.md).

            - ``"fp8"``: FP8.
            - ``"high_precision"``: gradients, saved inputs (``wgrad_input="high_precision"``) and
              the masters of weights, all in high precision. Not of weights that FSDP2 gathers.
            - ``"dequantized"``: gradients in high precision, and the values of inputs
              (``wgrad_input="dequantized"``) and weights that fprop has read.

        weight_grid: a grid to which casts round weights first, for training of weights that will be
            stored in MXFP4 (docs/guides/mxfp4.md). Needs weights with power-of-two scales.
            Gradients pass straight through.

            - ``None``: no grid.
            - ``"mxfp4"``: numbers of e2m1 times a power of two for each 32 of a row of a weight
              ``[N, K]`` or ``[E, N, K]``.
            - ``"mxfp4_kn"``: the same for each 32 of a column of a weight ``[K, N]`` or
              ``[E, K, N]``. ``convert`` chooses it for modules whose layout it knows.

    Raises:
        ValueError: for a value outside the choices above, or choices that exclude each other.

    Examples:
        >>> recipe = blocktensor.Recipe(scale="power_of_two")
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU())
        >>> report = blocktensor.convert(model, recipe, skip_small=False)
        >>> model[0].weight.recipe.scale
        'power_of_two'
    """

    scale: ScaleRounding | Scales = "fp32"
    cache_weight: CachePolicy = "backward"
    wgrad_input: WgradInput = "128x128"
    batch_invariant: bool = False
    backward: Backward = "fp8"
    weight_grid: WeightGrid | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scale, Scales):
            roundings = dict.fromkeys(self.scale_of(operand) for operand in get_args(OperandName))
            if len(roundings) == 1:  # so that equal choices are equal recipes
                object.__setattr__(self, "scale", next(iter(roundings)))
        fields = {
            "scale": (*ROUNDINGS, *([self.scale] if isinstance(self.scale, Scales) else [])),
            "cache_weight": get_args(CachePolicy),
            "wgrad_input": get_args(WgradInput),
            "batch_invariant": (False, True),
            "backward": get_args(Backward),
            "weight_grid": (None, *GRID_FORMATS),
        }
        for name, allowed in fields.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                others = ", or a blocktensor.Scales" if name == "scale" else ""
                raise ValueError(
                    f"Recipe({name}={value!r}): expected one of {', '.join(map(repr, allowed))}"
                    f"{others}"
                )
        self._check_backward()
        if self.weight_grid is not None and self.scale_of("weights") != "power_of_two":
            raise ValueError(
                f"Recipe(weight_grid={self.weight_grid!r}): blocks of fp32 scales do not hold the "
                f"values of the grid; expected weights with scales in powers of two, "
                f"Recipe(scale=Scales(weights='power_of_two'), weight_grid={self.weight_grid!r})"
            )

    def _check_backward(self) -> None:
        """Choose ``wgrad_input`` for a backward in high precision, or check it."""
        if self.backward == "fp8":
            return
        if self.wgrad_input == Recipe.wgrad_input:
            object.__setattr__(self, "wgrad_input", self.backward)
        elif self.wgrad_input != self.backward:
            raise ValueError(
                f"Recipe(backward={self.backward!r}, wgrad_input={self.wgrad_input!r}): the "
                f"former says what the gradient of the weight reads; leave wgrad_input out"
            )

    @classmethod
    def deepseek(cls) -> Recipe:
        """Return DeepSeek-V3's choices: wgrad reads inputs in 1x128 blocks.

        It is slower than the default. Losses were equal within 0.01% in four pairs of runs of 320M
        parameters, and within 0.07% in eight of 120M (docs/evidence.md).
        """
        return cls(wgrad_input="1x128")

    @classmethod
    def accurate(cls) -> Recipe:
        """Return the recipe with the most exact weight gradients: wgrad in high precision."""
        return cls(wgrad_input="high_precision")

    def scale_of(self, operand: OperandName) -> ScaleRounding:
        """Return the rounding of the scales of one operand."""
        if isinstance(self.scale, Scales):
            found: ScaleRounding = getattr(self.scale, operand)
            return found
        return self.scale

    # Not cached properties: compilers cannot trace their lock.

    @property
    def activation_format(self) -> BlockFormat:
        """The format of activations rowwise."""
        return ACTIVATION_FORMATS[self.scale_of("activations")]

    @property
    def gradient_format(self) -> BlockFormat:
        """The format of gradients of outputs, rowwise and columnwise."""
        return ACTIVATION_FORMATS[self.scale_of("gradients")]

    @property
    def wgrad_input_format(self) -> BlockFormat | None:
        """The format of activations columnwise; None if weight gradients are in high precision."""
        rows, squares = self.activation_format, WEIGHT_FORMATS[self.scale_of("activations")]
        return {"1x128": rows, "128x128": squares}.get(self.wgrad_input)

    @property
    def saved_input_format(self) -> BlockFormat | None:
        """The format of the form of an activation that forward saves; None if it saves no form."""
        is_rowwise = self.wgrad_input == "dequantized"
        return self.activation_format if is_rowwise else self.wgrad_input_format

    @property
    def wgrad_input_format_kn(self) -> BlockFormat | None:
        """The format of activations columnwise for stacks of experts ``[E, K, N]``.

        Their wgrad computes ``dwᵀ = xᵀ g``, and the Hopper kernel supports no 128x128 blocks on the
        left.
        """
        return None if self.wgrad_input_format is None else self.activation_format

    @property
    def weight_format(self) -> BlockFormat:
        """The format of casts of weights, in their own layout."""
        if self.weight_grid is not None:
            return GRID_FORMATS[self.weight_grid]
        return WEIGHT_FORMATS[self.scale_of("weights")]

    @property
    def weight_format_nk(self) -> BlockFormat:
        """The format of casts of weights ``[..., N, K]``, as matmuls read them."""
        return self.weight_format if self.weight_grid is None else GRID_FORMATS["mxfp4"]

    @property
    def power_of_two(self) -> bool:
        """True if the scales of all operands are rounded up to powers of two."""
        return self.scale == "power_of_two"


DEFAULT_RECIPE = Recipe()

MIGRATING = "docs/guides/migrating.md"
"""The page for users of other libraries, which messages name."""


def check_recipe(recipe: object) -> None:
    """Check that ``recipe`` is a Recipe or None, else raise TypeError."""
    if recipe is None or isinstance(recipe, Recipe):
        return
    is_scale = isinstance(recipe, Scales) or (isinstance(recipe, str) and recipe in ROUNDINGS)
    example = f"Recipe(scale={recipe!r})" if is_scale else "Recipe() or Recipe.deepseek()"
    is_foreign = type(recipe).__module__.partition(".")[0] in ("torchao", "transformer_engine")
    page = f"; {MIGRATING} says which recipe does the same" if is_foreign else ""
    raise TypeError(
        f"recipe={recipe!r} is a {type(recipe).__name__}: expected a blocktensor.Recipe, e.g. "
        f"{example}{page}"
    )
