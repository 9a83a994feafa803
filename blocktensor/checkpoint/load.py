"""Load FP8 checkpoints: check everything, read tensor by tensor, then assign all of them."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..model.names import check_module
from ..model.progress import check_progress, progress_bar
from ..model.weights import full_name, is_linear, kind_of
from ..patches import apply_for_fp8
from ..recipe import Recipe
from ..sharding.dtensor import fp8_part, local_of, own_part
from ..sharding.fsdp.fsdp_internals import adopt_parameters
from ..sharding.fsdp.shards import FrozenShard
from ..sharding.ranks import Ranks
from ..tensor.base import FP8Base
from ..tensor.compat.swap_in import check_swappable, swap_in
from ..text_table import Report, Table, collapse
from .adapters import without_adapters
from .contents import Entry, entries_of
from .files import Computed, Files, Read
from .match import Matched, Source, check_fits, match, some
from .mxfp4 import Unpacked
from .on_disk import CheckpointError, require_safetensors
from .parts import Box
from .read import Copy, check_cut, read_frozen, read_values, share_scales, write_values


@dataclass(frozen=True)
class LoadReport(Report):
    """The tensors of a checkpoint and of the model, by name; ``print(report)`` shows a table.

    Attributes:
        fp8: weights that are now FP8, frozen.
        plain: parameters and buffers that are not FP8.
        missing: in the model but not in the checkpoint; unchanged.
        unexpected: in the checkpoint but not in the model; not read.
        empty: buffers on meta that are in no checkpoint (``persistent=False``), to be computed.
        rounded: weights stored in MXFP4 of which this rank has read 128x128 blocks that FP8 does
            not hold exactly, and the number of these blocks.
    """

    fp8: tuple[str, ...]
    plain: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    empty: tuple[str, ...] = ()
    rounded: Mapping[str, int] = field(default_factory=dict)

    def _parts(self) -> list[Table | str]:
        outcomes = (
            (self.fp8, "loaded", "FP8, frozen"),
            (self.plain, "loaded", "the model's dtype"),
            (self.missing, "unchanged", "not in the checkpoint"),
            (self.unexpected, "not read", "not in the model"),
            (self.empty, "unchanged", "on meta, not persistent: compute it"),
            *(((name,), "rounded", f"{n} blocks of MXFP4") for name, n in self.rounded.items()),
        )
        rows = collapse((name, *what) for names, *what in outcomes for name in names)
        summary = (
            f"{len(self.fp8)} loaded in FP8, {len(self.plain)} in the model's dtype; "
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected"
        )
        hint = _hint_of(self.missing, self.unexpected, not (self.fp8 or self.plain))
        return [Table(("tensor", "outcome", "as"), rows), f"{summary}{hint}"]


def _hint_of(missing: Sequence[str], unexpected: Sequence[str], misses_all: bool) -> str:
    """Return a hint if names are missing because of adapters, or because of another prefix.

    ``misses_all``: no tensor has a name of the model.
    """
    model_is_adapted, stored_is_adapted = (
        any(".base_layer." in name for name in names) for names in (missing, unexpected)
    )
    if model_is_adapted and not stored_is_adapted:
        return "; the model has adapters of peft: load into it before get_peft_model"
    if stored_is_adapted and not model_is_adapted:
        return "; the checkpoint has adapters of peft: load it into a model with the same adapters"
    ends = defaultdict(list)
    for name in unexpected:
        for begin, end in _cuts(name):
            ends[end].append(begin)
    pairs: Counter[tuple[str, str]] = Counter()
    for name in missing:
        found = next((cut for cut in _cuts(name) if cut[1] in ends), None)
        if found is None:
            continue
        own, end = found
        for stored in ends[end]:
            # other names may by chance end as one parameter does, or be one module of many
            if end.count(".") > 1 or (misses_all and not (own and stored)):
                pairs[own, stored] += 1
    most, second, *_ = [*pairs.most_common(2), (("", ""), 0), (("", ""), 0)]
    (own, stored), count = most
    if 2 * count < max(1 if misses_all else 4, len(missing)) or count == second[1]:
        return ""
    what = f"the model's {own!r}" if own else "the model"
    if not stored:
        return f"; the checkpoint is of {what} alone: load into that"
    return (
        f"; the names of {what} begin with {stored!r} in the checkpoint: make {what} the "
        f"{stored!r} of an empty nn.Module, and load into that with strict=False"
    )


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield all ways to split a name at a dot, and an empty prefix with the whole name."""
    parts = name.split(".")
    for i in range(len(parts)):
        yield ".".join(parts[:i]), ".".join(parts[i:])


