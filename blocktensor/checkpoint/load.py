"""Load FP8 checkpoints: check everything, read tensor by tensor, then assign all of them."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..model.names import check_module
from ..model.progress import check_progress, progress_bar
from ..model.weights import is_linear, kind_of
from ..patches import apply_for_fp8
from ..recipe import Recipe
from ..sharding.dtensor import fp8_part, local_of
from ..sharding.fsdp.shards import FrozenShard
from ..sharding.ranks import Ranks
from ..tensor.base import FP8Base
from ..text_table import Report, Table, collapse
from .contents import Entry, entries_of
from .match import Matched, Source, check_fits, match, some
from .on_disk import CheckpointError, require_safetensors
from .parts import entire
from .read import Read, check_cut, dequantized, read_values, write_values


@dataclass(frozen=True)
class LoadReport(Report):
    """The tensors of a checkpoint and of the model, by name; ``print(report)`` shows a table.

    Attributes:
        fp8: weights that are now FP8, frozen.
        plain: parameters and buffers that are not FP8.
        missing: in the model but not in the checkpoint; unchanged.
        unexpected: in the checkpoint but not in the model; not read.
    """

    fp8: tuple[str, ...]
    plain: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def _parts(self) -> list[Table | str]:
        outcomes = (
            (self.fp8, "loaded", "FP8, frozen"),
            (self.plain, "loaded", "the model's dtype"),
            (self.missing, "unchanged", "not in the checkpoint"),
            (self.unexpected, "not read", "not in the model"),
        )
        rows = collapse((name, *what) for names, *what in outcomes for name in names)
        summary = (
            f"{len(self.fp8)} loaded in FP8, {len(self.plain)} in the model's dtype; "
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected"
        )
        hint = _other_prefix(self.missing, self.unexpected)
        return [Table(("tensor", "outcome", "as"), rows), f"{summary}{hint}"]


def _other_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return a hint if most names are missing because the checkpoint has another prefix."""
    ends = defaultdict(list)
    for name in unexpected:
        for begin, end in _cuts(name):
            ends[end].append(begin)
    pairs: Counter[tuple[str, str]] = Counter()
    for name in missing:
        found = next((cut for cut in _cuts(name) if cut[1] in ends), None)
        if found is not None and found[1].count(".") > 1:  # more than the name of one parameter
            pairs.update((found[0], other) for other in ends[found[1]])
    ((own, stored), count), *_ = pairs.most_common(1) or [(("", ""), 0)]
    if 2 * count < max(4, len(missing)):
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
    progress: bool | None = None,
) -> LoadReport:
    """Load an FP8 checkpoint into a model whose linear layers are plain, converted or on meta.

    Reads checkpoints of :func:`save_fp8`, DeepSeek-V3, transformers' "fp8", and of others with
    scales of 128x128 blocks. Scales are named ``weight_scale_inv``, ``weight_scale``, ``scale`` or
    ``qscale_weight``; those in another floating-point dtype, e8m0 included, become the same values
    in fp32. A weight stored in FP8 becomes a frozen :class:`BlockwiseFP8Tensor` with the stored
    bytes. A weight of an embedding, or of another parameter that is not read by matmuls alone, is
    dequantized. Other tensors are loaded as by ``load_state_dict``, in the model's dtype. An extra
    state of a module is loaded if it is a tensor. Only tensors of the model are read, one at a
    time. The model does not change unless all of them can be loaded.

    A transformers model gets what ``from_pretrained`` would load into it, under the names and by
    the conversions of transformers. A stack of experts may be stored whole or as matrices of each
    expert: ``experts.3.gate_proj.weight``, ``up_proj``, ``down_proj``, or ``w1``, ``w3``, ``w2`` as
    in Mixtral, with scales of their own.

    Args:
        model: any module. Tensors on meta are made on ``device``.
        path: the folder.
        strict: raise for missing and unexpected names.
        device: for tensors that are on meta in the model; default: the CPU.
        recipe: the recipe of the FP8 weights, by which inputs and gradients are cast; default: the
            recipe of the model's weight if it is converted, else ``Recipe()``.
            ``scale="power_of_two"`` needs a checkpoint whose scales are powers of two.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a file that is missing, truncated or malformed; a tensor whose shape or
            dtype does not fit the model; a scale that is not finite and above 0, or does not fit
            the recipe; a stack of which some experts are missing or not in FP8; FP8 weights that
            would be joined or split inside of blocks; names that are missing or unexpected, if
            ``strict``.
        NotImplementedError: weights scaled in other blocks than 128x128; a sharded weight that is
            on meta, trainable, of another recipe, or not in FP8 where the stored one is.

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
    folder = Path(path)
    entries, targets = entries_of(folder), _targets(model)
    tensors = {name: target.current for name, target in targets.items()}
    matched = match(model, tensors, folder, entries)
    states = _extra_states(model, matched.unexpected)
    unexpected = tuple(name for name in matched.unexpected if name not in states)
    held = {id(tensors[name]) for name in matched.sources}  # tied tensors are stored once
    missing = tuple(name for name, x in tensors.items() if id(x) not in held)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{folder}: does not fit the model: {_counted('missing', missing)}, "
            f"{_counted('unexpected', unexpected)}; strict=False loads what fits"
            f"{_other_prefix(missing, unexpected)}"
        )
    home = torch.device("cpu" if device is None else device)
    stored = {name: (entries[name], module) for name, module in states.items()}
    fp8 = _load(folder, targets, matched, stored, home, recipe, progress)
    plain = (*(name for name in matched.sources if name not in fp8), *states)
    report = LoadReport(fp8, plain, missing, unexpected)
    if all(fp8_part(x) is None for x in model.parameters()):
        warnings.warn(
            f"no weight of this {kind_of(model)} is in FP8: of {folder} {len(plain)} tensors are "
            f"loaded in high precision, {len(missing)} of the model's are missing"
            f"{_other_prefix(missing, unexpected)}; blocktensor.convert converts the model",
            stacklevel=2,
        )
    return report


def load_matched(
    model: nn.Module, folder: Path, matched: Matched, device: torch.device, recipe: Recipe | None
) -> None:
    """Load matched tensors from ``folder``, as :func:`load_fp8` does."""
    _load(folder, _targets(model), matched, {}, device, recipe, False)


def _load(
    folder: Path,
    targets: Mapping[str, _Target],
    matched: Matched,
    states: Mapping[str, tuple[Entry, nn.Module]],
    device: torch.device,
    recipe: Recipe | None,
    progress: bool | None,
) -> tuple[str, ...]:
    """Check and read everything, then change the model; return the names of FP8 weights.

    Args:
        folder: the checkpoint.
        targets: the places of tensors in the model.
        matched: the stored tensors of these places.
        states: the modules with an extra state, and its stored tensor.
        device, recipe, progress: as for :func:`load_fp8`.
    """
    for name, source in matched.sources.items():
        check_fits(name, source, targets[name].current)
    sources, computed = _in_high_precision(folder, targets, matched)
    for name, source in sources.items():
        if local_of(targets[name].current) is not None:
            check_cut(name, targets[name].current, source, recipe)

    files = _Files(computed)
    ranks = Ranks.of(target.current for target in targets.values())
    values: dict[str, Tensor | list[Tensor]] = {}
    extra: dict[str, Tensor] = {}
    modules = {name: module for name, (_, module) in states.items()}
    before = tree_map_only(
        Tensor, torch.clone, {name: x.get_extra_state() for name, x in modules.items()}
    )

    def set_states(given: Mapping[str, Any]) -> None:
        for name, module in modules.items():
            module.set_extra_state(given[name])

    def read(done: Callable[[int], object]) -> None:
        # file by file; discarded unless all checks pass
        for name, source in sorted(sources.items(), key=lambda x: x[1].weights[0].file):
            current = targets[name].current
            values[name] = read_values(current, source, device, recipe, files.read)
            done(_nbytes(current, source))
        extra.update((name, files.read(entry).clone()) for name, (entry, _) in states.items())
        set_states(extra)  # a module may refuse its state: before anything else changes

    try:
        total = sum(_nbytes(targets[name].current, source) for name, source in sources.items())
        with progress_bar("load_fp8", total, progress) as done:
            ranks.each(lambda: read(done))
    except BaseException:
        with contextlib.suppress(Exception):  # restore the module that has refused its state
            set_states(before)
        raise
    _assign(targets, sources, values)
    set_states(extra)  # again, since a state may depend on weights
    return tuple(name for name, source in sources.items() if source.is_fp8)


def _nbytes(current: Tensor, source: Source) -> int:
    """Return the bytes of a tensor of the model after loading, without scales."""
    return current.numel() * (1 if source.is_fp8 else current.itemsize)


def _assign(
    targets: Mapping[str, _Target],
    sources: Mapping[str, Source],
    values: Mapping[str, Tensor | list[Tensor]],
) -> None:
    """Assign what was read to the model: new parameters, or new values of existing ones."""
    replaced: dict[int, Tensor] = {}
    for name, made in values.items():
        current = targets[name].current
        if isinstance(made, list):
            write_values(current, sources[name], made)
        elif isinstance(local_of(current), FrozenShard):
            current.copy_(made)  # FSDP refers to this memory
        elif isinstance(current, nn.Parameter):
            trains = current.requires_grad and not sources[name].is_fp8
            replaced[id(current)] = nn.Parameter(made, requires_grad=trains)
        else:
            replaced[id(current)] = made
    for target in targets.values():  # also where it is tied
        if id(target.current) in replaced:
            setattr(target.module, target.attribute, replaced[id(target.current)])
        if isinstance(getattr(target.module, target.attribute), FP8Base):
            apply_for_fp8()


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
            name = f"{prefix}.{attribute}" if prefix else attribute
            if x is not None and name in names:
                targets[name] = _Target(module, attribute, x)
    return targets


def _extra_states(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that have an extra state of one of these names, as torch finds them."""
    methods = "get_extra_state", "set_extra_state"
    known = {
        f"{prefix}._extra_state".lstrip("."): module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if all(getattr(type(module), x) is not getattr(nn.Module, x) for x in methods)
    }
    return {name: known[name] for name in names if name in known}


