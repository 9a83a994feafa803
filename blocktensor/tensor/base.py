"""What the FP8 types have in common: overrides above autograd, and ops that act on masters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .accelerate_internals import address_of_bytes, names_by_address
from .aot_autograd import plain_tangent
from .module_of_error import name_module
from .package_source import source_key

TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Overrides above autograd for all FP8 types, from ``autograd/torch_functions.py``.

An op of another library, which may not be imported yet, goes by its name.
"""

_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)

_GRAD: Any = Tensor.grad  # the descriptor


def without_memory(wrapper: Any) -> Any:
    """Make functions in C that read memory raise for a wrapper, whose pointer is null."""
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


class FP8Base(Tensor):
    """Base class of the FP8 types: overrides above autograd, and no constructor of Tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def wrapper_of(cls, inner: Tensor, dtype: torch.dtype) -> Any:
        """A tensor of this class that is laid out as ``inner`` and shows ``dtype``."""
        return without_memory(
            torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=dtype,
                device=inner.device,
            )
        )

    def data_ptr(self) -> int:
        """The address of the master of a trainable weight.

        Raises:
            NotImplementedError: the tensor is frozen, and has several addresses.
        """
        # Tensor.__deepcopy__ and __reduce_ex__ tell wrappers by a null pointer
        if sys._getframe(1).f_globals.get("__name__") == "torch._tensor":
            return 0
        return self._address(sys._getframe(1))

    def _address(self, caller: FrameType) -> int:
        if names_by_address(caller):
            return address_of_bytes(self)
        raise NotImplementedError(
            f"a {type(self).__name__} has no memory of its own: take .rowwise_data and "
            f".rowwise_scale, or call .dequantize()"
        )

    def _use_count(self) -> int:
        """As of any tensor; refuses the swap with which a parametrization would end FP8.

        ``register_parametrization`` gives the parameter the content of ``right_inverse(weight)``,
        which is plain where that computes new values. A swap of a tensor with itself, which changes
        nothing, is allowed whoever uses it.
        """
        frame = sys._getframe(1).f_back
        if frame is not None and frame.f_code.co_name == "swap_tensors":
            names = frame.f_locals
            if names.get("t1") is self and names.get("t2") is self:
                return 1
        caller = frame
        while caller is not None and caller.f_code.co_name == "swap_tensors":  # torch's and ours
            caller = caller.f_back
        if caller is not None and caller.f_code.co_name == "_maybe_set":
            is_parametrize = caller.f_globals.get("__name__") == "torch.nn.utils.parametrize"
            if is_parametrize and not isinstance(caller.f_locals.get("src"), FP8Base):
                raise NotImplementedError(
                    f"this parametrization would make an FP8 weight {list(self.shape)} plain, so "
                    f"that its linear ran in high precision: register it before converting, which "
                    f"then leaves the linear alone, or convert with skip=[...]"
                )
        count: int = super()._use_count()  # type: ignore[misc]
        return count

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as any tensor does, but for the device: that of the parts, as they are loaded.

        Data is written as bytes: torch pickles e4m3, but cannot load it.
        """
        rebuild, args = super().__reduce_ex__(protocol)
        if args[0] is not torch._utils._rebuild_wrapper_subclass:
            return rebuild, args
        _, _, wrapper, state = args
        names = [n for n, x in state.items() if isinstance(x, Tensor) and x.dtype == _E4M3]
        return rebuilt, (wrapper, _viewed(state, names, torch.uint8), names)

    def element_size(self) -> int:
        """Return the bytes an element takes: 1 of a frozen weight (``get_memory_footprint``)."""
        forms = getattr(self, "rowwise_data", None), getattr(self, "columnwise_data", None)
        sizes = [form.element_size() for form in forms if form is not None]
        return sum(sizes) if sizes else super().element_size()

    # Optimizers read and reset it for every weight in every step: here it takes a quarter of the
    # time that the way through __torch_function__ does.
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
        """What AOTAutograd traces as the gradient of a tensor of this type: a plain tensor."""
        return plain_tangent(self)

    def _stable_hash_for_caching(self) -> str:
        """The key of torch's compile cache: structure, layouts and our code, never values."""
        names, context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [getattr(self, name) for name in names]
        layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in inner]
        known = (type(self).__name__, self.dtype, self.requires_grad, names, layouts, context)
        return repr((known, source_key()))

    @classmethod
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


_E4M3 = torch.float8_e4m3fn