def load_fp8(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    recipe: Recipe | None = None,
    trainable: bool = False,
    progress: bool | None = None,
) -> LoadReport:
    """Load an FP8 checkpoint into a model whose linear layers are plain, converted or on meta.

    Reads checkpoints of :func:`save_fp8`, DeepSeek-V3, transformers' "fp8", and of others with
    scales of 128x128 blocks. Scales are named ``weight_scale_inv``, ``weight_scale``, ``scale`` or
    ``qscale_weight``; those in another floating-point dtype, e8m0 included, become the same values
    in fp32. Weights in MXFP4, as DeepSeek-V4 and gpt-oss store experts, are read as FP8 weights of
    the same values; the report counts blocks as ``rounded`` that do not hold them exactly. A weight
    stored in FP8 becomes a frozen :class:`BlockwiseFP8Tensor` with the stored bytes. A weight of an
    embedding, or of another parameter that is not read by matmuls alone, is dequantized. Other
    tensors are loaded as by ``load_state_dict``, in the model's dtype. An extra state of a module
    is loaded if it is a tensor. Only tensors of the model are read, one at a time. The model does
    not change unless all of them can be loaded.

    A transformers model gets what ``from_pretrained`` would load into it, under the names and by
    the conversions of transformers. A stack of experts may be stored whole or as matrices of each
    expert: ``experts.3.gate_proj.weight``, ``up_proj``, ``down_proj``, or ``w1``, ``w3``, ``w2`` as
    in Mixtral, with scales of their own.

    All ranks of a sharded model call it. Each reads its parts of the stored tensors, and no more
    of the files. An error on one rank raises on all. FSDP2, tensor and expert parallelism may cut
    the model on meta, after ``convert``: host memory then holds one rank's part::

        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        blocktensor.convert(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        blocktensor.load_fp8(model, folder)  # frozen; trainable=True makes masters

    Layers on meta may have peft's adapters, which are not read: pass the model without them,
    ``model.get_base_model()``.

    Args:
        model: any module. Tensors on meta are made on ``device``.
        path: the folder.
        strict: raise for missing and unexpected names.
        device: for tensors that are on meta in the model; default: the device of the model's
            DeviceMesh if it is sharded, else the CPU.
        trainable: load the stored values, in the dtype of the weight, into weights that require a
            gradient; converted ones get a master with these values. Other weights become frozen.
        recipe: the recipe of the FP8 weights, by which inputs and gradients are cast; default: the
            recipe of the model's weight if it is converted, else ``Recipe()``.
            ``scale="power_of_two"`` needs a checkpoint whose scales are powers of two.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.

    Returns:
        The report: which tensors were loaded, and as what; ``print`` it.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a file that is missing, truncated or malformed; a tensor whose shape or
            dtype does not fit the model; a scale that is not finite and above 0, or does not fit
            the recipe; a stack of which some experts are missing or not in FP8; FP8 weights that
            would be joined or split inside of blocks; names that are missing or unexpected, if
            ``strict``.
        NotImplementedError: weights scaled in other blocks than 128x128; a sharded weight of
            another recipe, not in FP8 where the stored one is, or cut inside of blocks where it
            would be frozen; weights that accelerate offloads.

    Warns:
        UserWarning: no weight of the model is in FP8 afterwards.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> _ = blocktensor.save_fp8(model, "checkpoint")
        >>> fresh = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> print(blocktensor.load_fp8(fresh, "checkpoint"))
        tensor        outcome  as
        ------------  -------  -----------------
        *.weight (2)  loaded   FP8, frozen
        *.bias (2)    loaded   the model's dtype
        2 loaded in FP8, 2 in the model's dtype; 0 missing, 0 unexpected
    """
    require_safetensors()
    check_module(model, "load_fp8")
    check_progress(progress)
    _check_here(model)
    folder = Path(path)
    with without_adapters(model):
        report = _load_folder(model, folder, strict, device, recipe, trainable, progress)
    if all(fp8_part(x) is None for x in model.parameters()):
        hint = _hint_of(report.missing, report.unexpected, not report.plain)
        remedy = "; blocktensor.convert converts the model" if report.plain else ""
        warnings.warn(
            f"no weight of this {kind_of(model)} is in FP8: of {folder} {len(report.plain)} "
            f"tensors are loaded in high precision, {len(report.missing)} of the model's are "
            f"missing{hint}{remedy}",
            stacklevel=2,
        )
    return report


