"""Define the base of the FP8 types: overrides above autograd, and ops that act on masters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import patches
from ..ops.formats import BlockFormat
from ..ops.runtime.specialize import PLAIN
from .refusals import name_module, refuse, with_remedy
from .torch_internals.aot_autograd import plain_tangent
from .torch_internals.callers import HANDS_OUT, address_as_a_name, caller
from .torch_internals.frames import never_compiled, only_inlined

TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Overrides above autograd for all FP8 types, from ``overrides/torch_functions.py``.

Ops of other libraries, which may not be imported yet, go by their names.
"""

_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

_GRAD: Any = Tensor.grad  # the descriptor


@only_inlined
def wrapper(kind: type, size: Sequence[int], **layout: Any) -> Any:
    """Return a tensor without memory; C functions that would read it raise."""
    if patches.is_pending:
        patches.apply_for_fp8()
    made: Any = torch.Tensor._make_wrapper_subclass(kind, size, **layout)
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def count_write(*parts: Tensor) -> None:
    """Count a write to the data and scales of an FP8 tensor: ops below autograd count none.

    A backward whose forward has saved them then raises, as for plain tensors. Inference tensors
    have no count, and compilers count by themselves.
    """
    for part in parts:
        if type(part) in PLAIN and not part.is_inference():
            torch.autograd.graph.increment_version(part)


def counting_together(part: Tensor) -> AbstractContextManager[None]:
    """Let views of the data, scales or master of an FP8 tensor count writes together with it.

    Views that are made below autograd have counters of their own: a backward through a view would
    not notice a write to the whole, or to another view.
    """
    if type(part) not in PLAIN:
        return nullcontext()  # compilers count by themselves
    made: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return made


_INTERNED: dict[Any, object] = {}


def interned(*facts: Any) -> object:
    """Return the same object for equal facts, so that ``player.cpp`` compares only its address."""
    return _INTERNED.setdefault(facts, object())


