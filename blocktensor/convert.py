"""Turning a model's nn.Linear weights into FP8, in place, and saying what was done."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .distributed.shard import FP8Shard, is_converted, shard_of, with_local
from .ops.checks import HIGH_PRECISION
from .ops.layouts import SQUARE_BLOCK, square_form_bytes
from .recipe import DEFAULT_RECIPE, Recipe
from .state import register_state_hooks
from .tables import collapse, human_bytes, text_table
from .tensor import BlockwiseFP8Tensor
from .weight import BlockwiseFP8Weight

HEAD_NAMES = ("lm_head", "output", "head", "embed_out", "output_projection", "logits")
"""Last name of a linear that maps to the vocabulary, in the usual models."""

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class SmallKN:
    """Sizes under which FP8 does not pay: ``[N, K]`` is left alone if N < n, K < k or N K < size.

    The defaults come from ``python -m benchmarks small`` on an H200 (docs/design.md): from there on
    FP8 is faster in CUDA graphs at 4096 tokens, and in eager mode at 16384.
    """

    n: int = 1024
    k: int = 1024
    size: int = 2048 * 2048

    def undercut(self, n: int, k: int) -> list[str]:
        """What of a weight ``[n, k]`` is too small, and by which threshold."""
        sizes = (("N", n, self.n), ("K", k, self.k), ("N K", n * k, self.size))
        return [f"{what}={found} < {least}" for what, found, least in sizes if found < least]


@dataclass(frozen=True)
class Entry:
    """One module's weight: what became of it and why."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    converted: bool
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did; ``print(report)`` shows it as a table.

    ``bytes_after`` counts the master of a trainable weight and its FP8 form with scales (held from
    a forward to the matching backward), or the FP8 form alone of a frozen one.
    """

    entries: tuple[Entry, ...]

    @property
    def converted(self) -> tuple[Entry, ...]:
        """The weights that now run in FP8."""
        return tuple(e for e in self.entries if e.converted)

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """The linears and embeddings left alone, each with its reason."""
        return tuple(e for e in self.entries if not e.converted)

    @property
    def bytes_before(self) -> int:
        """Parameter bytes of all entries before conversion; tied weights count once."""
        return sum(e.bytes_before for e in self.entries)

    @property
    def bytes_after(self) -> int:
        """Parameter bytes of all entries after conversion; tied weights count once."""
        return sum(e.bytes_after for e in self.entries)

    def __str__(self) -> str:
        rows = collapse(
            (
                e.name,
                "x".join(str(s) for s in e.shape),
                str(e.dtype).removeprefix("torch."),
                "fp8" if e.converted else "-",
                e.reason,
            )
            for e in self.entries
        )
        summary = (
            f"{len(self.converted)} converted, {len(self.skipped)} skipped; parameters "
            f"{human_bytes(self.bytes_before)} before, {human_bytes(self.bytes_after)} after"
        )
        return text_table(("module", "weight", "dtype", "runs in", "why"), rows) + "\n" + summary


def to_blockwise_fp8_weights(module: nn.Module, recipe: Recipe = DEFAULT_RECIPE) -> None:
    """Convert the weight of one nn.Linear in place: ``model.apply(to_blockwise_fp8_weights)``.

    Any other module, a weight converted before, a parametrized weight, and the output projection of
    nn.MultiheadAttention (which multiplies by it without calling it) are left as they are. The
    parameter keeps its identity: tied modules, optimizers and parameter groups that hold it see the
    FP8 one. A weight that requires a gradient becomes a :class:`BlockwiseFP8Weight`, a frozen one a
    :class:`BlockwiseFP8Tensor` whose high-precision copy is dropped (on the meta device: a
    BlockwiseFP8Weight, to be initialised later). What FSDP2 has sharded already is gathered in FP8
    from then on; convert it before the first forward.

    Raises:
        NotImplementedError: the weight is a frozen DTensor.
        TypeError: the weight is not bf16, fp16 or fp32.
        RuntimeError: the parameter is in use by an autograd graph or held by a wrapper such as DDP.
    """
    if not isinstance(module, nn.Linear) or _why_unconvertible(module) is not None:
        return
    if not is_converted(module.weight):
        _swap_in(module.weight, _converted_weight(module.weight, recipe))
    if isinstance(module.weight, BlockwiseFP8Weight) or shard_of(module.weight) is not None:
        register_state_hooks(module)


def convert(
    model: nn.Module,
    recipe: Recipe = DEFAULT_RECIPE,
    filter: Filter | None = None,
    skip: Sequence[str] = (),
    auto_filter_small_kn: bool | SmallKN = True,
) -> ConversionReport:
    """Convert a model's nn.Linear weights to FP8 in place, and report on every one.

    The lm head (by its usual names, or tied to an embedding) and embeddings are left alone.

    Args:
        model: any module; names in the report are relative to it.
        recipe: numeric choices for all converted layers.
        filter: ``filter(module, name) -> bool``; False leaves a linear alone.
        skip: shell-style patterns of module names to leave alone, e.g. ``["*.router", "lm_head"]``.
        auto_filter_small_kn: leave weights alone that are too small for FP8 to pay: True for the
            measured sizes, False for none, or a :class:`SmallKN`.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError, RuntimeError: as :func:`to_blockwise_fp8_weights`; a pattern list that is a str.
        ValueError: a pattern in ``skip`` that matches no module.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} is a str: expected a list of patterns, e.g. [{skip!r}]")
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"skip pattern {pattern!r} matches no module of the model")
    small = auto_filter_small_kn
    thresholds = small if isinstance(small, SmallKN) else SmallKN() if small else None
    layers = [
        (name, module, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    embeddings = {id(w): name for name, module, w in layers if isinstance(module, nn.Embedding)}
    users: dict[int, list[str]] = defaultdict(list)  # names by parameter, for ties
    for name, _, weight in layers:
        users[id(weight)].append(name)

    entries = []
    for name, module, weight in layers:
        first_use = users[id(weight)][0] == name
        before = _bytes_of(weight) if first_use else 0
        shape, dtype = tuple(weight.shape), weight.dtype
        reason = _why_skip(name, module, embeddings, filter, skip, thresholds)
        if reason is None:
            was = is_converted(weight)
            to_blockwise_fp8_weights(module, recipe)  # the parameter keeps its identity
            reason = _why_converted(weight, was, users[id(weight)], name)
        after = _bytes_of(weight) if first_use else 0
        entries.append(Entry(name, shape, dtype, is_converted(weight), reason, before, after))
    return ConversionReport(tuple(entries))


def freeze(model: nn.Module) -> list[str]:
    """Drop the high-precision masters of a model's FP8 linears: 1 byte a weight, no gradient.

    Forward and data gradient keep their bits: they read the same cast.

    Returns:
        The names of the modules whose weights were frozen.

    Raises:
        RuntimeError: as :func:`to_blockwise_fp8_weights`.
    """

    def frozen(weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Weight) or weight.is_meta:
            return None
        return BlockwiseFP8Tensor.quantize(weight.master.detach(), SQUARE_BLOCK, weight.recipe)

    return _swap_all(model, frozen, trains=False)


def unfreeze(model: nn.Module) -> list[str]:
    """Give a model's frozen FP8 linears trainable weights, whose masters are the values they have.

    The first cast of such a master may differ from the bytes it came from by a rounding: a block's
    largest value, rounded to the weight's dtype, sets the scale anew.

    Returns:
        The names of the modules whose weights are trainable now.

    Raises:
        RuntimeError: as :func:`to_blockwise_fp8_weights`.
    """

    def trainable(weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Tensor):
            return None
        return BlockwiseFP8Weight(weight.dequantize(), weight.recipe)

    return _swap_all(model, trainable, trains=True)


def _swap_all(
    model: nn.Module, swapped: Callable[[Tensor], Tensor | None], trains: bool
) -> list[str]:
    names = []
    done: set[int] = set()  # tied weights are swapped once, and named twice
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight
        new = None if id(weight) in done else swapped(weight)
        if new is not None:
            weight.grad = None
            _swap_in(weight, new)
            weight.requires_grad_(trains)
            done.add(id(weight))
        if id(weight) in done:
            names.append(name)
            if trains:
                register_state_hooks(module)
    return names


def _why_unconvertible(module: nn.Linear) -> str | None:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by it without calling it"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed (parametrized), not a parameter"
    return None


def _why_skip(
    name: str,
    module: nn.Linear | nn.Embedding,
    embeddings: dict[int, str],
    filter: Filter | None,
    skip: Sequence[str],
    thresholds: SmallKN | None,
) -> str | None:
    weight = module.weight
    if isinstance(module, nn.Embedding):
        return "embedding"
    if reason := _why_unconvertible(module):
        return reason
    for pattern in skip:
        if fnmatch.fnmatch(name, pattern):
            return f"skip pattern {pattern!r}"
    if id(weight) in embeddings:
        return f"tied to embedding {embeddings[id(weight)]!r}"
    if name.rpartition(".")[2] in HEAD_NAMES:
        return "lm head by name"
    if weight.dtype not in HIGH_PRECISION:
        return f"dtype {weight.dtype}"
    if filter is not None and not filter(module, name):
        return "filter"
    n, k = weight.shape
    small = [] if thresholds is None else thresholds.undercut(n, k)
    return f"small: {' and '.join(small)} (auto_filter_small_kn)" if small else None


def _why_converted(weight: Tensor, was: bool, users: list[str], name: str) -> str:
    if users[0] != name:
        return f"tied to {users[0]!r}"
    if was:
        return "already converted"
    if isinstance(weight, BlockwiseFP8Tensor):
        return "frozen: high-precision copy dropped"
    if shard_of(weight) is not None:
        return "trainable, gathered in FP8"
    return "trainable" if weight.requires_grad else "initialised later"


def _converted_weight(weight: Tensor, recipe: Recipe) -> Tensor:
    frozen = not weight.requires_grad and weight.device.type != "meta"
    if hasattr(weight, "_local_tensor"):
        if frozen:
            raise NotImplementedError(
                f"cannot convert a frozen DTensor {list(weight.shape)}: convert the model before "
                f"fully_shard, or with requires_grad=True"
            )
        return with_local(weight, FP8Shard(weight._local_tensor.detach(), recipe))
    if frozen:
        return BlockwiseFP8Tensor.quantize(weight.detach(), SQUARE_BLOCK, recipe)
    return BlockwiseFP8Weight(weight.detach(), recipe)


_OWN_ATTRIBUTES = {
    *("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale", "block_shape"),
    *("recipe", "master", "cache", "transposed"),
}
"""What the FP8 types hold; a parameter that was one of them must not keep it."""


def _swap_in(parameter: Tensor, converted: Tensor) -> None:
    """Give ``parameter`` the content of ``converted``, so that all who hold it see the FP8 one."""
    new = nn.Parameter(converted, requires_grad=parameter.requires_grad)
    del converted
    new.grad = parameter.grad
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot convert a parameter of shape {list(parameter.shape)} in place ({error}): "
            f"convert the model before wrapping it in DDP or FSDP, and not between a forward and "
            f"its backward"
        ) from error
    for name, value in new.__dict__.items():  # attributes that others hung on the parameter
        if name not in _OWN_ATTRIBUTES:
            parameter.__dict__.setdefault(name, value)
    if any(hooks):
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def _bytes_of(weight: Tensor) -> int:
    if (shard := shard_of(weight)) is not None:
        return shard.master.nbytes
    fp8 = square_form_bytes(weight.shape)
    if isinstance(weight, BlockwiseFP8Tensor):
        return fp8
    if isinstance(weight, BlockwiseFP8Weight):
        return weight.master.nbytes + (fp8 if weight.recipe.cache_weight else 0)
    return weight.nbytes