def _load_folder(
    model: nn.Module,
    folder: Path,
    strict: bool,
    device: torch.device | str | None,
    recipe: Recipe | None,
    trainable: bool,
    progress: bool | None,
) -> LoadReport:
    """Load as :func:`load_fp8` does, after its checks of arguments."""
    targets = _targets(model)
    tensors = {name: target.current for name, target in targets.items()}
    ranks = Ranks.of(tensors.values())

    def found() -> tuple[_Plan, LoadReport]:
        checkpoint = Unpacked(entries_of(folder))
        entries = checkpoint.entries
        matched = match(model, tensors, folder, entries)
        states = _extra_states(model, matched.unexpected)
        unexpected = tuple(name for name in matched.unexpected if name not in states)
        held = {id(tensors[name]) for name in matched.sources}  # tied tensors are stored once
        missing = tuple(name for name, x in tensors.items() if id(x) not in held)
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"{folder}: does not fit the model: {_counted('missing', missing)}, "
                f"{_counted('unexpected', unexpected)}; strict=False loads what fits"
                f"{_hint_of(missing, unexpected, not matched.sources)}"
            )
        stored = {name: (entries[name], module) for name, module in states.items()}
        plan = _planned(targets, matched, stored, recipe, lambda x: trainable and x.requires_grad)
        plan.computed.update(checkpoint.computed)
        plain = (*(name for name in plan.sources if name not in plan.frozen), *states)
        empty = tuple(
            name for name, x in model.named_buffers() if x.is_meta and name not in tensors
        )
        report = LoadReport(
            tuple(plan.frozen), plain, missing, unexpected, empty, checkpoint.rounded
        )
        return plan, report

    plan, report = ranks.together(found)
    _load(model, targets, plan, ranks, device, progress)
    return report


def load_matched(
    model: nn.Module,
    matched: Matched,
    device: torch.device,
    recipe: Recipe | None,
    is_plain: Callable[[Tensor], bool],
) -> None:
    """Load matched tensors, as :func:`load_fp8` does.

    ``is_plain``: returns True for tensors of the model that get the values of stored FP8 weights;
    others become frozen.
    """
    targets = _targets(model)
    ranks = Ranks.of(target.current for target in targets.values())
    plan = ranks.together(lambda: _planned(targets, matched, {}, recipe, is_plain))
    _load(model, targets, plan, ranks, device, False)


class _Plan(NamedTuple):
    """A load that was checked, of which nothing is read yet.

    Attributes:
        sources: the stored tensors of the model's, by name.
        frozen: the names of those that become frozen FP8 weights, in order.
        computed: functions that compute boxes of tensors which no file holds.
        states: the modules with an extra state, and its stored tensor.
        recipe: as for :func:`load_fp8`.
    """

    sources: Mapping[str, Source]
    frozen: Mapping[str, None]
    computed: Computed
    states: Mapping[str, tuple[Entry, nn.Module]]
    recipe: Recipe | None

    def is_computed(self, name: str) -> bool:
        """Return True if no file holds the bytes of a tensor, or of a part of it."""
        return any(entry in self.computed for entry in self.sources[name].weights)


def _planned(
    targets: Mapping[str, _Target],
    matched: Matched,
    states: Mapping[str, tuple[Entry, nn.Module]],
    recipe: Recipe | None,
    is_plain: Callable[[Tensor], bool],
) -> _Plan:
    """Decide what each tensor becomes, and check that the stored ones fit.

    ``is_plain``: as for :func:`load_matched`. Embeddings have no FP8 form, and neither do weights
    whose values another module reads.
    """
    holders: dict[int, list[_Target]] = defaultdict(list)
    for target in targets.values():
        holders[id(target.current)].append(target)
    frozen = {
        name: None
        for name, source in matched.sources.items()
        if source.is_fp8 and not is_plain(x := targets[name].current)
        if fp8_part(x) is not None or _is_multiplied(holders[id(x)])
    }
    for name, source in matched.sources.items():
        current, is_frozen = targets[name].current, name in frozen
        check_fits(name, source, current, is_frozen=is_frozen)
        check_cut(name, current, source, recipe, is_frozen=is_frozen)
        if current.is_meta and isinstance(current, nn.Parameter):
            check_swappable(current, name, "load")
    computed: Computed = {}
    for reader in matched.readers:
        made = functools.cache(reader.compute)
        for name in matched.sources.keys() & reader.computed.keys():
            entry = matched.sources[name].weights[0]
            computed[entry] = functools.partial(_one_of, made, name)
    return _Plan(matched.sources, frozen, computed, states, recipe)


def _one_of(
    compute: Callable[[Read], Mapping[str, Tensor]], name: str, read: Read, box: Box
) -> Tensor:
    return compute(read)[name][box]


