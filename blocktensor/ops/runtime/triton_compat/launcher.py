"""Convert a compiled Triton kernel to parameters of the driver's ``cuLaunchKernelEx``.

A kernel gets its arguments except for constants; a tensor descriptor becomes a tensor map, its
shape and its strides. Then follow the addresses of two scratch memories. This holds from Triton 3.6
to 3.9. The parameters are compared with those that the kernel's own code declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ..launch import Launch, Rows, pointed_at


class Unsupported(Exception):
    """Raised for a kernel that only Triton's ordinary launch supports; the message says why."""


class UnknownTriton(Unsupported):
    """Raised if this Triton describes kernels in another way than the known versions."""


class Kernel(NamedTuple):
    """A compiled kernel, as ``player.cpp`` launches it.

    Attributes:
        configuration: the function's address, the grid, threads, bytes of shared memory, CTAs of a
            cluster, cooperative launch, programmatic dependent launch.
        parameters: each a tuple. ``("number", value)``, ``("rows", value)`` with :class:`Rows`,
            ``("pointer", tensor)``, or
            ``("map", tensor, dtype, swizzle, fill, strides, box, sizes)``, whose last three are
            arguments of ``cuTensorMapEncodeTiled``: innermost first, strides in bytes, including
            the stride of the whole tensor. Sizes may be :class:`Rows`.
    """

    configuration: tuple[Any, ...]
    parameters: list[tuple[Any, ...]]


def hooked() -> bool:
    """Return whether a launch hook is set, usually by a profiler."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def kernel_of(launch: Launch, compiled: Any) -> Kernel:
    """Return the kernel ``compiled``, which ``launch`` ran, with its parameters, to be repeated.

    Raises:
        Unsupported: only Triton's ordinary launch supports it.
    """
    try:
        found = _kernel_of(launch, compiled)
    except (AttributeError, KeyError, TypeError) as error:
        raise UnknownTriton(f"{type(error).__name__}: {error}") from error
    _check_parameters(found.parameters, compiled.asm["ptx"])
    return found


def _kernel_of(launch: Launch, compiled: Any) -> Kernel:
    run: Any = getattr(compiled, "run", None)
    metadata: Any = getattr(compiled, "metadata", None)
    if not isinstance(run, _driver().CudaLauncher):
        raise Unsupported(f"not a compiled CUDA kernel: {type(compiled)}")
    if run.global_scratch_size or run.profile_scratch_size or launch.kernel.pre_run_hooks:
        raise Unsupported("it allocates scratch memory or calls a hook at launch")
    if getattr(run, "gsan_enabled", False):
        raise Unsupported("a sanitizer passes arguments of its own")
    parameters: list[tuple[Any, ...]] = []
    described = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for of, value in _arguments(launch, compiled):
        tensor = pointed_at(value)
        if of == "constexpr":
            continue
        if of.startswith("tensordesc<") and tensor is not None:
            parameters.append(_map(value, tensor, next(described, None)))
            parameters += map(_number, (*value.shape, *value.strides))
        elif of.startswith("*") and tensor is value:
            parameters.append(("pointer", tensor))
        elif of in ("i32", "i64") and isinstance(value, int):
            parameters.append(_number(value))
        else:
            raise Unsupported(f"an argument {of} that is {value!r}")
    parameters += [("number", 0), ("number", 0)]  # no scratch memory
    configuration = (
        compiled.function,
        launch.grid[0],
        32 * metadata.num_warps,
        metadata.shared,
        metadata.num_ctas,
        bool(run.launch_cooperative_grid),
        bool(run.launch_pdl),
    )
    return Kernel(configuration, parameters)


def _number(value: int) -> tuple[str, int]:
    return ("rows", value) if type(value) is Rows else ("number", int(value))


_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[\n]*(?:\[(\d+)\])?")
_FITTING = {"map": ("b8[128]",), "pointer": ("u64",)}
_NUMBERS = "u32", "u64"  # numbers have 64 bits; a kernel reads the first 32 or all


def _check_parameters(parameters: list[tuple[Any, ...]], ptx: str) -> None:
    """Check that a kernel's code takes a map, a pointer or a number where it is passed one.

    Raises:
        UnknownTriton: the code takes other parameters.
    """
    start = ptx.find(".entry")
    entry = ptx[start : ptx.find(")", start)]
    taken = [f"{kind}[{count}]" if count else kind for kind, count in _PARAMETER.findall(entry)]
    passed = [kind for kind, *_ in parameters]
    fits = len(passed) == len(taken) and all(
        takes in _FITTING.get(kind, _NUMBERS) for kind, takes in zip(passed, taken, strict=True)
    )
    if not fits:
        raise UnknownTriton(f"a kernel takes {taken}, not {passed}")


def _driver() -> Any:
    from triton.backends.nvidia import driver

    return driver


def _arguments(launch: Launch, compiled: Any) -> Iterator[tuple[str, Any]]:
    """Return the type and value of every argument, in the order of the kernel's definition."""
    signature = list(compiled.src.signature.items())
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.constants
    if [name for name, _ in signature] != launch.kernel.arg_names or len(values) != len(signature):
        raise Unsupported(f"its signature is {signature}")
    return ((kind, values[name]) for name, kind in signature)


def _map(descriptor: Any, tensor: Tensor, metadata: Any) -> tuple[Any, ...]:
    """Return the parameter for the tensor map of a descriptor (``fill_tma_descriptor``)."""
    if metadata is None or metadata["fp4_padded"] or metadata.get("is_im2col"):
        raise Unsupported(f"a tensor descriptor with metadata {metadata}")
    dtype = _driver().TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    fill = 1 if descriptor.padding == "nan" else 0
    sizes = [x if type(x) is Rows else int(x) for x in reversed(descriptor.shape)]
    box = [int(x) for x in reversed(metadata["block_size"])]
    *outer, innermost = descriptor.strides
    if innermost != 1:
        raise Unsupported(f"a tensor descriptor with strides {descriptor.strides}")
    strides = [metadata["elem_size"] * int(x) for x in reversed(outer)]
    # the driver reads one fewer, but the array must not be empty
    strides.append(int(sizes[-1]) * (strides[-1] if strides else metadata["elem_size"]))
    return "map", tensor, dtype, metadata["swizzle"], fill, strides, box, sizes