def _viewed(state: dict[str, Any], names: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """The attributes, with the bytes of some in another dtype."""
    return {**state, **{name: state[name].view(dtype) for name in names}}


def rebuilt(wrapper: tuple[Any, ...], state: dict[str, Any], e4m3: Sequence[str] = ()) -> Any:
    """Return a tensor from a file: torch's function cannot ask a ``map_location`` for a device.

    Args:
        wrapper: the arguments of ``torch._utils._rebuild_wrapper_subclass``.
        state: the attributes.
        e4m3: the names of those that are written as bytes.
    """
    kind, dtype, size, strides, offset, layout, device, requires_grad = wrapper
    state = _viewed(state, e4m3, _E4M3)
    parts = [x for x in state.values() if isinstance(x, Tensor)]

    def make() -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            kind,
            size,
            strides=strides,
            storage_offset=offset,
            dtype=dtype,
            layout=layout,
            device=parts[0].device if parts else device,
            requires_grad=requires_grad,
        )
        return without_memory(made)

    return torch._tensor._rebuild_from_type_v2(make, kind, (), state)


class MasterBase(FP8Base):
    """Base class of tensors that wrap a high-precision master, on which most ops act."""

    master: Tensor
    transposed: bool = False
    """Whether the tensor shows the transpose of its master."""

    def _address(self, caller: FrameType) -> int:
        return self.master.data_ptr()

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Any, expected_type: type | None = None
    ) -> Tensor | None:
        """Its master, where a compiled backward was traced with a plain gradient and gets this."""
        return self.master if expected_type is Tensor else None

    @property
    def counted(self) -> Tensor:
        """The tensor whose version counter tells that the master has changed."""
        return self.master

    @property
    def readable(self) -> Tensor:
        """The master, for ops that only read it."""
        return self.master

    def before_write(self) -> None:
        """A write to the master follows."""


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an op writes to."""
    # schemas of c10d ops name no writes
    is_any = func.namespace == "c10d"
    return tuple(
        (i, x.name)
        for i, x in enumerate(func._schema.arguments)
        if is_any or (x.alias_info is not None and x.alias_info.is_write)
    )


@functools.cache
def _hands_out_memory(func: Any) -> bool:
    """Whether an op writes to an argument, or returns one or a view of one."""
    returns = func._schema.returns
    return bool(_written_arguments(func)) or any(x.alias_info is not None for x in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MasterBase]:
    """The wrappers whose masters an op writes to; those that it only reads do not change."""
    arguments = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)
    ]
    return [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, MasterBase)]


def on_master(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` with masters in place of their wrappers; in-place ops advance versions."""
    wrapped: dict[int, MasterBase] = {}
    written = _written(func, args, kwargs)
    hands_out = _hands_out_memory(func)
    for wrapper in written:
        wrapper.before_write()

    def unwrap(x: Any) -> Any:
        if not isinstance(x, MasterBase):
            return x
        master = x.master if hands_out else x.readable
        wrapped[id(master)] = x
        return master

    plain_args, plain_kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    # Below autograd an in-place op leaves the master's version alone, and an alias of the weight
    # made by .data has a counter of its own: count here, where both are known.
    for wrapper in written:
        torch.autograd.graph.increment_version(wrapper.counted)
    return torch.utils._pytree.tree_map(
        lambda x: wrapped.get(id(x), x) if isinstance(x, Tensor) else x, out
    )


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether an op is made of others, as which it arrives; under inference_mode it arrives whole.

    Its parts are to be run then (``func.decompose``), for which there are rules.
    """
    has: bool = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return has


def view_of_its_kind(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Give views the kind of their base: under inference_mode, a normal tensor's stay normal."""

    @functools.wraps(implementation)
    def run(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() == x.is_inference():
            return implementation(func, x, *args, **kwargs)
        with torch.inference_mode(x.is_inference()):
            return implementation(func, x, *args, **kwargs)

    return run


def only_dtype(x: Tensor, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The other dtype that arguments of ``_to_copy`` ask for, if they ask for nothing else."""
    dtype: torch.dtype | None = kwargs.get("dtype")
    as_it_is = {
        *(("dtype", dtype), ("device", x.device), ("layout", x.layout)),
        ("memory_format", torch.preserve_format),
    }
    others = {item for item in kwargs.items() if item[1] and item[0] != "non_blocking"} - as_it_is
    return None if dtype == x.dtype or others else dtype
