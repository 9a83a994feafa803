"""Save the activations that backward waits for in FP8, by a pair of saved-tensor hooks of torch."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..patches import COMPILE_CACHE_KEY
from ..tensor.torch_internals.callers import Caller
from ..tensor.torch_internals.frames import never_compiled
from .around_forward import AroundForward, was_interrupted
from .packed import KeptTensor, SavedTensor, rows_of
from .packed_in_graphs import (
    PackedInGraph,
    graphs,
    inlined_hook,
    pack_in_graph,
    unpack_in_graph,
)
from .packed_once import packed_once
from .saved_kinds import MIN_ELEMENTS, OF_GRAPH, SMALL, why_kept
from .saved_report import SavedReport
from .saved_with_result import COMPARED, keep_what_it_compares, note_packed

IN_GRAPHS = (
    "what this compiled graph saves is kept in high precision; enter the context outside of "
    "compiled functions, around their calls"
)

_CHECKPOINT = "torch.utils.checkpoint"
"""The module whose hooks save nothing: its forwards run again."""


class SavedTensors(SavedReport):
    """The context of :func:`saved_tensors_in_fp8`; ``print`` shows what was saved in it last.

    Attributes:
        enabled: False if the context keeps all tensors as they are.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __enter__(self) -> SavedTensors:
        if is_dynamo_compiling():
            raise NotImplementedError(f"saved_tensors_in_fp8 in a compiled function: {IN_GRAPHS}")
        _untraced(self.enter)(self)
        return self

    def __exit__(self, *error: object) -> None:
        _untraced(self.leave)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.enabled,)  # a copy has its own figures

    def enter(self, owner: object, forward: Caller | None = None) -> None:
        """Begin to apply to this thread until ``owner`` leaves, and while ``forward`` runs."""
        _end_what_was_interrupted()
        entered = _this_thread.entered
        if all(other.context is not self for other in entered):
            self.start_counting()
        entered.append(_Entered(self, owner, forward))

    def leave(self, owner: object) -> None:
        """End what ``owner`` began in this thread, and what an exception left behind since."""
        entered = _this_thread.entered
        begun = [i for i, each in enumerate(entered) if each.owner is owner]
        while begun and len(entered) > begun[-1]:
            _end_innermost()

    def register(self, module: nn.Module) -> Registered:
        """Enter this context in every forward of ``module``.

        Copies and pickles of the module do so too, each in a context of its own.

        Returns:
            A handle, whose ``remove()`` ends this.

        Raises:
            TypeError: ``module`` is not a module.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"register got a {type(module).__name__}: expected a module, in whose forwards "
                f"tensors are saved in FP8"
            )
        return Registered(self, module)

    def _pack(self, x: Tensor) -> SavedTensor | KeptTensor:
        is_compared = keep_what_it_compares(x)
        reason = why_kept(x) or (COMPARED if is_compared else None)
        if reason is None and not self.enabled:
            reason = "not enabled"
        if reason is None and _in_backward():
            reason = "saved in a backward"
        if reason == OF_GRAPH and self.enabled:
            _warn_of_graphs()
        rows = rows_of(x) if reason is None else None
        if rows is None or rows.numel < MIN_ELEMENTS or self.holds(x):
            self.count_kept(x, reason or (SMALL if rows else "not in rows of 128 elements"))
            return KeptTensor(x)
        packed, is_new = packed_once(x, rows)
        if is_new:
            self.count_packed(x, rows, packed)
        saved = SavedTensor(x, packed)
        note_packed(x, rows, saved, self)
        return saved


class Registered(AroundForward):
    """The hooks on a module whose forwards enter a context."""

    def __init__(self, context: SavedTensors, module: nn.Module) -> None:
        super().__init__(module)
        self._context = context

    def begin(self, forward: Caller | None) -> None:
        """Enter the context."""
        self._context.enter(self, forward)

    def end(self) -> None:
        """Leave the context."""
        self._context.leave(self)

    def is_traced(self) -> None:
        """Warn that a compiled graph saves its tensors in high precision."""
        _warn_of_graphs()


class _Entered:
    """A context that a thread has entered.

    Attributes:
        context: the context.
        owner: the context itself, or the hooks of a module that have entered it.
        forward: the function that runs the forward of this module.
        packs: True if it has hooks, which are torch's innermost ones if no later entry has.
    """

    def __init__(self, context: SavedTensors, owner: object, forward: Caller | None) -> None:
        self.context, self.owner, self.forward = context, owner, forward
        self.packs, self._hook = False, None
        top = _top_hooks()
        saves_nothing = top is not None and getattr(top[0], "__module__", None) == _CHECKPOINT
        if not (saves_nothing or _in_backward()):
            self._hook, unpack = _hooks(context.enabled, "torch._dynamo" in sys.modules)
            torch._C._autograd._push_saved_tensors_default_hooks(self._hook, unpack)
            self.packs = True

    def end(self) -> None:
        """Remove the hooks of torch."""
        top = _top_hooks()
        if top is not None and top[0] is self._hook:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def _in_backward() -> bool:
    """Return True if a backward runs in this thread: what it saves, it reads soon."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _hooks(enabled: bool, has_dynamo: bool) -> tuple[Any, Any]:
    """Return the hooks of all contexts: a compiled graph depends on the objects.

    Args:
        enabled: whether they pack; AOTAutograd inlines these alone.
        has_dynamo: whether Dynamo is imported, which ``_untraced`` depends on.
    """
    COMPILE_CACHE_KEY.apply()  # our code is in the graphs of a model without FP8 tensors, too
    pack, unpack = _pack, _untraced(_unpack)
    return (inlined_hook(pack), inlined_hook(unpack)) if enabled else (pack, unpack)


