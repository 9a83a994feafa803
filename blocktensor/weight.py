"""BlockwiseFP8Weight: a trainable parameter that products see in FP8 and all else in full.

It wraps a high-precision ``master``. Optimizers, clipping, initialisation, ``state_dict`` and every
other op act on the master; ``F.linear``, ``mm``, ``matmul`` and ``addmm`` act on its FP8 form,
which is cast once per version of the master and shared by every view of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .forms import Forms, SquareForms
from .ops import checks, library
from .ops.layouts import SQUARE_BLOCK, Form
from .recipe import DEFAULT_RECIPE, Recipe
from .tensor import BlockwiseFP8Tensor, FP8Type

WEIGHT_OPS: dict[Any, Callable[..., Any]] = {}
"""Ops that do more than act on the master; filled by ``dispatch.py``."""


class FP8Cache:
    """The FP8 form of one master, kept for as long as it is needed and no longer.

    Valid for one version of the master. Released by the version's last backward: there will be as
    many as the previous version saw; in the first, the last is when no forward waits for one. So
    one backward a step leaves no FP8 bytes between steps, and N microbatches share one cast, but
    for the first step, which learns their number. A wrong guess costs a cast, never a bit.
    """

    __slots__ = (
        "_backwards",
        "_expected",
        "_key",
        "_pending",
        "_value",
        "casts",
        "main_grad",
        "master",
        "recipe",
    )

    def __init__(self, master: Tensor, recipe: Recipe) -> None:
        self.master = master
        self.recipe = recipe
        self.casts = 0
        self.main_grad: Tensor | None = None  # what weight gradients are added to, if anything
        self._value: Forms | None = None
        self._key: tuple[int, ...] | None = None
        self._pending = 0  # forwards of this version that wait for their backward
        self._backwards = 0  # backwards of this version
        self._expected: float | None = None  # how many there will be; None: not known yet

    def __getstate__(self) -> tuple[Tensor, Recipe]:  # copies and checkpoints cast for themselves
        return self.master, self.recipe

    def __setstate__(self, state: tuple[Tensor, Recipe]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def get(self, user: BlockwiseFP8Weight) -> Forms:
        """The FP8 form of the master as it is now; ``user`` is the weight, or a view of it."""
        master = self.master
        if not self.recipe.cache_weight or master.is_inference() or not library.is_real(master):
            return self._cast()  # a tracer's stand-in has no memory, and its cast is the graph's
        version = 0 if user.is_inference() else user._version
        key = version, master._version, master.data_ptr()
        if key != self._key:
            self._expected = self._backwards or self._expected
            self._backwards = self._pending = 0
            self._key, self._value = key, None
        elif self._value is None and user.is_leaf and user.grad is not None:
            # Used after its expected last backward, and it holds a gradient: this is one more
            # microbatch, and more may follow.
            self._expected = math.inf
        value = self._value  # read once: a backward pass in another thread may release it
        if value is None:
            value = self._value = self._cast()
        return value

    def tensor(self, user: BlockwiseFP8Weight) -> BlockwiseFP8Tensor:
        """:meth:`get` as a tensor."""
        value = self.get(user)
        if isinstance(value, BlockwiseFP8Tensor):
            return value
        made = BlockwiseFP8Tensor(
            *value.forms(),
            shape=self.master.shape,
            dtype=self.master.dtype,
            block_shape=SQUARE_BLOCK,
            recipe=self.recipe,
        )
        if self._value is value:
            self._value = made
        return made

    def before_backward(self) -> None:
        """A forward has been recorded whose backward will read the FP8 form."""
        self._pending += 1

    def after_backward(self) -> None:
        """A backward has read the FP8 form; release it if that was the last one expected."""
        self._pending -= 1
        self._backwards += 1
        expected = self._expected
        if self._pending <= 0 if expected is None else self._backwards >= expected:
            self._value = None

    def invalidate(self) -> None:
        """Forget the FP8 form: the next use casts again."""
        self._key = self._value = None

    def held(self) -> tuple[Form | None, Form | None]:
        """The rowwise and the columnwise (data, scale) held right now; this casts nothing."""
        value = self._value
        return (None, None) if value is None else value.forms()

    def nbytes(self) -> int:
        """Bytes of the FP8 form held right now."""
        return sum(tensor.nbytes for form in self.held() if form for tensor in form)

    def _cast(self) -> SquareForms:
        self.casts += 1
        return SquareForms.quantize(self.master, self.recipe)


class MasterType(FP8Type):
    """What trains: a high-precision ``master``, which all ops but a few act on."""

    master: Tensor

    @property
    def counted(self) -> Tensor:
        """The tensor whose version counter tells that the master has changed."""
        return self.master


class BlockwiseFP8Weight(MasterType):
    """A high-precision parameter whose products run in blockwise FP8 (128x128 blocks).

    Attributes:
        master: the high-precision values, ``[N, K]`` or ``[E, N, K]``, a plain tensor.
        recipe: the :class:`~blocktensor.Recipe` of its casts.
    """

    cache: FP8Cache
    transposed: bool

    @staticmethod
    def __new__(
        cls,
        master: Tensor,
        recipe: Recipe = DEFAULT_RECIPE,
        *,
        cache: FP8Cache | None = None,
        transposed: bool = False,
    ) -> BlockwiseFP8Weight:
        """Wrap ``master``; its storage is shared, not copied.

        Args:
            master: bf16, fp16 or fp32, ``[N, K]`` or ``[E, N, K]``; any strides.
            recipe: how it is cast.
            cache, transposed: for views of a weight: the weight's cache, and whether this view
                is its transpose.

        Raises:
            TypeError, ValueError: another dtype or rank.
        """
        checks.high_precision(master, "the weight")
        checks.rank(master, (2, 3), "the weight", "FP8 weights are [N, K] or [E, N, K]")
        self = cls.wrapper_of(master, master.dtype)
        self.master = master
        self.cache = FP8Cache(master, recipe) if cache is None else cache
        self.transposed = transposed
        return self

    @property
    def recipe(self) -> Recipe:
        """How this weight is cast."""
        return self.cache.recipe

    @property
    def counted(self) -> Tensor:
        """The cache's master, which below autograd does not share its counter with a transpose."""
        return self.cache.master

    @property
    def main_grad(self) -> Tensor | None:
        """An fp32 ``[N, K]`` buffer that backward adds weight gradients to, not to ``.grad``.

        The weight gradient's GEMM adds to it as it writes, so that any number of microbatches are
        summed in fp32 without another pass. ``.grad`` then stays None, and hooks that wait for it
        (DDP's, ``register_post_accumulate_grad_hook``) do not run. Zeroing it is up to its owner.
        Gradients that come through a view of the weight (``x @ w``) arrive in ``.grad``.

        Raises:
            TypeError, ValueError: set to what is not fp32 of the weight's shape and device, with
                rows contiguous.
        """
        return self.cache.main_grad

    @main_grad.setter
    def main_grad(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            checks.main_grad(buffer, self)
        self.cache.main_grad = buffer

    def forms(self) -> Forms:
        """The FP8 forms of the weight as it is now: cast at most once per version of the master."""
        return self.quantized() if self.transposed else self.cache.get(self)

    def quantized(self) -> BlockwiseFP8Tensor:
        """:meth:`forms` as a tensor."""
        fp8 = self.cache.tensor(self)
        if not self.transposed:
            return fp8
        return fp8.relabel(shape=self.shape, strides=self.stride(), transpose=True)

    def replace_master(self, master: Tensor) -> None:
        """Take another master of the same shape, dtype and device (``weight.data = …``)."""
        self.master = master
        recipe, main_grad = self.cache.recipe, self.cache.main_grad
        self.cache = FP8Cache(master.transpose(-1, -2) if self.transposed else master, recipe)
        self.cache.main_grad = main_grad

    def invalidate(self) -> None:
        """Cast again at the next use.

        Needed only after writing to the master's memory behind PyTorch's back (a raw pointer, a
        replayed CUDA graph); in-place ops are noticed.
        """
        self.cache.invalidate()

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["master"], (self.cache.recipe, self.transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Any, ...],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> BlockwiseFP8Weight:
        recipe, transposed = context
        master = inner["master"]
        cache = FP8Cache(master.transpose(-1, -2) if transposed else master, recipe)
        return BlockwiseFP8Weight(master, cache=cache, transposed=transposed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"BlockwiseFP8Weight(shape={list(self.shape)}, dtype={self.dtype}, "
            f"scale={self.recipe.scale!r}, device={str(self.device)!r}{grad})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        special = WEIGHT_OPS.get(func)
        if special is not None:
            return special(func, *args, **(kwargs or {}))
        return on_master(func, args, kwargs or {})


def on_master(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` with masters in place of what wraps them; in-place ops move versions on."""
    wrapped: dict[int, MasterType] = {}

    def unwrap(x: Any) -> Any:
        if not isinstance(x, MasterType):
            return x
        wrapped[id(x.master)] = x
        return x.master

    plain_args, plain_kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if func._schema.is_mutable or func.namespace == "c10d":  # no c10d op says what it writes
        # Below autograd an in-place op leaves the master's version alone, and an alias of the
        # weight made by .data has a counter of its own: count here, where both are known.
        for wrapper in wrapped.values():
            torch.autograd.graph.increment_version(wrapper.counted)
    return torch.utils._pytree.tree_map(
        lambda x: wrapped.get(id(x), x) if isinstance(x, Tensor) else x, out
    )
