"""Tell torch.compile's AOTAutograd about FP8 tensors that a graph returns.

- Their gradients are plain, as all gradients here are. AOTAutograd traces a backward before it has
  seen a gradient, and takes it to be of the type of the graph's output. A type corrects that with
  ``__coerce_tangent_metadata__``.
- A view of a weight shares the weight's memory. AOTAutograd recognizes this by the storages of the
  two, and creates such an output from the weight after each run of the graph, so that both share a
  version counter. An output with a storage of its own might miss writes to the weight.
- Its partitioner moves what a backward computes of saved tensors alone into the forward, and saves
  the result. Ops with a tag stay, and so do those that read them.
- The key of its cache of compiled graphs is what Dynamo has traced: a call of ``F.linear`` with a
  weight. This package's code decides what AOTAutograd makes of that call, so the key must include
  this code. The key of Inductor's cache is the ops of a graph; this package decides the layouts of
  their results, so this key includes the code too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...patches import COMPILE_CACHE_KEY

_TAG = "partitioner_tag"
_PACKAGE = Path(__file__).parents[2]
_IMPORTED = time.time()


def plain_tangent(output: Any) -> Tensor:
    """Return a plain tensor without values, by which the gradient of ``output`` is traced.

    Args:
        output: an FP8 tensor that a traced graph returns, contiguous, with fake inner tensors.
    """
    names, _ = output.__tensor_flatten__()
    inner: Tensor = getattr(output, names[0])
    tangent = inner.new_empty(output.shape, dtype=output.dtype)
    # AOTAutograd (torch 2.11, 2.13) asks what it is given here for inner tensors, then decides by
    # the type of the tensor whether its gradient is plain
    tangent.__tensor_flatten__ = _no_inner_tensors  # type: ignore[attr-defined]
    return tangent


def _no_inner_tensors() -> tuple[list[str], None]:
    return [], None


def share_storage(views: Any, weight: Any) -> None:
    """Give ``views`` the storage of the weight while AOTAutograd traces.

    Args:
        views: what a view op makes of ``weight``: one tensor or several, of any type.
        weight: a weight with a ``master``.
    """
    if type(weight.master) is not FunctionalTensor:
        return
    for view in torch.utils._pytree.tree_leaves(views):
        if type(view) is not type(weight):
            continue
        # a reshape may have copied
        if torch._C._is_alias_of(view.master, weight.master):  # type: ignore[attr-defined]
            torch._functionalize_unsafe_set(view, weight)


@contextmanager
def kept_in_backward() -> Iterator[None]:
    """Tag ops of a backward that AOTAutograd traces, so that they stay in it.

    Nothing happens where no backward is traced.
    """
    meta = torch.fx.traceback.current_meta  # of the nodes that are recorded now
    tag = meta.get(_TAG)
    if tag != "is_backward":
        yield
        return
    meta[_TAG] = "must_be_in_backward"
    try:
        yield
    finally:
        meta[_TAG] = tag


@functools.cache
def source_key() -> str:
    """Return a digest of this package's files (some 10 ms, once).

    A process whose files have changed since the import runs code that is not in them: it shares no
    graph with another process.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mtime > _IMPORTED:
                digest.update(os.urandom(32))
            digest.update(f"{path.relative_to(_PACKAGE)}\n".encode() + file.read())
    return digest.hexdigest()


@COMPILE_CACHE_KEY.made_by
def _with_our_code(tag: str) -> str:
    return tag + source_key()
