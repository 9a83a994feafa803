"""Triton's launch functions in C, called without the Python around them.

``replay.py`` calls them with pointers as integers and with tensor maps that were made before. A
call has a head (grid, stream, compiled function, hooks), then the kernel's arguments, where a
tensor descriptor stands for a tensor map, its shape and its strides. Two kinds of launcher are
known, see :data:`LAUNCHERS`.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ..launch import Launch, Rows, pointed_at

STREAM = 3
"""Index of the stream in the head of a call."""


class Unsupported(Exception):
    """Raised for a kernel that only Triton's ordinary launch can launch; the message says why."""


class RawKernel(NamedTuple):
    """A compiled kernel's C function, and its arguments but for those that change.

    Attributes:
        launch: the C function: ``launch(*head, *arguments)``, or ``launch(*head, arguments)`` if
            ``in_tuple``.
        head: the first arguments; the stream is missing.
        arguments: those of the kernel; pointers, numbers of rows and tensor maps are missing.
        pointers: places in ``arguments`` of pointers, each with its tensor.
        rows: places of :class:`~..launch.Rows`.
        maps: places of tensor maps, each with its tensor and a function that makes a map for
            another address.
        in_tuple: True if the C function takes the kernel's arguments as one tuple.
        compiled: the compiled kernel, to be held as long as it is launched: Triton replaces one
            that another thread compiles too, and from 3.8 on unloads the one that nobody holds.
    """

    launch: Callable[..., None]
    head: list[Any]
    arguments: list[Any]
    pointers: list[tuple[int, Tensor]]
    rows: list[int]
    maps: list[tuple[int, Tensor, Callable[[int], Any]]]
    in_tuple: bool
    compiled: Any


class Launcher(NamedTuple):
    """One kind of launch function.

    Attributes:
        tritons: the versions that have it.
        matches: ``matches(driver)`` is True if the installed driver has it.
        head: ``head(grid, launcher_object, compiled)`` makes the first arguments of a call.
        function: ``function(launcher_object)`` returns the C function.
        keeps_constants: True if the arguments include a None for each constant.
        in_tuple: see :class:`RawKernel`.
    """

    tritons: str
    matches: Callable[[Any], bool]
    head: Callable[[int, Any, Any], list[Any]]
    function: Callable[[Any], Callable[..., None]]
    keeps_constants: bool
    in_tuple: bool


def _has_a_function_per_signature(driver: Any) -> bool:
    # Grid x, y, z; stream; function; cooperative, PDL; global and profile scratch; kernel metadata,
    # launch metadata, enter hook, exit hook
    return getattr(driver, "_BASE_ARGS_FORMAT", None) == "iiiKKppOOOOOO"


def _head_per_signature(grid: int, run: Any, compiled: Any) -> list[Any]:
    return [
        grid, 1, 1, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None,
        None, compiled.packed_metadata, None, None, None,
    ]  # fmt: skip


def _function_per_signature(run: Any) -> Callable[..., None]:
    """Return the C function, which Triton wraps if a kernel has tensor descriptors."""
    launch = run.launch
    if isinstance(launch, types.FunctionType):
        names = launch.__code__.co_freevars
        if names != ("launcher", "tensordesc_indices", "tensordesc_meta"):
            raise Unsupported(f"its launcher closes over {names}")
        launch = launch.__closure__[0].cell_contents  # type: ignore[index]
    return _builtin(launch)


def _has_one_function(driver: Any) -> bool:
    described = hasattr(driver, "annotate_arguments") and hasattr(driver, "make_kernel_signature")
    called = list(inspect.signature(driver.CudaLauncher.__call__).parameters)
    expected = "self gridX gridY gridZ stream function kernel_metadata launch_metadata "
    return described and called == [
        *expected.split(),
        "launch_enter_hook",
        "launch_exit_hook",
        "args",
    ]


def _head_of_one_function(grid: int, run: Any, compiled: Any) -> list[Any]:
    # As above, but kernel and launch metadata and hooks come before the two scratches; then a
    # description of the arguments, all of which go to the kernel (constants are left out), and
    # their types, a byte each.
    driver, types_ = _driver(), run.kernel_signature
    passed = [driver.PyKernelArg(nested_tuple=None, type=driver.ARG_KERNEL)] * len(types_)
    return [
        grid, 1, 1, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl,
        compiled.packed_metadata, None, None, None, None, None, passed, types_,
    ]  # fmt: skip


def _one_function(run: Any) -> Callable[..., None]:
    return _builtin(triton.runtime.driver.active.utils.launch)


def _builtin(launch: Any) -> Callable[..., None]:
    if not isinstance(launch, types.BuiltinFunctionType):
        raise Unsupported(f"its launcher is {launch!r}")
    return launch


