"""A Triton and a CUDA driver that run on the CPU: as much of them as recordings meet.

Kernels are Python functions of addresses and integers, which read and write real memory; so a
launch that passes a wrong address or number computes something wrong, or crashes. ``player.cpp`` is
the real one; it calls the driver by two pointers, which are those of functions here.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from blocktensor.ops.runtime import build_player
from blocktensor.ops.runtime.launch import Launch
from blocktensor.ops.runtime.specialize import Specialized, recorded
from blocktensor.ops.runtime.triton_compat import launcher


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


class CudaLauncher:
    """Stands for ``triton.backends.nvidia.driver.CudaLauncher``."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False


class Descriptor:
    """As much of Gluon's TensorDescriptor as is looked at."""

    padding = "zero"

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides = base, list(base.shape), list(base.stride())


METADATA = {"swizzle": 1, "elem_size": 4, "elem_type": 9, "block_size": [4], "fp4_padded": False}


class Compiled(SimpleNamespace):
    """Stands for ``CompiledKernel``, which is unloaded when nobody holds it; Triton may not."""


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Map(ctypes.Structure):
    """As much of a tensor map as kernels here read."""

    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint64)]


FUNCTIONS: dict[int, Callable[[Any, Any], None]] = {}
"""What the driver runs, by the addresses of compiled functions."""

encoded: list[tuple[int, ...]] = []
"""Address, dtype, rank, size, box, swizzle and fill of every tensor map that was encoded."""

errors: list[BaseException] = []
"""What kernels raised."""


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
def launch_kernel(config: Any, function: int, parameters: Any, _: Any) -> int:
    try:
        FUNCTIONS[function](config.contents, parameters)
    except BaseException as error:
        errors.append(error)
        return 700
    return 0


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Map),
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_uint64,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint)] * 2,
    *[ctypes.c_int] * 4,
)
def encode_map(
    made: Any, dtype: int, rank: int, address: int, sizes: Any, _: Any, box: Any, ones: Any,
    interleave: int, swizzle: int, promotion: int, fill: int,
) -> int:  # fmt: skip
    made.contents.address, made.contents.size = address, sizes[0]
    encoded.append((address, dtype, rank, sizes[0], box[0], swizzle, fill))
    return 0 if (ones[0], interleave, promotion) == (1, 0, 2) else 1


class Kernel:
    """A jitted kernel whose body is Python; ``body(*arguments)`` without the constants.

    ``ordinary`` counts Triton's own launches, ``direct`` holds the configurations of recorded ones:
    grid, threads, shared memory, stream, attributes.
    """

    _addresses = itertools.count(1234)

    def __init__(self, body: Callable[..., None], arg_names: list[str]) -> None:
        self.body, self.arg_names = body, arg_names
        self.pre_run_hooks: list[Any] = []
        self.ordinary = 0
        self.direct: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Any:
            self.ordinary += 1
            values = dict(zip(self.arg_names, args, strict=False)) | constants
            signature = {name: kind_of(values[name]) for name in self.arg_names}
            described = [METADATA for kind in signature.values() if "tensordesc" in kind]
            self.body(*(x for arg in args for x in expand(arg)))
            metadata = SimpleNamespace(tensordesc_meta=described, num_warps=4, num_ctas=1, shared=0)
            compiled = Compiled(
                src=SimpleNamespace(signature=signature),
                function=next(self._addresses),
                metadata=metadata,
                run=CudaLauncher(),
                asm={"ptx": code_of(signature.values())},
            )
            FUNCTIONS[compiled.function] = self._function(signature, weakref.ref(compiled))
            return compiled

        return run

    def _function(self, signature: dict[str, str], compiled: Any) -> Callable[..., None]:
        def function(config: Config, parameters: Any) -> None:
            assert compiled() is not None, "the kernel was unloaded"
            blocks = config.grid_y, config.grid_z, config.block_y, config.block_z
            assert blocks == (1, 1, 1, 1)
            found = config.grid_x, config.block_x, config.shared, config.stream, config.count
            self.direct.append(found)
            addresses = iter(parameters[i] for i in itertools.count())
            values: list[Any] = []
            for kind in signature.values():
                if kind.startswith("tensordesc"):
                    found = Map.from_address(next(addresses))
                    values.append(SimpleNamespace(address=found.address, size=found.size))
                    values += (ctypes.c_int.from_address(next(addresses)).value for _ in range(2))
                elif kind == "i32":
                    values.append(ctypes.c_int.from_address(next(addresses)).value)
                elif kind != "constexpr":
                    values.append(ctypes.c_uint64.from_address(next(addresses)).value)
            scratch = [ctypes.c_uint64.from_address(next(addresses)).value for _ in range(2)]
            assert scratch == [0, 0]
            self.body(*values)

        return function