def _counted(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what}" + (f" ({some(names)})" if names else "")


Computed = dict[Entry, Callable[[Read], Tensor]]
"""Functions that compute tensors which no file holds, from stored ones."""


def _in_high_precision(
    folder: Path, targets: Mapping[str, _Target], matched: Matched
) -> tuple[dict[str, Source], Computed]:
    """Return the sources; FP8 weights for tensors in high precision are replaced by their values.

    Embeddings have no FP8 form. Nor have weights that a linear layer shares with a module which
    reads their values.
    """
    sources, computed = dict(matched.sources), Computed()
    holders: dict[int, list[_Target]] = defaultdict(list)
    for target in targets.values():
        holders[id(target.current)].append(target)
    for reader in matched.readers:
        made = functools.cache(reader.compute)
        for name in sources.keys() & reader.computed.keys():
            entry = sources[name].weights[0]
            computed[entry] = functools.partial(_one_of, made, name)
    for name, source in matched.sources.items():
        x = targets[name].current
        if source.is_fp8 and fp8_part(x) is None and not _is_multiplied(holders[id(x)]):
            entry = Entry(folder, "F32", tuple(x.shape), name)
            sources[name] = Source([entire(name, x.shape)], [entry])
            computed[entry] = functools.partial(dequantized, x, source)
    return sources, computed