LAUNCHERS = (
    Launcher(
        "3.6", _has_a_function_per_signature, _head_per_signature, _function_per_signature,
        keeps_constants=True, in_tuple=False,
    ),
    Launcher(
        "3.7 to 3.9", _has_one_function, _head_of_one_function, _one_function,
        keeps_constants=False, in_tuple=True,
    ),
)  # fmt: skip
"""Triton 3.6 compiles a C function for every signature; later ones have one for all kernels, which
reads the types of the arguments from a description."""


@functools.cache
def launcher() -> Launcher | None:
    """Return the kind of launcher of the installed Triton; None, with a warning, if unknown."""
    try:
        driver = _driver()
        hooked()
        found = next((kind for kind in LAUNCHERS if kind.matches(driver)), None)
    except (ImportError, AttributeError, ValueError, TypeError):
        found = None
    if found is None:
        known = ", ".join(kind.tritons for kind in LAUNCHERS)
        warnings.warn(
            f"blocktensor: Triton {triton.__version__} launches kernels in another way than those "
            f"known ({known}): its ordinary launch is used, which computes the same and takes some "
            f"40 us more of host time",
            stacklevel=2,
        )
    return found


def hooked() -> bool:
    """Return whether a launch hook is set, usually by a profiler."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def raw_kernel(launch: Launch, compiled: Any) -> RawKernel:
    """Return what repeats ``launch``, which ran the kernel ``compiled``.

    Raises:
        Unsupported: only Triton's ordinary launch can launch it.
    """
    kind, run = launcher(), getattr(compiled, "run", None)
    if kind is None or not isinstance(run, _driver().CudaLauncher):
        raise Unsupported(f"not a compiled CUDA kernel: {type(compiled)}")
    if run.global_scratch_size or run.profile_scratch_size or launch.kernel.pre_run_hooks:
        raise Unsupported("it allocates scratch memory or calls a hook at launch")
    if getattr(run, "gsan_enabled", False):
        raise Unsupported("a sanitizer passes arguments of its own")
    arguments: list[Any] = []
    pointers: list[tuple[int, Tensor]] = []
    rows: list[int] = []
    maps: list[tuple[int, Tensor, Callable[[int], Any]]] = []
    described = iter(compiled.metadata.tensordesc_meta or ())
    for of, value in _parameters(launch, compiled):
        tensor, place = pointed_at(value), len(arguments)
        if of == "constexpr":
            arguments += [None] if kind.keeps_constants else []
        elif of.startswith("tensordesc<") and tensor is not None:
            maps.append((place, tensor, _maps_like(value, next(described, None))))
            arguments += [None, *value.shape, *value.strides]
        elif of.startswith("*") and tensor is value:
            pointers.append((place, tensor))
            arguments.append(None)
        elif of in ("i32", "i64") and isinstance(value, int):
            rows += [place] if type(value) is Rows else []
            arguments.append(int(value))
        else:
            raise Unsupported(f"an argument {of} that is {value!r}")
    head = kind.head(launch.grid[0], run, compiled)
    function = kind.function(run)
    return RawKernel(function, head, arguments, pointers, rows, maps, kind.in_tuple, compiled)


def _driver() -> Any:
    from triton.backends.nvidia import driver

    return driver


def _parameters(launch: Launch, compiled: Any) -> Iterator[tuple[str, Any]]:
    """Return type and value of every parameter, in the order of the kernel's definition."""
    signature = list(compiled.src.signature.items())
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.constants
    if [name for name, _ in signature] != launch.kernel.arg_names or len(values) != len(signature):
        raise Unsupported(f"its signature is {signature}")
    return ((kind, values[name]) for name, kind in signature)


class _Base:
    """The part of a tensor that Triton reads to make a tensor map: its address."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


@functools.cache
def _count_parameters(function: Callable[..., Any]) -> int:
    # those of make_tensordesc_arg are 2, and 3 in Triton 3.8 and 3.9
    return len(inspect.signature(function).parameters)


def _maps_like(descriptor: Any, metadata: Any) -> Callable[[int], Any]:
    """Return the function that makes the map of ``descriptor`` for the tensor at an address.

    It is called for each layer of a model whenever sizes are new, and keeps no tensor alive.
    """
    if metadata is None or not hasattr(descriptor, "__dict__"):
        raise Unsupported("a tensor descriptor without metadata, or with slots")
    kind, fields = type(descriptor), {**vars(descriptor), "base": None}
    make, sizes = _driver().make_tensordesc_arg, [*descriptor.shape, *descriptor.strides]
    unused = [None] * (_count_parameters(make) - 2)

    def tensor_map(address: int) -> Any:
        at = object.__new__(kind)
        vars(at).update(fields, base=_Base(address))
        made, *rest = make(at, metadata, *unused)
        if rest != sizes:
            raise Unsupported(f"a tensor descriptor expands to {rest}")
        return made

    return tensor_map
