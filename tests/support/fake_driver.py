"""A Triton that compiles nothing and runs on the CPU: as much of it as the fast launcher meets.

Kernels are Python functions of addresses and integers, which read and write real memory; so a
launch that passes a wrong address or number computes something wrong, or crashes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops.runtime import replay
from blocktensor.ops.runtime.launch import Launch
from blocktensor.ops.runtime.specialize import Specialized, recorded
from blocktensor.ops.runtime.triton_compat import launcher as launchers

STREAM = 77


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


class Launcher:
    """Stands for ``triton.backends.nvidia.driver.CudaLauncher``, of Triton 3.6 and of 3.7."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launch: Callable[..., None], types: list[str]) -> None:
        self.launch = launch
        self.kernel_signature = bytes(len(types))

    def __call__(
        self,
        gridX: int,
        gridY: int,
        gridZ: int,
        stream: int,
        function: int,
        kernel_metadata: Any,
        launch_metadata: Any,
        launch_enter_hook: Any,
        launch_exit_hook: Any,
        *args: Any,
    ) -> None:
        raise NotImplementedError


class KernelArg:
    """Stands for ``PyKernelArg`` of Triton 3.7."""

    def __init__(self, nested_tuple: None, type: int) -> None:
        assert (nested_tuple, type) == (None, ARG_KERNEL)


ARG_KERNEL = 7


class Descriptor:
    """As much of Gluon's TensorDescriptor as the launcher looks at."""

    padding = "zero"

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides = base, list(base.shape), list(base.stride())


class Compiled(SimpleNamespace):
    """Stands for ``CompiledKernel``, which is unloaded when nobody holds it; Triton may not."""


class Kernel:
    """A jitted kernel whose body is Python; ``body(*arguments)`` without the constants.

    ``ordinary`` counts Triton's own launches, ``direct`` holds the heads of the fast ones.
    """

    def __init__(self, body: Callable[..., None], arg_names: list[str]) -> None:
        self.body, self.arg_names = body, arg_names
        self.pre_run_hooks: list[Any] = []
        self.ordinary = 0
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Any:
            self.ordinary += 1
            values = dict(zip(self.arg_names, args, strict=False)) | constants
            signature = {name: kind_of(values[name]) for name in self.arg_names}
            described = [{"block": 4} for kind in signature.values() if "tensordesc" in kind]
            self.body(*(x for arg in args for x in expand(arg, {"block": 4})))
            compiled = Compiled(
                src=SimpleNamespace(signature=signature),
                function=1234,
                packed_metadata=(4, 1, 0),
                metadata=SimpleNamespace(tensordesc_meta=described),
            )
            launch = self._launch(signature, weakref.ref(compiled))
            compiled.run = Launcher(launch, flat_types(signature, args))
            return compiled

        return run

    def _launch(self, signature: dict[str, str], compiled: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            assert compiled() is not None, "the kernel was unloaded"
            in_tuple = isinstance(args[-1], tuple) and len(args) == 16
            head, rest = (args[:-1], list(args[-1])) if in_tuple else (args[:13], list(args[13:]))
            if in_tuple:
                assert len(head[-2]) == len(head[-1]) == len(rest)
            self.direct.append(head)
            values: list[Any] = []
            for kind in signature.values():
                if kind == "constexpr":
                    assert in_tuple or rest.pop(0) is None
                    continue
                values.append(rest.pop(0))
                if kind.startswith("tensordesc"):
                    values += (rest.pop(0) for _ in range(2 * len(values[-1].shape)))
            assert not rest
            self.body(*values)

        return launch


def flat_types(signature: dict[str, str], args: tuple[Any, ...]) -> list[str]:
    """The types of all numbers that a kernel is given: a tensor map has its shape and strides."""
    types = []
    for kind, value in zip(signature.values(), args, strict=False):
        if isinstance(value, Descriptor):
            types += ["nvTmaDesc", *["i64"] * 2 * len(value.shape)]
        elif kind != "constexpr":
            types.append(kind)
    return types


def kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*fp32"
    if isinstance(value, Descriptor):
        return "tensordesc<fp32[4]>"
    return "constexpr" if isinstance(value, bool) else "i32"


def expand(value: Any, metadata: dict[str, int]) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.data_ptr()]
    if isinstance(value, Descriptor):
        return make_tensordesc_arg(value, metadata)
    return [value]


def make_tensordesc_arg(descriptor: Any, metadata: dict[str, int]) -> list[Any]:
    assert metadata == {"block": 4}
    tensor_map = SimpleNamespace(address=descriptor.base.data_ptr(), shape=descriptor.shape)
    return [tensor_map, *descriptor.shape, *descriptor.strides]


DRIVERS = {
    "3.6": SimpleNamespace(
        CudaLauncher=Launcher,
        _BASE_ARGS_FORMAT="iiiKKppOOOOOO",
        make_tensordesc_arg=make_tensordesc_arg,
    ),
    "3.7": SimpleNamespace(
        CudaLauncher=Launcher,
        annotate_arguments=None,
        make_kernel_signature=None,
        PyKernelArg=KernelArg,
        ARG_KERNEL=ARG_KERNEL,
        make_tensordesc_arg=lambda tensor, metadata, _: make_tensordesc_arg(tensor, metadata),
    ),
}
"""As much of ``triton.backends.nvidia.driver`` as the fast launcher looks at, by version."""


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


@pytest.fixture(params=DRIVERS)
def fake_driver(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """Let launches of :class:`Kernel` run and be replayed on the CPU; the driver, to be spoiled."""
    driver = SimpleNamespace(**vars(DRIVERS[request.param]))
    of_run = [kind._replace(function=lambda run: run.launch) for kind in launchers.LAUNCHERS]
    monkeypatch.setattr(launchers, "_driver", lambda: driver)
    monkeypatch.setattr(launchers, "LAUNCHERS", of_run)
    monkeypatch.setattr(replay, "current_device", lambda: -1)  # what CPU tensors say
    monkeypatch.setattr(replay, "current_stream", lambda device: STREAM)
    empty = torch.empty_strided
    monkeypatch.setattr(replay, "fresh_empty", lambda: lambda *at: empty(*at[:2], dtype=at[2]))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    launchers.launcher.cache_clear()
    yield driver
    launchers.launcher.cache_clear()