class FP8Base(Tensor):
    """Base class of the FP8 types: overrides above autograd, and a table of ops below it."""

    _ops: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    """Implementations of aten ops, from :func:`implements`; ops of other libraries by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def format(self) -> BlockFormat:
        """The format of a weight's casts."""
        made: BlockFormat = self.recipe.weight_format  # type: ignore[attr-defined]
        return made

    @classmethod
    def _wrapper_of(cls, inner: Tensor, dtype: torch.dtype, offset: int | None = None) -> Any:
        """Return a tensor of this class with the layout of ``inner`` and the dtype ``dtype``.

        ``offset``: where it begins in its memory, if not where ``inner`` does.
        """
        return wrapper(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset() if offset is None else offset,
            dtype=dtype,
            device=inner.device,
        )

    def data_ptr(self) -> int:
        """Return the address of the master of a trainable weight.

        Raises:
            NotImplementedError: the tensor is frozen, and has several buffers.
        """
        name = address_as_a_name(self, caller())
        if name is not None:
            return name
        raise NotImplementedError(
            f"a {type(self).__name__} has no memory of its own: take .rowwise_data and "
            f".rowwise_scale, or call .dequantize()"
        )

    def _typed_storage(self) -> Any:
        """Return the storage; for a handle that another process opens, the storage of the master.

        Raises:
            NotImplementedError: a handle of a frozen tensor, which has several buffers.
        """
        if caller().place != HANDS_OUT:
            return super()._typed_storage()
        if isinstance(self, MasterBase):
            return self.master._typed_storage()
        raise with_remedy(
            f"reduce_tensor of a {type(self).__name__} would send the address of no memory: "
            f"reduce .rowwise_data and .rowwise_scale, what blocktensor.iter_fp8 yields, or "
            f".dequantize()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy a parameter without its gradient, as ``nn.Parameter`` does; ``Tensor`` copies it."""
        made = super().__deepcopy__(memo)
        if getattr(self, "_is_param", False):
            made.grad = None
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as other tensors do, except that the device is the device of the loaded parts.

        Data is pickled as bytes: torch pickles e4m3, but cannot load it.
        """
        rebuild, args = super().__reduce_ex__(protocol)
        if args[0] is not torch._utils._rebuild_wrapper_subclass:
            return rebuild, args
        _, _, about, state = args
        names = [n for n, x in state.items() if isinstance(x, Tensor) and x.dtype == _E4M3]
        return rebuilt, (about, _viewed(state, names, torch.uint8), names)

    def __setstate__(self, state: Any) -> None:
        """Restore a copy or pickle, which may be the first FP8 tensor of its process."""
        patches.apply_for_fp8()  # torch makes copies on meta without `wrapper`
        torch._utils._set_obj_state(self, state)

    def element_size(self) -> int:
        """Return the bytes of an element: 1 for a frozen weight (``get_memory_footprint``)."""
        forms = getattr(self, "rowwise_data", None), getattr(self, "columnwise_data", None)
        sizes = [form.element_size() for form in forms if form is not None]
        return sum(sizes) if sizes else super().element_size()

    # In every step optimizers read and reset the gradient of each weight, and compiled code reads
    # its sizes and strides: these methods take a quarter of the time of __torch_function__.

    def size(self, dim: Any = None) -> Any:
        """Return the shape, or one size, as any tensor's."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().size() if dim is None else super().size(dim)

    def stride(self, dim: Any = None) -> Any:
        """Return the strides, or one stride, as any tensor's."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().stride() if dim is None else super().stride(dim)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, as any tensor's."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: Tensor | None = _GRAD.__get__(self)
            return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __coerce_tangent_metadata__(self) -> Tensor:
        """Return a plain tensor, with which AOTAutograd traces the gradient."""
        return plain_tangent(self)

    def _stable_hash_for_caching(self) -> str:
        """Return the key for torch's compile cache: structure and layouts."""
        names, context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [getattr(self, name) for name in names]
        layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in inner]
        known = (type(self).__name__, self.dtype, self.requires_grad, names, layouts, context)
        return repr(known)

    @classmethod
    @never_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            override = TORCH_FUNCTIONS.get(func)
            if override is None and isinstance(func, _OPS):
                override = TORCH_FUNCTIONS.get(str(getattr(func, "overloadpacket", func)))
            if override is not None:
                return override(*args, **kwargs) if kwargs else override(*args)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        except (NotImplementedError, TypeError, ValueError) as error:
            if not is_compiling():
                name_module(error, (args, kwargs))
            raise

    @classmethod
    @never_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        implementation = cls._ops.get(func) or cls._ops.get(func.name())
        if implementation is not None:
            return implementation(func, *args, **(kwargs or {}))
        if is_composite(func):
            return func.decompose(*args, **(kwargs or {}))
        return cls._other_op(func, args, kwargs or {})

    @classmethod
    def _other_op(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that is not in the table and not composite."""
        refuse(func)


_E4M3 = torch.float8_e4m3fn


def _viewed(state: dict[str, Any], names: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """Return the attributes, with some tensors viewed in another dtype."""
    return {**state, **{name: state[name].view(dtype) for name in names}}


def rebuilt(about: tuple[Any, ...], state: dict[str, Any], e4m3: Sequence[str] = ()) -> Any:
    """Rebuild a tensor from a file: torch's function does not support ``map_location``.

    Args:
        about: arguments for ``torch._utils._rebuild_wrapper_subclass``.
        state: the attributes of the tensor.
        e4m3: the names of the attributes that are written as bytes.
    """
    kind, dtype, size, strides, offset, layout, device, requires_grad = about
    state = _viewed(state, e4m3, _E4M3)
    parts = [x for x in state.values() if isinstance(x, Tensor)]

    def make() -> Any:
        return wrapper(
            kind,
            size,
            strides=strides,
            storage_offset=offset,
            dtype=dtype,
            layout=layout,
            device=parts[0].device if parts else device,
            requires_grad=requires_grad,
        )

    return torch._tensor._rebuild_from_type_v2(make, kind, (), state)


class StraightThrough(torch.autograd.Function):
    """The high-precision values of an FP8 tensor; their gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype | None, of_master: bool) -> Tensor:
        made: Tensor = x.master.view_as(x.master) if of_master else x._values_in(dtype)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None  # autograd converts it to the dtype of x


class MasterBase(FP8Base):
    """Base class of tensors that wrap a high-precision master, on which most ops act."""

    master: Tensor
    transposed: bool = False
    """True if the tensor shows the transpose of its master."""

    def data_ptr(self) -> int:
        # Tensor.__deepcopy__ and __reduce_ex__ recognize wrappers by a null pointer
        return 0 if caller().module == "torch._tensor" else self.master.data_ptr()

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Any, expected_type: type | None = None
    ) -> Tensor | None:
        """Return the master if a compiled backward was traced with a plain gradient."""
        return self.master if expected_type is Tensor else None

    @property
    def _counted(self) -> Tensor:
        """The tensor whose version counter counts changes of the master."""
        return self.master

    @property
    def _readable(self) -> Tensor:
        """The master, for ops that only read it."""
        return self.master

    def _before_write(self) -> None:
        """Prepare for a write to the master."""