def _untraced(function: Any) -> Any:
    """Return a function that Dynamo does not trace where it is called between graphs."""
    if "torch._dynamo" not in sys.modules:
        return function
    reason = (
        "compiled autograd cannot unpack what saved_tensors_in_fp8 has packed: run this backward "
        "eagerly, or the forward outside of the context"
    )
    return torch.compiler.disable(function, reason=reason)


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@never_compiled
def _pack(x: Tensor) -> SavedTensor | KeptTensor | PackedInGraph:
    if type(x) is not Tensor:  # compilers trace with other types
        asked = graphs()
        if asked is not None:
            return pack_in_graph(x, asked)
    if not _this_thread.entered:  # the context was left while other hooks were above this one
        torch._C._autograd._pop_saved_tensors_default_hooks()
    context = _innermost()
    return KeptTensor(x) if context is None else context._pack(x)


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, (SavedTensor, KeptTensor)):
        return saved.unpack()
    asked = graphs()
    assert asked is not None
    context = _innermost()
    if context is not None:
        context.count_in_graph(asked["_node"].meta["val"], saved)
    return unpack_in_graph(saved, asked)


def _innermost() -> SavedTensors | None:
    """Return the context that has the hooks; None if it was left, and other hooks were above."""
    _end_what_was_interrupted()
    return next((each.context for each in reversed(_this_thread.entered) if each.packs), None)


def _end_what_was_interrupted() -> None:
    """End the contexts of forwards that a KeyboardInterrupt has ended."""
    entered = _this_thread.entered
    while entered and was_interrupted(entered[-1].forward):
        _end_innermost()


def _end_innermost() -> None:
    entered = _this_thread.entered
    ended = entered.pop()
    ended.end()
    if all(other.context is not ended.context for other in entered):
        ended.context.stop_counting()


def _warn_of_graphs() -> None:
    warnings.warn(f"saved_tensors_in_fp8: {IN_GRAPHS}", UserWarning, stacklevel=2)


_warn_of_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while traced


class _Thread(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []


_this_thread = _Thread()


def saved_tensors_in_fp8(enabled: bool = True) -> SavedTensors:
    """Save activations for backward in FP8 instead of bf16, fp16 or fp32.

    Enter the returned context around a forward, like ``torch.autograd.graph.save_on_cpu``. Backward
    then computes with the rounded values: e4m3 in blocks of 128 elements of a row, with fp32
    scales, 1.03 bytes an element. Outputs and the loss do not change.

    Only activations are packed: plain tensors in bf16, fp16 or fp32 of at least 4096 elements that
    autograd has computed, not from parameters alone. Parameters, masks, tables of positions,
    statistics and FP8 tensors are kept as they are, and so are logarithms of probabilities and what
    attention saves: tensors of more than three dimensions, or of three with the last at most 256.
    Tensors that share memory are packed once. Of parts that ``torch.utils.checkpoint`` runs again,
    the inputs are packed.

    Args:
        enabled: False keeps all tensors as they are, inside of a context that packs.

    Returns:
        A context, which can be entered again. It is also a report: ``print`` shows what was saved
        in it last. ``register(module)`` enters it in every forward of a module.

    Raises:
        TypeError: ``enabled`` is not a bool.
        NotImplementedError: the context is entered in a compiled function.
        RuntimeError: in backward, a tensor was changed in place after it had been saved.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).bfloat16()
        >>> x = torch.randn(64, 256, dtype=torch.bfloat16)
        >>> with blocktensor.saved_tensors_in_fp8() as saved:
        ...     y = model(x)
        >>> y.sum().backward()
        >>> saved.bytes_before // 1024, saved.bytes_after // 1024
        (160, 98)
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"saved_tensors_in_fp8 got a {type(enabled).__name__}: expected enabled=True or False; "
            f"saved_tensors_in_fp8().register(module) packs what the forwards of a module save"
        )
    return SavedTensors(enabled)
