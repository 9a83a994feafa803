"""Freeze FP8 weights, which drops their high-precision masters, and make them trainable again."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from ..model.adapters import trained_by_peft
from ..model.matrix import Matrix, all_fp8_weights
from ..model.names import check_module
from ..model.progress import check_progress, progress_bar
from ..model.weights import kind_of, why_unconvertible
from ..sharding.cuts import TRAINABLE, check_on_grid
from ..sharding.dtensor import with_local
from ..sharding.fsdp.fsdp_internals import sharded_in
from ..sharding.fsdp.gather import GatheredInFP8
from ..tensor.compat.swap_in import check_swappable, swap_in
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .kept import Kept, forget, origin_of, remember, round_at_random_
from .state_dict import register_state_hooks

Rounding: TypeAlias = Literal["nearest", "stochastic"]


def freeze(
    model: nn.Module,
    *,
    rounding: Rounding = "nearest",
    seed: int = 0,
    progress: bool | None = None,
) -> list[str]:
    """Drop the high-precision masters of a model's FP8 weights: 1 byte a weight, no gradient.

    By default forward and dgrad keep their bits, since they read the same cast. After
    :func:`unfreeze` all masters are FP8 numbers times scales, and changes of less than half a step,
    for example by a merged adapter, round back. A warning says how much is kept. Other parameters
    do not change: ``model.requires_grad_(False)`` freezes them. What peft trains in the model
    (adapters, copies of ``modules_to_save``, encoders of prompts) stays trainable, in FP8 too.

    Args:
        model: any module, with converted weights.
        rounding: ``"stochastic"`` rounds each value up or down at random, with the master as the
            expected value: it keeps small changes on average, and adds noise of less than a step.
            Blocks that have not changed since :func:`unfreeze` keep their bytes. For weights that
            were trained in high precision, ``"nearest"`` has the smaller error.
        seed: of the random numbers. The same seed gives the same bytes on the same kind of device.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.

    Returns:
        The names of the linear layers, and of the stacks of experts, that were frozen.

    Raises:
        ValueError: another module of the model, an embedding say, holds the weight too; or a
            weight is on the meta device.
        NotImplementedError: FSDP2 has sharded a weight; freeze the model before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
        ValueError, TypeError: another ``rounding``, or a seed that is no integer; stochastic
            rounding of a weight with a ``weight_grid``.

    Warns:
        UserWarning: the model has no FP8 weight, or FP8 loses most of a change.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> blocktensor.freeze(model)
        ['0', '2']
        >>> type(model[0].weight).__name__
        'BlockwiseFP8Tensor'
    """
    check_module(model, "freeze")
    check_progress(progress)
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding={rounding!r}: expected one of {', '.join(get_args(Rounding))}")
    if type(seed) is not int:
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}: expected an int")
    if rounding == "stochastic":
        _refuse_grids(model)
    kept, numbers = Kept(), itertools.count()

    def frozen(weight: Matrix) -> Tensor | None:
        held = weight.fp8
        if not isinstance(held, BlockwiseFP8Weight):
            return None
        master, origin = held.master, origin_of(weight.parameter)
        made = weight.frozen_form(master, held.recipe)
        if rounding == "stochastic":
            round_at_random_(made, master, origin, _generator(master.device, seed, next(numbers)))
        else:  # stochastic rounding keeps all changes on average
            kept.add(origin, master, made)
        return made

    names = _swap_all(model, "freeze", frozen, progress)
    kept.warn("freeze", stacklevel=3)
    return names


def _refuse_grids(model: nn.Module) -> None:
    for weight in all_fp8_weights(model):
        grid = weight.fp8.recipe.weight_grid
        if grid is not None:
            raise ValueError(
                f"freeze(rounding='stochastic') of {weight.label!r}, which is cast with "
                f"weight_grid={grid!r}: values that are rounded at random leave the grid; freeze "
                f"with rounding='nearest'"
            )


def _generator(device: torch.device, seed: int, number: int) -> torch.Generator:
    """Return a source of noise for one weight.

    Its seed differs from the seeds that models are initialized with: the same random numbers would
    correlate the noise with the values.
    """
    digest = hashlib.sha256(f"stochastic rounding {seed} {number}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def unfreeze(model: nn.Module, *, progress: bool | None = None) -> list[str]:
    """Make a model's frozen FP8 weights trainable, with masters of their present values.

    Each weight remembers its scales and a sample of its values (32 KiB and 0.03% of its bytes), by
    which :func:`freeze` and ``save_fp8`` tell how much of a later change FP8 keeps.

    The first cast of a new master may differ from the frozen bytes by a rounding: a block's amax,
    rounded to the weight's dtype, gives a new scale.

    Unfreeze a model before it is sharded. Masters of a sharded model, made shard by shard of an FP8
    checkpoint, come from ``load_fp8(model, folder, trainable=True)``.

    Args:
        model: any module, with frozen FP8 weights.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.

    Returns:
        The names of the linear layers, and of the stacks of experts, that are now trainable.

    Raises:
        NotImplementedError: FSDP2 has sharded a weight; unfreeze before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.

    Warns:
        UserWarning: the model has no FP8 weight.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> _ = blocktensor.freeze(model)
        >>> blocktensor.unfreeze(model)
        ['0', '2']
        >>> model[0].weight.requires_grad
        True
    """
    check_module(model, "unfreeze")
    check_progress(progress)

    def trainable(weight: Matrix) -> Tensor | None:
        held = weight.fp8
        if not isinstance(held, BlockwiseFP8Tensor):
            return None
        made = BlockwiseFP8Weight(held.dequantize().contiguous(), held.recipe)
        remember(weight.parameter, held, made.master)
        return made

    return _swap_all(model, "unfreeze", trainable, progress)


Swapped = Callable[[Matrix], Tensor | None]
"""A function that returns the other kind of an FP8 weight; None if it is of that kind already.