def readable(x: Any) -> Any:
    """Return the master of a weight, to be read only, or anything else unchanged."""
    return x._readable if isinstance(x, MasterBase) else x


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an op writes to."""
    # schemas of c10d ops do not mark writes
    is_any = func.namespace == "c10d"
    return tuple(
        (i, x.name)
        for i, x in enumerate(func._schema.arguments)
        if is_any or (x.alias_info is not None and x.alias_info.is_write)
    )


@functools.cache
def _out_arguments(func: Any) -> tuple[str, ...]:
    """Return the names of the ``out=`` arguments of an op, which it may resize."""
    return tuple(x.name for x in func._schema.arguments if x.is_out)


@functools.cache
def _hands_out_memory(func: Any) -> bool:
    """Return True if an op writes to an argument, or returns an argument or a view of one."""
    returns = func._schema.returns
    return bool(_written_arguments(func)) or any(x.alias_info is not None for x in returns)


def on_master(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on masters instead of their wrappers; in-place ops advance version counters."""
    outs = {n: x for n in _out_arguments(func) if isinstance(x := kwargs.get(n), MasterBase)}
    if outs:
        return _into_masters(func, args, kwargs, outs)
    wrapped: dict[int, MasterBase] = {}
    arguments = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)
    ]
    written = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, MasterBase)]
    hands_out = _hands_out_memory(func)
    for x in written:
        x._before_write()

    def unwrap(x: Any) -> Any:
        if not isinstance(x, MasterBase):
            return x
        master = x.master if hands_out else x._readable
        wrapped[id(master)] = x
        return master

    plain_args, plain_kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    # Below autograd an in-place op does not count in the master's version, and an alias made by
    # .data has its own counter: count here, where both are known.
    for x in written:
        torch.autograd.graph.increment_version(x._counted)
    return torch.utils._pytree.tree_map(
        lambda x: wrapped.get(id(x), x) if isinstance(x, Tensor) else x, out
    )


def _into_masters(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: Mapping[str, MasterBase]
) -> Any:
    """Run ``func(..., out=)`` and copy its results, since ``func`` would resize a master.

    Raises:
        ValueError: a result has another shape than its ``out``; no weight has changed.
    """
    made = {n: torch.empty(w.shape, dtype=w.dtype, device=w.device) for n, w in outs.items()}
    results = on_master(func, args, {**kwargs, **made})
    for name, w in outs.items():
        if made[name].shape != w.shape:
            raise ValueError(
                f"{func} makes {list(made[name].shape)}, and {name}= is an FP8 weight "
                f"{list(w.shape)}: expected one shape; give the module a new parameter"
            )
    for name, w in outs.items():
        on_master(torch.ops.aten.copy_.default, (w, made[name]), {})
    written = {id(made[name]): w for name, w in outs.items()}
    return torch.utils._pytree.tree_map(lambda x: written.get(id(x), x), results)


def implements(table: dict[Any, Callable[..., Any]], *ops: Any) -> Callable[..., Any]:
    """Return a decorator that enters a function into ``table`` as the implementation of ``ops``."""

    def enter(implementation: Callable[..., Any]) -> Callable[..., Any]:
        table.update(dict.fromkeys(ops, implementation))
        return implementation

    return enter


@functools.cache
def is_composite(func: Any) -> bool:
    """Return True for a composite op, except under inference_mode, where it stays whole.

    The caller then runs its parts (``func.decompose``), which have implementations.
    """
    has: bool = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return has


def view_of_its_kind(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Make views of normal tensors normal, and views of inference tensors inference tensors."""

    @functools.wraps(implementation)
    def run(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() == x.is_inference():
            return implementation(func, x, *args, **kwargs)
        with torch.inference_mode(x.is_inference()):
            return implementation(func, x, *args, **kwargs)

    return run


def only_dtype(x: Tensor, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the new dtype if arguments of ``_to_copy`` change the dtype and nothing else."""
    dtype: torch.dtype | None = kwargs.get("dtype")
    as_it_is = {
        ("dtype", dtype),
        ("device", x.device),
        ("layout", x.layout),
        ("memory_format", torch.preserve_format),
    }
    others = {item for item in kwargs.items() if item[1] and item[0] != "non_blocking"} - as_it_is
    return None if dtype == x.dtype or others else dtype