def code_of(kinds: Iterable[str]) -> str:
    """The PTX of a kernel's entry: its parameters."""
    parameters: list[str] = []
    for kind in kinds:
        if kind.startswith("tensordesc"):
            parameters += [".param .align 64 .b8 p[128]", ".param .u32 p", ".param .u64 p"]
        elif kind != "constexpr":
            parameters.append(".param .u32 p" if kind == "i32" else ".param .u64 .ptr .global p")
    parameters += 2 * [".param .u64 .ptr .global .align 1 p"]
    return f".version 8.7\n.visible .entry kernel({','.join(parameters)})\n{{ }}"


def kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*fp32"
    if isinstance(value, Descriptor):
        return "tensordesc<fp32[4]>"
    return "constexpr" if isinstance(value, bool) else "i32"


def expand(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.data_ptr()]
    if isinstance(value, Descriptor):
        tensor_map = SimpleNamespace(address=value.base.data_ptr(), size=value.shape[0])
        return [tensor_map, *value.shape, *value.strides]
    return [value]


def draw(*shape: int) -> Tensor:
    """Whole numbers, so that sums are exact in any precision."""
    return torch.randint(-9, 10, shape).float()


def axpy_body(x: int, y: int, out: int, count: int, factor: int) -> None:
    for i in range(count):
        floats(out, count)[i] = factor * floats(x, count)[i] + floats(y, count)[i]


class Op:
    """A function with one kernel, specialized as the ops are."""

    def __init__(self, function: Callable[..., Any], kernel: Kernel) -> None:
        self.kernel, self.calls, self._function = kernel, 0, function
        self.table = Specialized(lambda *args: recorded(self._counted))
        self.call = self.table

    def _counted(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(self.kernel, *args)


def op(function: Callable[..., Any]) -> Op:
    return Op(function, Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"]))


def launch(kernel: Kernel, x: Tensor, y: Tensor, out: Tensor, factor: int) -> None:
    Launch(kernel, (1,), (x, y, out, x.numel(), factor), {"FLAG": True}, {})()


def axpy(kernel: Kernel, x: Tensor, y: Tensor, factor: int) -> Tensor:
    out = torch.empty_like(x)
    launch(kernel, x, y, out, factor)
    return out


def pointer(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def player() -> Any:
    """The module of ``player.cpp``; without a compiler the test is skipped."""
    try:
        return build_player.module(build_player.built())
    except build_player.CannotBuild as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let launches of :class:`Kernel` run and be repeated on the CPU; the driver, to be spoiled."""
    dtypes = {**{i: i for i in range(16)}, 8: 10, 9: 8, 10: 9}
    driver = SimpleNamespace(CudaLauncher=CudaLauncher, TMA_DTYPE_DEVICE_TO_HOST=dtypes)
    monkeypatch.setattr(launcher, "_driver", lambda: driver)
    player().use_driver(pointer(launch_kernel), pointer(encode_map), triton.knobs.runtime)
    monkeypatch.setattr(build_player, "player", player)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    encoded.clear()
    errors.clear()
    yield driver
    assert errors == []
    if torch.cuda.is_available():
        player().load(triton.knobs.runtime)