For a DTensor it returns the part on this rank.
"""


def _swap_all(model: nn.Module, action: str, swapped: Swapped, progress: bool | None) -> list[str]:
    trains = action == "unfreeze"
    left = set() if trains else trained_by_peft(model)
    weights = [x for x in all_fp8_weights(model) if x.module not in left]
    if not weights:
        warnings.warn(
            f"{action} changes nothing: this {kind_of(model)} has no FP8 weight; convert it first "
            f"(blocktensor.convert)",
            stacklevel=3,
        )
    read = {(x.module, x.key) for x in weights if why_unconvertible(x.module, x.key) is None}
    others = {
        id(parameter): kind_of(module)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if (module, key) not in read
    }
    sharded = sharded_in(model)
    for weight in weights:
        is_sharded = (weight.module, weight.key) in sharded
        _check(weight, action, others.get(id(weight.parameter)), is_sharded)
    names = []
    changed: set[int] = set()  # tied weights are swapped once and listed under each name
    total = sum(weight.parameter.numel() for weight in weights)
    with (
        progress_bar(action, total, progress, unit="parameters") as done,
        torch.inference_mode(False),  # weights made there could never be trained, or read for it
    ):
        for weight in weights:
            old: Any = weight.parameter
            done(old.numel())
            if id(old) not in changed and (new := swapped(weight)) is not None:
                new = new if weight.own is old else with_local(old, new)
                old.grad = None
                swap_in(old, new)
                old.requires_grad_(trains)
                if not trains:
                    forget(old)
                changed.add(id(old))
            if id(old) in changed:
                names.append(weight.label)
                register_state_hooks(weight.module)
    return names


def _check(weight: Matrix, action: str, other: str | None, is_sharded: bool) -> None:
    """Raise if an FP8 weight cannot be exchanged.

    Args:
        weight: the weight.
        action: the name of the change, for messages.
        other: the kind of another module that reads its values; None if there is none.
        is_sharded: True if FSDP2 shards it, also while it is gathered.
    """
    what, fp8 = weight.title, weight.fp8
    is_trained = isinstance(fp8, BlockwiseFP8Weight)
    if is_trained and fp8.is_meta and action == "freeze":
        raise ValueError(
            f"{what} is on the meta device and has no values to freeze: load the model first; "
            f"load_fp8 fills a model on meta with frozen weights"
        )
    if is_sharded or isinstance(fp8, GatheredInFP8):
        raise NotImplementedError(
            f"{what} is sharded by FSDP2, and stays trainable or frozen as it was: {action} the "
            f"model before fully_shard, or load an FP8 checkpoint into empty weights (load_fp8 "
            f"makes frozen ones, and trainable ones with trainable=True)"
        )
    whole: Any = weight.parameter
    if action == "freeze" and weight.own is not whole:
        check_on_grid(whole.shape, whole.device_mesh, whole.placements, what, TRAINABLE)
    del fp8, whole  # their references are counted
    check_swappable(weight.parameter, what, action)
    if is_trained and action == "freeze" and other is not None:
        raise ValueError(
            f"{what} cannot be frozen, because another module reads its values too ({other}): give "
            f"the linear layer a copy of its own, or leave it trainable"
        )