def _load(
    model: nn.Module,
    targets: Mapping[str, _Target],
    plan: _Plan,
    ranks: Ranks,
    device: torch.device | str | None,
    progress: bool | None,
) -> None:
    """Read everything, then change the model."""
    home = ranks.device if device is None else torch.device(device)
    files = Files(plan.computed)
    values: dict[str, Tensor | list[Copy]] = {}
    extra: dict[str, Tensor] = {}
    modules = {name: module for name, (_, module) in plan.states.items()}
    before = tree_map_only(
        Tensor, torch.clone, {name: x.get_extra_state() for name, x in modules.items()}
    )

    def set_states(given: Mapping[str, Any]) -> None:
        for name, module in modules.items():
            module.set_extra_state(given[name])

    def read(done: Callable[[int], object]) -> None:
        # file by file; discarded unless all checks pass
        for name, source in sorted(plan.sources.items(), key=lambda x: x[1].weights[0].file):
            current = targets[name].current
            with torch.inference_mode(False):  # weights made there could never be trained
                if name in plan.frozen:
                    values[name] = read_frozen(
                        current,
                        source,
                        home,
                        plan.recipe,
                        files.read,
                        own_scales=plan.is_computed(name),
                    )
                else:
                    values[name] = read_values(current, source, home, files.read)
            done(_nbytes(current, name in plan.frozen))
        extra.update((name, files.whole(entry).clone()) for name, (entry, _) in plan.states.items())
        set_states(extra)  # a module may refuse its state: before anything else changes

    try:
        total = sum(_nbytes(targets[name].current, name in plan.frozen) for name in plan.sources)
        with progress_bar("load_fp8", total, progress) as done:
            ranks.together(lambda: read(done))
        for name in plan.frozen:  # in the order of the model, equal on all ranks
            made = values[name]
            if plan.is_computed(name) and isinstance(made, Tensor):
                share_scales(made)
    except BaseException:
        with contextlib.suppress(Exception):  # restore the module that has refused its state
            set_states(before)
        raise
    tensors = [target.current for target in targets.values()]
    has_empty_parts = any(x.is_meta and local_of(x) is not None for x in tensors)
    _assign(targets, plan, values)
    if has_empty_parts:
        adopt_parameters(model)
    set_states(extra)  # again, since a state may depend on weights


def _nbytes(current: Tensor, is_frozen: bool) -> int:
    """Return the bytes of this rank's part of a tensor after loading, without scales."""
    return own_part(current).numel() * (1 if is_frozen else current.itemsize)


def _assign(
    targets: Mapping[str, _Target], plan: _Plan, values: Mapping[str, Tensor | list[Copy]]
) -> None:
    """Assign what was read to the model: new parameters, or new values of existing ones."""
    replaced: dict[int, Tensor] = {}
    for name, made in values.items():
        current = targets[name].current
        if isinstance(made, list):
            write_values(current, made)
        elif isinstance(local_of(current), FrozenShard) and not current.is_meta:
            current.copy_(made)  # FSDP refers to this memory
        elif isinstance(current, nn.Parameter):
            trains = current.requires_grad and name not in plan.frozen
            if current.is_meta:  # an optimizer may have it already
                swap_in(current, made)
                current.requires_grad_(trains)
                continue
            replaced[id(current)] = nn.Parameter(made, requires_grad=trains)
        else:
            replaced[id(current)] = made
    for target in targets.values():  # also where it is tied
        if id(target.current) in replaced:
            setattr(target.module, target.attribute, replaced[id(target.current)])
        if isinstance(getattr(target.module, target.attribute), FP8Base):
            apply_for_fp8()


def _check_here(model: nn.Module) -> None:
    """Refuse weights that accelerate offloads: it keeps the values elsewhere between forwards."""
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(x, "offload", False) for x in getattr(hook, "hooks", (hook,))):
            raise NotImplementedError(
                f"accelerate offloads the weights of {name or kind_of(model)!r}, and would restore "
                f"its own values in each forward: call load_fp8 before cpu_offload or "
                f"dispatch_model, or accelerate.hooks.remove_hook_from_submodules(model) first"
            )


class _Target(NamedTuple):
    """The place of a tensor in the model."""

    module: nn.Module
    attribute: str
    current: Tensor


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Find parameters and persistent buffers by their names in ``state_dict``."""
    targets = {}
    names = model.state_dict(keep_vars=True)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, x in (*module._parameters.items(), *module._buffers.items()):
            name = full_name(prefix, attribute)
            if x is not None and name in names:
                targets[name] = _Target(module, attribute, x)
    return targets


def _extra_states(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that have an extra state of one of these names, as torch finds them."""
    methods = "get_extra_state", "set_extra_state"
    known = {
        full_name(prefix, "_extra_state"): module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if all(getattr(type(module), x) is not getattr(nn.Module, x) for x in methods)
    }
    return {name: known[name] for name in names if name in known}


def _counted(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what}" + (f" ({some(names)})" if names else "")


def _is_multiplied(holders: Sequence[_Target]) -> bool:
    """Return True if only matmuls read a parameter, as far as its modules are known."""
    if any(isinstance(x.module, (nn.Embedding, nn.EmbeddingBag)) for x in holders):
        return False
    known = {is_linear(x.module) and x.attribute == "weight" for x in holders}
    return len(known) == 1 or holders[0].current.ndim == 3
