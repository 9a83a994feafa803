"""Find the caller of a function: the only file that reads stack frames.

torch, accelerate and transformers call ``detach``, ``data_ptr``, ``swap_tensors`` and the like, and
offer no other place to tell them what an FP8 weight is. Handlers of torch functions by their caller
are in ``overrides/by_caller.py``; others are here and in ``compat/swap_in.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling

APPLY = "torch.nn.modules.module", "_apply"
"""Moves and converts the parameters of a module one by one (``.to()``, ``.double()``)."""

PARAMETRIZE = "torch.nn.utils.parametrize", "_maybe_set"
"""Gives a parameter the content of ``right_inverse(weight)``."""

HANDS_OUT = "torch.multiprocessing.reductions", "reduce_tensor"
"""Makes a handle (CUDA IPC, shared memory), with which another process opens a tensor's memory."""


class Caller:
    """A function on the stack."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    @property
    def module(self) -> str:
        """The name of the module that defines the function."""
        name: str = self._frame.f_globals.get("__name__", "")
        return name

    @property
    def function(self) -> str:
        """The name of the function."""
        return self._frame.f_code.co_name

    @property
    def place(self) -> tuple[str, str]:
        """Module and function, to look up in a table."""
        return self.module, self.function

    @property
    def back(self) -> Caller | None:
        """The caller of this function."""
        frame = self._frame.f_back
        return None if frame is None else Caller(frame)

    def local(self, name: str) -> Any:
        """Return the value of a local variable, or None."""
        return self._frame.f_locals.get(name)

    def has_ended(self) -> bool:
        """Return True if the call is over, and free its local variables then."""
        try:
            self._frame.clear()
        except RuntimeError:  # Python refuses this while a frame is on a stack
            return False
        return True


def caller(depth: int = 1) -> Caller:
    """Return the caller of the function that asks; ``depth``: how many calls further out."""
    return Caller(sys._getframe(depth + 1))


def callers() -> Iterator[Caller]:
    """Return an iterator over the functions on the stack, from the one that asks outward."""
    return map(Caller, _frames(sys._getframe(1)))


_LAYERS = {
    ("torch.nn.modules.module", "_call_impl"): True,
    ("torch.autograd.function", "apply"): True,
    ("torch.autograd.function", "apply_boxed"): True,
    ("torch.optim.optimizer", "wrapper"): False,
}
"""True for functions that call a layer: the forward of a module with its hooks, or a direction of
an autograd function. False for the step of an optimizer."""

_NO_FUNCTIONS = {*_LAYERS, ("torch.autograd.graph", "_engine_run_backward")}
"""Functions that call layers, optimizers, and autograd's own formulas."""

_NAMES = {name for _, name in _NO_FUNCTIONS}

_COMPILERS = {"torch._dynamo.convert_frame", "torch._functorch.aot_autograd"}


def layer_runs() -> bool:
    """Return True while a layer runs in this thread: what it multiplies by a weight is its input.

    A layer is a module, an autograd function, or any function named ``forward``. An optimizer that
    one of them calls is none.
    """
    for frame in _frames(sys._getframe(1)):
        name = frame.f_code.co_name
        if name == "forward":
            return True
        if name in _NAMES:
            is_layer = _LAYERS.get(Caller(frame).place)
            if is_layer is not None:
                return is_layer
    return False


def function_runs_forward() -> bool:
    """Return True in the forward of an autograd function, where torch disables gradients.

    Modules, optimizers and backwards that such a forward calls are not part of it. While a compiler
    traces, only what the compiler calls counts: other callers of the graph come later.
    """
    compiles = is_compiling()
    for frame in _frames(sys._getframe(1)):
        name = frame.f_code.co_name
        if name == "forward" and _is_of_function(frame):
            return True
        if name in _NAMES and Caller(frame).place in _NO_FUNCTIONS:
            return False
        if compiles and Caller(frame).module in _COMPILERS:
            return False
    return False


def _is_of_function(forward: FrameType) -> bool:
    code = forward.f_code
    first = forward.f_locals.get(next(iter(code.co_varnames), ""))
    if isinstance(first, torch._C._FunctionBase):  # the ctx, unless it has a setup_context
        return True
    return not isinstance(first, nn.Module) and _is_code_of_function(code)


