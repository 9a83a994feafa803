"""Compile planned launches for sm_90 on a machine without a GPU, and read their resources."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blocktensor.ops.formats import Quantized
from blocktensor.ops.runtime.launch import Launch
from blocktensor.ops.runtime.triton_compat import launcher
from blocktensor.ops.scale_layouts import empty_quantized
from tests.support.numeric import FORMATS

TUNED = triton.__version__.startswith("3.6.")
"""True with the Triton that registers were limited with: others spill more in casts."""

EDGES_SPILL = tuple(map(int, get_ptxas(90).version.split("."))) >= (13, 4)
"""True with an assembler that spills a few numbers of GEMMs outside of the loops over k blocks."""

_TYPES = {
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Resources:
    """What the compiled kernel takes of an SM, per thread and per program."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    cubin: bytes

    @functools.cached_property
    def sass(self) -> str:
        """The instructions: disassembled only where a test reads them, which takes a second."""
        return _tool(self.cubin, "nvdisasm", "-c", "-ndf")  # targets of branches take a third more

    @property
    def spills_among_products(self) -> bool:
        """True if a number is spilled or read back in a loop over k blocks."""
        blocks = re.split(r"^\.L_x_\d+:", self.sass, flags=re.MULTILINE)
        return any("QGMMA" in block and re.search(r"\b(STL|LDL)\b", block) for block in blocks)

    @property
    def spills_nothing_of_a_gemm(self) -> bool:
        """True if nothing is spilled; by ptxas 13.4, except a few numbers outside of the loops.

        That of Triton 3.9 stores the number of the warp at entry, where it has registers to spare.
        """
        if self.spilled_bytes == 0 or self.spills_among_products:
            return self.spilled_bytes == 0
        return EDGES_SPILL and self.spilled_bytes <= 80


def _source(launch: Launch) -> ASTSource:
    # The specialisation the run-time launcher would choose: 1 becomes a constant, multiples of 16
    # (and tensors that start at one) are marked divisible.
    signature, constants, attributes = {}, dict(launch.constants), {}
    for index, (param, arg) in enumerate(zip(launch.kernel.params, launch.args, strict=False)):
        if isinstance(arg, TensorDescriptor):
            box = f"{_TYPES[arg.base.dtype][1:]}{list(arg.block_shape)}"
            signature[param.name] = f"tensordesc<{box},{arg.layout!r}>"
        elif isinstance(arg, Tensor):
            signature[param.name] = _TYPES[arg.dtype]
            if arg.storage_offset() * arg.itemsize % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif arg == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", 1
        else:
            signature[param.name] = "i32" if arg < 2**31 else "i64"
            if arg % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    return source(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_for_sm90(launch: Launch) -> Resources:
    """Compile ``launch`` with Triton's own tools; the stack of a kernel is what it spills.

    No option whose default differs between versions of Triton is left out.
    """
    assert "enable_fp_fusion" in launch.options, launch.kernel
    with launch.compiling():
        kernel = triton.compile(
            _source(launch), target=GPUTarget("cuda", 90, 32), options=launch.options
        )
    assert_takes_what_recordings_pass(launch, kernel)
    usage = _tool(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, f"cuobjdump printed no resources: {usage}"
    return Resources(int(found[1]), int(found[2]), kernel.metadata.shared, kernel.asm["cubin"])


class _NoGPU:
    """Stands for the launcher of a kernel that cannot be loaded here."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False


def assert_takes_what_recordings_pass(launch: Launch, kernel: Any) -> None:
    """A recording of ``launch`` passes a map, a pointer or a number where the kernel takes one.

    Otherwise ``kernel_of`` raises.
    """
    compiled = SimpleNamespace(
        src=kernel.src, metadata=kernel.metadata, asm=kernel.asm, function=0, run=_NoGPU()
    )
    driver = SimpleNamespace(CudaLauncher=_NoGPU, TMA_DTYPE_DEVICE_TO_HOST=range(16))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launcher, "_driver", lambda: driver)
        assert len(launcher.kernel_of(launch, compiled).parameters) > 2


@functools.lru_cache(maxsize=64)  # other dtypes and shapes may give the same kernel
def _tool(cubin: bytes, name: str, *options: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Launches(list[Launch]):
    """Launches that were asked for, and did not run."""

    def compile(self, run: Callable[[], object], spills: int | Callable[[Launch], int] = 0) -> int:
        """Compile what ``run`` launches; how many that are. None spills more bytes than allowed."""
        self.clear()
        run()
        for launch in self:
            resources = compile_for_sm90(launch)
            allowed = spills if isinstance(spills, int) else spills(launch)
            assert resources.spilled_bytes <= allowed, f"{launch.kernel} {launch.constants}"
            assert 0 < resources.registers <= 255
        return len(self)


def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cast_like(*shape: int, rows: int = 1) -> Quantized:
    """A cast without memory in blocks of ``rows`` x 128."""
    return empty_quantized(shape, FORMATS[rows], torch.device("meta"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches are recorded instead of run."""
    found = Launches()
    monkeypatch.setattr(Launch, "__call__", lambda launch: found.append(launch))
    return found
