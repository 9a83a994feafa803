"""A Triton that compiles nothing and runs on the CPU: as much of it as the fast launcher meets.

Kernels are Python functions of addresses and integers, which read and write real memory; so a
launch that passes a wrong address or number computes something wrong, or crashes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops.runtime import replay, triton_abi
from blocktensor.ops.runtime.launch import Launch
from blocktensor.ops.runtime.specialize import Specialized, recorded

STREAM = 77


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


class Launcher:
    """Stands for ``triton.backends.nvidia.driver.CudaLauncher``."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch


class TensorMap:
    """What a kernel is given for a tensor descriptor."""

    def __init__(self, address: int, shape: list[int], block: int) -> None:
        self.address, self.shape, self.block = address, shape, block


class Descriptor:
    """As much of Gluon's TensorDescriptor as the launcher looks at."""

    padding = "zero"

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides = base, list(base.shape), list(base.stride())


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
            self._body([expand(v, {"block": 4}) for v in args])
            return SimpleNamespace(
                run=Launcher(self._launch(signature)),
                src=SimpleNamespace(signature=signature),
                function=1234,
                packed_metadata=(4, 1, 0),
                metadata=SimpleNamespace(tensordesc_meta=described),
            )

        return run

    def _launch(self, signature: dict[str, str]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            head, rest = (
                args[: len(triton_abi.HEAD_FORMAT)],
                list(args[len(triton_abi.HEAD_FORMAT) :]),
            )
            self.direct.append(head)
            values: list[Any] = []
            for kind in signature.values():
                value = rest.pop(0)
                if kind.startswith("tensordesc"):
                    values.append([value, *(rest.pop(0) for _ in range(2 * len(value.shape)))])
                elif kind != "constexpr":
                    values.append([value])
                else:
                    assert value is None
            assert not rest
            self._body(values)

        return launch

    def _body(self, values: list[list[Any]]) -> None:
        self.body(*(value for group in values for value in group))


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
    tensor_map = TensorMap(descriptor.base.data_ptr(), descriptor.shape, metadata["block"])
    return [tensor_map, *descriptor.shape, *descriptor.strides]


def empty_on_the_cpu(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


DRIVER = SimpleNamespace(
    CudaLauncher=Launcher,
    _BASE_ARGS_FORMAT=triton_abi.HEAD_FORMAT,
    make_tensordesc_arg=make_tensordesc_arg,
)


def draw(*shape: int) -> Tensor:
    """Whole numbers, so that sums are exact in any precision."""
    return torch.randint(-9, 10, shape).float()


def axpy_body(x: int, y: int, out: int, count: int, factor: int) -> None:
    for i in range(count):
        floats(out, count)[i] = factor * floats(x, count)[i] + floats(y, count)[i]


class Op:
    """A function with one kernel, specialized as the ops are."""

    def __init__(self, function: Callable[..., Any], kernel: Kernel) -> None:
        self.kernel, self.calls = kernel, 0
        self._function = function
        self.table = Specialized(lambda *args: recorded(self._counted))
        self.call = self.table.run

    def _counted(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(self.kernel, *args)


def op(function: Callable[..., Any], body: Any = axpy_body) -> Op:
    return Op(function, Kernel(body, ["x", "y", "out", "count", "factor", "FLAG"]))


def launch(kernel: Kernel, x: Tensor, y: Tensor, out: Tensor, factor: int) -> None:
    Launch(kernel, (1,), (x, y, out, x.numel(), factor), {"FLAG": True}, {})()


def axpy(kernel: Kernel, x: Tensor, y: Tensor, factor: int) -> Tensor:
    out = torch.empty_like(x)
    launch(kernel, x, y, out, factor)
    return out


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let launches of :class:`Kernel` run and be replayed on the CPU; the driver, to be spoiled."""
    driver = SimpleNamespace(**vars(DRIVER))
    monkeypatch.setattr(triton_abi, "_driver", lambda: driver)
    monkeypatch.setattr(triton_abi, "_c_function", lambda launch: launch)
    monkeypatch.setattr(replay, "current_device", lambda: -1)  # what CPU tensors say
    monkeypatch.setattr(replay, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(replay, "fresh_empty", lambda: empty_on_the_cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda index: _nothing())
    triton_abi.supported.cache_clear()
    yield driver
    triton_abi.supported.cache_clear()


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
