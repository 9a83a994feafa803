"""Write FP8 checkpoints: the ranks of a model take turns to write its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from ..conversion.kept import warn_of_lost_changes
from ..model.names import check_module
from ..model.progress import check_progress, progress_bar
from ..sharding.ranks import Ranks
from ..tensor.base import TORCH_FUNCTIONS, implements
from .described import Described, readable
from .export import Encode, Exported, Unit, exported, stored_in_turn, units_of
from .in_place import holds_nothing, naming, put_in_place, staging, write_json
from .on_disk import CONFIG, INDEX, SINGLE, require_safetensors, write_shard

DEFAULT_SHARD = 5 << 30
"""Default size limit of a file."""


def save_fp8(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    separate_experts: bool = False,
    all_in_fp8: bool = False,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Write a converted model in FP8: 1 byte a weight, in the layout of DeepSeek-V3.

    Weights of either FP8 type are written as e4m3 data and scales, other tensors unchanged. A
    trainable weight is written as its next forward would cast it; its high-precision master, which
    ``state_dict`` holds, is not. Tied tensors are written once, under their first name.

    A model of transformers gets the names that its ``save_pretrained`` writes. For most mixtures of
    experts this is a matrix for each expert, ``experts.3.gate_proj.weight``, with the bytes that it
    has in the stack. Weights that transformers would read without their scales, or with other ones,
    are stored in high precision, with the values that the next forward would read. Transformers'
    own functions predict which: T5's ``wo``, experts that are stored whole, and 200 rows, which
    transformers scales wrongly on CPUs and older GPUs, where it dequantizes. A warning names them,
    and ``config.json`` lists their modules. For other sizes that are no whole blocks, transformers
    raises where it dequantizes; :func:`load_fp8` and ``.dequantize()`` work.

    After ``unfreeze``, changes of less than half an FP8 step round back; a warning says how much is
    kept. ``freeze(model, rounding="stochastic")`` keeps them on average.

    The new checkpoint takes effect when all of it is on the disk: a killed process leaves the
    previous checkpoint or the new one. ``overwrite`` replaces the index, the config and the files
    that the index names, by files of other names, and ``model.safetensors``, which would hide the
    index from transformers; every other file in the folder stays. A link to a folder is followed.
    Only one process, or the ranks of one model, may save to a folder at a time.

    All ranks of a sharded model call it, with a folder that all of them see. Each writes a
    share of the weights, which are gathered in FP8, as by :func:`iter_fp8`. The folder has the same
    bytes as one written by one process.

    Args:
        model: any module, converted; sharded by ``fully_shard``, tensor parallel, expert parallel
            (as DTensors) or several of them, or not.
        path: the folder to make.
        separate_experts: write a matrix for each expert in any model, torchtitan's too. Default:
            the names of transformers' ``save_pretrained``, and the model's own for other models and
            for experts whose gate and up share blocks (their rows are no multiple of 128).
        all_in_fp8: store all FP8 weights of a transformers model in FP8, for :func:`load_fp8` and
            inference engines; transformers then may misread some of them.
        config: further entries of ``config.json``; default: ``model.config.to_dict()`` if present.
        max_shard_bytes: size limit of a file; a larger tensor or expert gets a file of its own.
        overwrite: replace an existing checkpoint, of :func:`save_fp8` or another library.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.

    Returns:
        ``path``.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: a shard size below 1; no FP8 weight, or only such that transformers cannot read
            in FP8 (GPT-2's Conv1D); a tensor on meta; an FP8 weight that holds NaN or Inf, which
            :func:`load_fp8` refuses; ``separate_experts`` for a stack ``[E, K, N]``, one of another
            name, or one whose matrices share blocks.
        RuntimeError: transformers cannot say what it would read.
        FileExistsError: ``path`` exists, and ``overwrite`` is not set or it is no checkpoint.
        OSError: it cannot be written: the disk is full, say. Nothing has changed then.

    Warns:
        UserWarning: some FP8 weights are stored in high precision.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> folder = blocktensor.save_fp8(model, "checkpoint")
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model-00001-of-00001.safetensors', 'model.safetensors.index.json']
    """
    check_module(model, "save_fp8")  # before its path, which may be the model
    folder = Folder("save_fp8", Path(path), max_shard_bytes, overwrite, progress)
    folder.check()
    check_progress(progress)
    weights = exported(model, "save_fp8", separate_experts)
    warn_of_lost_changes(model, "save_fp8")
    described = Described(weights, ())
    if not all_in_fp8:
        described = readable(described)
        weights = described.found
    content = config_of(model) if config is None else config
    content = {**content, "quantization_config": described.config}
    write_checkpoint(folder, weights, units_of(weights), content, dict)
    return folder.path


class Folder(NamedTuple):
    """The place of a new checkpoint.

    Attributes:
        caller: the public function that writes it.
        path, max_shard_bytes, overwrite, progress: as for :func:`save_fp8`.
    """

    caller: str
    path: Path
    max_shard_bytes: int
    overwrite: bool
    progress: bool | None

    def check(self) -> None:
        """Check that safetensors is installed, and the bytes of a file.

        Raises:
            ImportError, ValueError: see :func:`save_fp8`.
        """
        require_safetensors()
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={self.max_shard_bytes}: expected at least 1")


