"""The hooks by which the linears of one module share the casts of their inputs.

Shared are the cast and the bytes saved of it. Every linear keeps an edge of its own to the input in
the autograd graph, so gradients meet where they would without sharing, and the cast that is kept
between two linears holds no graph.
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
from ..ops.checks import HIGH_PRECISION
from ..ops.runtime.specialize import must_dispatch
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor


class _Input(weakref.ref[Tensor]):
    """An input that a group is being given, and its cast while more linears are expected."""

    __slots__ = ("fp8", "key", "users")

    fp8: BlockwiseFP8Tensor | None
    key: Hashable
    users: tuple[str, ...]

    def drop(self) -> None:
        """Let go of the cast; called when the input dies, whose id may then be used again."""
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
        saved: casts that another linear's made unnecessary.
    """

    def __init__(self, name: str, linears: tuple[str, ...]) -> None:
        self.name, self.linears = name, linears
        self.casts = self.saved = 0
        self._expected: dict[str, tuple[str, ...]] = {}  # by the first to get an input: all who do
        self._handles: list[RemovableHandle] = []
        self._thread = _Thread()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _thread=_Thread())

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """Which linears were given one input, as found by running; a tuple for every input."""
        return tuple(self._expected.values())

    def attach(self, module: nn.Module) -> None:
        """Put the hooks on the module of this group and on its linears."""
        # The hooks hold no module: a model is freed as soon as nobody refers to it.
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
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._thread.running, self._thread.given = True, None

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            if result is not None:  # else an exception, which may have come before the last use
                self._learn()
            self._thread.running, self._thread.given = False, None

    def _learn(self) -> None:
        """Expect again, from the first that was given this input on, the linears that got it."""
        given = self._thread.given
        if given is not None:
            first = given.users[0]
            self._expected[first] = max(given.users, self._expected.get(first, ()), key=len)

    def _give(self, linear: str, module: nn.Linear, args: tuple[Any, ...]) -> Any:
        """The arguments of ``linear``, its input in FP8; None leaves them as they are."""
        # Compilers and selective checkpointing must see the same ops in every pass. The flag also
        # bounds the life of the memo: nothing is kept outside of the module's forward.
        if torch.compiler.is_compiling() or len(args) != 1 or not self._thread.running:
            return None
        x, weight = args[0], module.weight
        if must_dispatch(x) or torch._C._are_functorch_transforms_active():
            return None
        # changes of inference tensors are not counted; the linear raises for other misfits
        fits = x.dtype in HIGH_PRECISION and x.ndim > 0 and not x.is_inference()
        if not (fits and isinstance(weight, FP8Base)):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            fp8 = self._cast(linear, x, weight)
            if fp8 is None:
                return None
            return (_Shared.apply(x, fp8) if x.requires_grad and torch.is_grad_enabled() else fp8,)

    def _cast(self, linear: str, x: Tensor, weight: Any) -> BlockwiseFP8Tensor | None:
        """The cast of ``x``, made now or for another linear; None: the linear had better cast."""
        dtype = autocast_dtype(x) or x.dtype
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        layout = x._version, x.data_ptr(), x.shape, x.stride()  # .data = … leaves the version alone
        key = id(x), *layout, dtype, weight.recipe.activation_format, stream
        given = self._thread.given
        if given is None or given.key != key:
            self._learn()
            given = self._thread.given = _Input(x, _Input.drop)
            given.key, given.users, given.fp8 = key, (), None
        given.users += (linear,)
        expected = self._expected.get(given.users[0], ())
        fp8, columnwise = given.fp8, torch.is_grad_enabled() and weight.requires_grad
        if fp8 is not None and (fp8.columnwise_data is not None or not columnwise):
            self.saved += 1
        else:
            self.casts += 1
            if len(expected) == len(given.users) == 1:
                return None  # not shared: its cast and product may be one recorded sequence
            recipe = weight.recipe
            fp8 = BlockwiseFP8Tensor.cast(
                x.detach().to(dtype), recipe.activation_format, recipe, columnwise=columnwise
            )
        given.fp8 = None if len(given.users) == len(expected) else fp8
        return fp8


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fp8: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
        ctx.set_materialize_grads(False)  # no gradient is none, as for a linear
        return fp8.relabel()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None  # the engine converts it where autocast's dtype is not x's