def _one_of(compute: Callable[[Read], Mapping[str, Tensor]], name: str, read: Read) -> Tensor:
    return compute(read)[name]


def _is_multiplied(holders: Sequence[_Target]) -> bool:
    """Return True if only matmuls read a parameter, as far as its modules are known."""
    if any(isinstance(x.module, (nn.Embedding, nn.EmbeddingBag)) for x in holders):
        return False
    known = {is_linear(x.module) and x.attribute == "weight" for x in holders}
    return len(known) == 1 or holders[0].current.ndim == 3


class _Files:
    """A reader of the tensors of a checkpoint, which parses each header once."""

    def __init__(self, computed: Computed) -> None:
        self._computed = computed
        self._opened: dict[Path, Any] = {}

    def read(self, entry: Entry) -> Tensor:
        """Return a stored tensor, mapped from its file, or one that is computed."""
        if entry in self._computed:
            return self._computed[entry](self.read)
        return _tensor(entry, self._opened)


def _tensor(entry: Entry, files: dict[Path, Any]) -> Tensor:
    """Return a tensor mapped from its file: copying it reads the file."""
    from safetensors import SafetensorError, safe_open

    try:
        if entry.file not in files:
            files[entry.file] = safe_open(entry.file, framework="pt")
        value: Tensor = files[entry.file].get_tensor(entry.name)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(f"{entry} cannot be read ({error})") from None
    return value
