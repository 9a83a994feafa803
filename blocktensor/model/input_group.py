"""The hooks by which the linears of one module share the casts of their inputs.

The linears share the cast and its bytes saved for the backward. In the autograd graph each linear
has its own edge to the input, so gradients are summed where they would be without sharing, and the
cast that is kept between two linears holds no graph.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..autograd.check_operands import autocast_dtype
from ..autograd.quantize import cast_activation
from ..ops.checks import HIGH_PRECISION
from ..ops.runtime.specialize import must_dispatch
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor


class _Input(weakref.ref[Tensor]):
    """The latest input of a group, and its cast while more linears are expected to use it."""

    __slots__ = ("fp8", "key", "users")

    fp8: BlockwiseFP8Tensor | None
    key: Hashable
    users: tuple[str, ...]

    def drop(self) -> None:
        """Drop the cast; called when the input is freed, since its id may be reused."""
        self.fp8 = self.key = None


class _Thread(threading.local):
    """State of a group in the calling thread; the class holds the initial values."""

    running = False
    given: _Input | None = None


class InputGroup:
    """The FP8 linears of one module, which share the casts of their inputs.

    Attributes:
        name: of the module, relative to the model; empty for the model itself.
        linears: their names, relative to the module.
        casts: inputs cast for these linears so far, by all threads.
        saved: casts avoided by sharing.
    """

    def __init__(self, name: str, linears: tuple[str, ...]) -> None:
        self.name, self.linears = name, linears
        self.casts = self.saved = 0
        self._expected: dict[str, tuple[str, ...]] = {}  # linears that get one input, by the first
        self._handles: list[RemovableHandle] = []
        self._thread = _Thread()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _thread=_Thread())

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """The linears that got one input, as found by running; a tuple for each input."""
        return tuple(self._expected.values())

    def attach(self, module: nn.Module) -> None:
        """Register the hooks on the module of this group and on its linears."""
        # The hooks hold no reference to the module, which would delay the freeing of a model.
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            *(
                module.get_submodule(linear).register_forward_pre_hook(
                    functools.partial(self._give, linear)
                )
                for linear in self.linears
            ),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._thread.running, self._thread.given = True, None

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            if result is not None:  # else an exception, perhaps before the last use
                self._learn()
            self._thread.running, self._thread.given = False, None

    def _learn(self) -> None:
        """Record the linears that got this input, under the first of them."""
        given = self._thread.given
        if given is not None:
            first = given.users[0]
            self._expected[first] = max(given.users, self._expected.get(first, ()), key=len)

    def _give(self, linear: str, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """The arguments of ``linear`` with its input in FP8; None leaves them unchanged."""
        # Compilers and selective checkpointing must see the same ops in every pass. `running` also
        # ensures that no cast is kept outside of the module's forward.
        if torch.compiler.is_compiling() or len(args) != 1 or not self._thread.running:
            return None
        x, weight = args[0], module._parameters.get("weight")
        if must_dispatch(x) or torch._C._are_functorch_transforms_active():
            return None
        # in-place changes of inference tensors are not counted; the linear raises for other misfits
        fits = x.dtype in HIGH_PRECISION and x.ndim > 0 and not x.is_inference()
        if not (fits and isinstance(weight, FP8Base)):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            fp8 = self._cast(linear, x, weight)
            if fp8 is None:
                return None
            return (_Shared.apply(x, fp8) if x.requires_grad and torch.is_grad_enabled() else fp8,)

    def _cast(self, linear: str, x: Tensor, weight: Any) -> BlockwiseFP8Tensor | None:
        """The cast of ``x``, made now or for another linear; None if the linear is to cast it."""
        dtype = autocast_dtype(x) or x.dtype
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        layout = x._version, x.data_ptr(), x.shape, x.stride()  # .data = … keeps the version
        recipe = weight.recipe
        key = id(x), *layout, dtype, recipe.activation_format, recipe.wgrad_input, stream
        given = self._thread.given
        if given is None or given.key != key:
            self._learn()
            given = self._thread.given = _Input(x, _Input.drop)
            given.key, given.users, given.fp8 = key, (), None
        given.users += (linear,)
        expected = self._expected.get(given.users[0], ())
        fp8, needs_dw = given.fp8, torch.is_grad_enabled() and weight.requires_grad
        if fp8 is not None and (fp8.serves_wgrad or not needs_dw):
            self.saved += 1
        else:
            self.casts += 1
            if len(expected) == len(given.users) == 1:
                return None  # not shared: its cast and product may be one recorded sequence
            fp8 = cast_activation(x.detach().to(dtype), recipe, columnwise=needs_dw)
        given.fp8 = None if len(given.users) == len(expected) else fp8
        return fp8


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fp8: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
        ctx.set_materialize_grads(False)  # a missing gradient stays None, as for a linear
        return fp8.relabel()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None  # the engine converts it where autocast's dtype is not x's
