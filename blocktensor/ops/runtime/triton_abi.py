"""Triton's internal launch interface, as ``replay.py`` uses it, and checks that it is unchanged.

Triton compiles a C function ``launch`` for every signature of a kernel. It can be called without
the Python around it, with pointers as integers and tensor maps made before. Its arguments are a
head (:data:`HEAD_FORMAT`), then the kernel's: for each constant an object that is ignored, for each
tensor descriptor a tensor map, its shape and its strides.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton
from torch import Tensor

from .launch import Launch, pointed_at

HEAD_FORMAT = "iiiKKppOOOOOO"
"""Grid x, y, z; stream; function; cooperative, PDL; global and profile scratch; kernel metadata,
launch metadata, enter hook, exit hook."""

STREAM = 3
"""The place of the stream in the head."""

_RUNTIME: Any = getattr(getattr(triton, "knobs", None), "runtime", None)  # Triton >= 3.4


class Unsupported(Exception):
    """A kernel that only Triton's ordinary launch can launch, with the reason."""


class RawKernel(NamedTuple):
    """A compiled kernel's C function, and its arguments without stream, pointers and tensor maps.

    ``pointers`` and ``maps`` are places in ``arguments``, each with its tensor; a place of a tensor
    map also has the function that makes a map for another address.
    """

    launch: Callable[..., None]
    arguments: list[Any]
    pointers: list[tuple[int, Tensor]]
    maps: list[tuple[int, Tensor, Callable[[int], Any]]]


def hooked() -> bool:
    """True if a launch hook is set, usually by a profiler."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def supported() -> bool:
    """True if this Triton launches kernels as this file expects; warns once otherwise."""
    try:
        found = _driver()._BASE_ARGS_FORMAT
        hooked()
    except (ImportError, AttributeError) as error:
        found = f"unknown ({error})"
    if found == HEAD_FORMAT:
        return True
    warnings.warn(
        f"blocktensor: Triton {triton.__version__} launches kernels in another way than the tested "
        f"3.6 (arguments {found}, expected {HEAD_FORMAT}): its ordinary launch is used, which "
        f"computes the same and takes some 40 us more of host time",
        stacklevel=2,
    )
    return False


def raw_kernel(launch: Launch, compiled: Any) -> RawKernel:
    """How to repeat ``launch``, which ran ``compiled``; Unsupported if it needs Triton's launch."""
    run = getattr(compiled, "run", None)
    if not isinstance(run, _driver().CudaLauncher):
        raise Unsupported(f"not a compiled CUDA kernel: {type(compiled)}")
    if run.global_scratch_size or run.profile_scratch_size or launch.kernel.pre_run_hooks:
        raise Unsupported("it allocates scratch memory or calls a hook at launch")
    arguments = [
        launch.grid[0], 1, 1, 0, compiled.function,
        run.launch_cooperative_grid, run.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    ]  # fmt: skip
    pointers: list[tuple[int, Tensor]] = []
    maps: list[tuple[int, Tensor, Callable[[int], Any]]] = []
    described = iter(compiled.metadata.tensordesc_meta or ())
    for kind, value in _parameters(launch, compiled):
        tensor, place = pointed_at(value), len(arguments)
        if kind == "constexpr":
            arguments.append(None)
        elif kind.startswith("tensordesc<") and tensor is not None:
            geometry = _Geometry(list(value.shape), list(value.strides), value.padding)
            make = functools.partial(_tensor_map, geometry, next(described, None))
            maps.append((place, tensor, make))
            arguments += [None, *value.shape, *value.strides]
        elif kind.startswith("*") and tensor is value:
            pointers.append((place, tensor))
            arguments.append(0)
        elif kind in ("i32", "i64") and isinstance(value, int):
            arguments.append(value)
        else:
            raise Unsupported(f"an argument {kind} that is {value!r}")
    return RawKernel(_c_function(run.launch), arguments, pointers, maps)


def _driver() -> Any:
    from triton.backends.nvidia import driver

    return driver


def _parameters(launch: Launch, compiled: Any) -> Iterator[tuple[str, Any]]:
    """Type and value of every parameter, in the order of the kernel's definition."""
    signature = list(compiled.src.signature.items())
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.constants
    if [name for name, _ in signature] != launch.kernel.arg_names or len(values) != len(signature):
        raise Unsupported(f"its signature is {signature}")
    return ((kind, values[name]) for name, kind in signature)


def _c_function(launch: Any) -> Callable[..., None]:
    """The C function, which Triton wraps if a kernel has tensor descriptors."""
    if isinstance(launch, types.FunctionType):
        names = launch.__code__.co_freevars
        if names != ("launcher", "tensordesc_indices", "tensordesc_meta"):
            raise Unsupported(f"its launcher closes over {names}")
        launch = launch.__closure__[0].cell_contents  # type: ignore[index]
    if not isinstance(launch, types.BuiltinFunctionType):
        raise Unsupported(f"its launcher is {launch!r}")
    return launch


class _Geometry(NamedTuple):
    """The parts of a tensor descriptor that Triton reads to make a tensor map."""

    shape: list[int]
    strides: list[int]
    padding: str
    base: Any = None


class _Base:
    """The part of a tensor that Triton reads to make a tensor map: its address."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def _tensor_map(geometry: _Geometry, metadata: Any, address: int) -> Any:
    if metadata is None:
        raise Unsupported("a tensor descriptor without metadata")
    descriptor = geometry._replace(base=_Base(address))
    tensor_map, *rest = _driver().make_tensordesc_arg(descriptor, metadata)
    if rest != [*geometry.shape, *geometry.strides]:
        raise Unsupported(f"a tensor descriptor expands to {rest}")
    return tensor_map