def write_checkpoint(
    to: Folder,
    found: Exported,
    units: Sequence[Unit],
    config: Mapping[str, Any],
    encode: Encode,
) -> None:
    """Write an export to a folder, as :func:`save_fp8` does.

    Args:
        to: the folder.
        found: the export.
        units: its units, with the bytes that they have in the files.
        config: the content of ``config.json``.
        encode: called by the rank that writes a unit.
    """
    ranks, folder = Ranks.of(found.tensors.values()), Path(os.path.realpath(to.path))
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Path, str]:
            _check_target(folder, to.overwrite)
            staged = stack.enter_context(staging(folder))
            return staged, "" if holds_nothing(folder) else staged.name

        staged, tag = ranks.first(begin)
        shards = _shards(units, staged, tag, to.max_shard_bytes)
        with progress_bar(to.caller, sum(unit.nbytes for unit in units), to.progress) as done:
            shares = ranks.each(lambda: _write(found, shards, folder, ranks, encode, done))
        places = {name: file for share in shares for name, file in share.places.items()}
        size = sum(share.nbytes for share in shares)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}

        def finish() -> None:
            with naming(folder):
                write_json(staged / INDEX, index)
                write_json(staged / CONFIG, config)
            put_in_place(staged)

        ranks.first(finish)


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and holds_nothing(folder)):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is there already: pass overwrite=True to replace it")
    if not any((folder / name).exists() for name in (INDEX, SINGLE)):
        raise FileExistsError(
            f"{folder} is there and is no checkpoint (neither {INDEX} nor {SINGLE} in it): remove "
            f"it, or choose another path"
        )


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the config of a transformers model; of others it is empty."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return dict(to_dict()) if callable(to_dict) else {}


def _shards(units: Iterable[Unit], folder: Path, tag: str, limit: int) -> dict[Path, list[Unit]]:
    """Divide all units into files of at most ``limit`` bytes, or of one unit.

    ``tag``: a part of their names that makes them unique.
    """
    shards: list[list[Unit]] = []
    size = limit + 1
    for unit in units:
        if size + unit.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    count = len(shards)
    return {
        folder / f"model-{number:05}-of-{count:05}{tag}.safetensors": members
        for number, members in enumerate(shards, 1)
    }


class _Share(NamedTuple):
    """The share of a checkpoint that one rank has written.

    Attributes:
        places: the file of each tensor, by name.
        nbytes: the bytes of all of them.
    """

    places: dict[str, str]
    nbytes: int


def _write(
    found: Exported,
    shards: Mapping[Path, list[Unit]],
    folder: Path,
    ranks: Ranks,
    encode: Encode,
    done: Callable[[int], object],
) -> _Share:
    """Write this rank's share of the shards.

    Ranks take turns, and write in a thread, so that all of them write to the disk at once. A rank
    holds one shard at a time. A rank that fails still takes part in the gathers of the others.
    """
    units = [unit for members in shards.values() for unit in members]
    stored_units = stored_in_turn(found, units)
    places: dict[str, str] = {}
    size, writing, failure = 0, Future[None](), None
    writing.set_result(None)

    def write(file: Path, tensors: dict[str, Tensor]) -> None:
        with naming(folder):
            write_shard(file, tensors)

    with ThreadPoolExecutor(1) as pool:
        for turn, (file, members) in enumerate(shards.items()):
            pending: dict[str, Tensor] = {}
            for unit, stored in zip(members, stored_units, strict=False):
                done(unit.nbytes)
                if turn % ranks.size != ranks.index or failure is not None:
                    continue
                try:
                    writing.result()
                    made = encode(stored)
                    pending |= {name: x.to("cpu", copy=True) for name, x in made.items()}
                    places |= dict.fromkeys(made, file.name)
                    size += sum(x.nbytes for x in made.values())
                except Exception as error:
                    if ranks.size == 1:
                        raise
                    failure = error
            if pending and failure is None:
                writing = pool.submit(write, file, pending)
    if failure is not None:
        raise failure
    writing.result()
    return _Share(places, size)


@implements(TORCH_FUNCTIONS, Tensor.storage)
def _no_storage(x: Tensor) -> NoReturn:
    """Name save_fp8 to other writers: safetensors fails with "invalid python storage" otherwise."""
    raise RuntimeError(
        f"this {type(x).__name__} {list(x.shape)} has no storage of its own, so that safetensors "
        f"cannot write it, nor load into it: blocktensor.save_fp8(model, path) writes the model in "
        f"FP8; in high precision write .dequantize() of a frozen weight, and state_dict() of "
        f"trainable ones, which holds plain tensors. In place of load_model, call "
        f"model.load_state_dict(load_file(path)), or blocktensor.load_fp8; accelerate's save_state "
        f"and save_model need safe_serialization=False"
    )