@functools.cache
def _is_code_of_function(code: CodeType) -> bool:
    kinds: list[Any] = [Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(inspect.unwrap(kind.forward), "__code__", None) is code for kind in kinds)


_TRANSFORMS = {"torch._functorch.apis", "torch._functorch.eager_transforms"}


def in_torch_func() -> bool:
    """Return True while a transform of ``torch.func`` runs: no override sees its matmuls."""
    return any(x.module in _TRANSFORMS for x in callers())


def _frames(inner: FrameType | None) -> Iterator[FrameType]:
    while inner is not None:
        yield inner
        inner = inner.f_back


def converts_a_model() -> bool:
    """Return True if ``nn.Module._apply`` calls, which replaces one parameter after the other.

    An error then would leave a model of which some parameters are converted, and a plain result a
    model whose FP8 is lost for good. So an FP8 weight stays one in every dtype; matmuls refuse it
    in those that they cannot cast.
    """
    return any(x.place == APPLY for x in callers())


def loads_state() -> bool:
    """Return True while ``load_state_dict`` gives a module its parameters."""
    load = "torch.nn.modules.module", "_load_from_state_dict"
    return any(x.place == load for x in callers())


def saves_parts() -> bool:
    """Return True if ``get_model_state_dict`` asks for what each rank holds, not for wholes."""
    asks = "torch.distributed.checkpoint.state_dict", "_get_model_state_dict"
    who = next((x for x in callers() if x.place == asks), None)
    return who is not None and not who.local("info").full_state_dict


def is_saved_by_graph() -> bool:
    """Return True if AOTAutograd calls a pack hook, which asks: a compiled graph saves a tensor.

    These are intermediates of the graph, which have no place in a graph of autograd.
    """
    ours = __name__.partition(".")[0]
    others = (x for x in callers() if not x.module.startswith((f"{ours}.", "torch._dynamo.")))
    asks, by = next(others, None), next(others, None)
    return (
        asks is not None
        and by is not None
        and asks.place == ("torch.autograd.function", "apply")
        and by.module.startswith("torch._functorch.")
    )


def inputs_held_by_modules() -> list[int]:
    """Return the inputs of a forward graph that are parameters and buffers.

    AOTAutograd asks saved-tensor hooks about the graph, by their numbers.
    """
    inlines = "torch._functorch._aot_autograd.graph_compile"
    name = "maybe_inline_graph_saved_tensors_hooks"
    asks = next((x for x in callers() if x.place == (inlines, name)), None)
    return [] if asks is None else asks.local("static_input_indices")


def modules_that_run() -> list[nn.Module]:
    """Return the modules whose methods are on the stack, from the innermost outward."""
    found = (x.local("self") for x in callers())
    return list(dict.fromkeys(x for x in found if isinstance(x, nn.Module)))


def address_as_a_name(x: Tensor, asks: Caller) -> int | None:
    """Return what ``x.data_ptr()`` is for a caller that reads no memory there, or None.

    - ``Tensor.__deepcopy__`` and ``__reduce_ex__`` tell wrappers by a null pointer.
    - accelerate's ``prepare`` notes the address of every parameter, to find an optimizer's
      parameters again after ``fully_shard``. It gets the address of the first bytes.

    Raises:
        NotImplementedError: accelerate would send frozen FP8 weights from rank 0 as plain values,
            for which other ranks would wait in vain.
    """
    if asks.module == "torch._tensor":
        return 0
    for caller in map(Caller, _frames(asks._frame)):
        if caller.module != "accelerate.accelerator":
            return None
        if caller.function == "_prepare_fsdp2":
            if caller.local("self").state.fsdp_plugin.cpu_ram_efficient_loading:
                raise NotImplementedError(
                    "accelerate's cpu_ram_efficient_loading sends the state_dict of rank 0 as "
                    "plain tensors, which frozen FP8 weights are not: prepare the model with "
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False), every rank "
                    "having loaded it"
                )
            names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
            address: int = getattr(x, names[0]).data_ptr()
            return address
    return None
