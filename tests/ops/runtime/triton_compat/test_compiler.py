"""What is changed in the assembly of kernels that ask for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime.errors import OutOfResources, TritonError

from blocktensor.ops.runtime.triton_compat import compiler
from blocktensor.ops.runtime.triton_compat.compiler import NARROW, hopper_gemm, narrow_products

RUNTIME = triton.knobs.runtime


def product(columns: int) -> str:
    registers = ",".join(f"%r{i}" for i in range(columns // 2))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    return f"{name} {{{registers}}}, %rd1, %rd2, p, 1, 1;\n"


def test_the_last_quarter_of_the_registers_goes() -> None:
    """Of kernels with the mark."""
    ptx, narrow = (product(n) + "add.s32 %r1, %r2;\n" + product(n) for n in (128, 96))
    assert narrow_products(f"{NARROW}\n{ptx}") == f"{NARROW}\n{narrow}"
    assert narrow_products(ptx) == ptx


@pytest.mark.parametrize("ptx", [NARROW, NARROW + product(64), NARROW + product(128) + product(64)])
def test_unexpected_products_are_an_error(ptx: str) -> None:
    with pytest.raises(compiler.CannotNarrow, match="expected all of them"):
        narrow_products(ptx)


def test_the_passes_go_behind_a_hook_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def theirs(*args: Any) -> tuple[str, str]:
        seen.append(args and list(args[1]))
        return "their key", "their hash"

    monkeypatch.setattr(RUNTIME, "add_stages_inspection_hook", theirs)
    stages = {"ptx": lambda source, metadata: NARROW + product(128), "cubin": lambda *_: b""}
    with hopper_gemm():
        RUNTIME.add_stages_inspection_hook(None, stages, None, None, None)
        assert RUNTIME.add_stages_inspection_hook() == ("their key", "their hash")
    assert RUNTIME.add_stages_inspection_hook is theirs
    assert seen == [["ptx", "cubin"], ()]
    assert stages["ptx"](None, None) == NARROW + product(96)


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNTIME, "add_stages_inspection_hook", None)


@pytest.mark.usefixtures("unhooked")
def test_the_passes_are_gone_afterwards() -> None:
    with hopper_gemm():  # Triton 3.7 and later ask a hook for a part of the compiler's cache key
        assert RUNTIME.add_stages_inspection_hook() == ("", "")
    with pytest.raises(ZeroDivisionError), hopper_gemm(), hopper_gemm():
        raise ZeroDivisionError
    assert RUNTIME.add_stages_inspection_hook is None


@pytest.mark.usefixtures("unhooked")
def test_threads_take_turns() -> None:
    """Or one would leave its hook, or remove another's."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with hopper_gemm():
            inside.set()
            assert leave.wait(30)

    def enter() -> None:
        with hopper_gemm():
            pass

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hold)
        assert inside.wait(30)
        second = pool.submit(enter)
        leave.set()
        first.result(), second.result()
    assert RUNTIME.add_stages_inspection_hook is None


@pytest.mark.parametrize("version", ["12.8", "12.9"])
def test_only_kernels_that_ask_get_the_newer_ptxas(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ptxas", "ptxas-blackwell"):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho release {version}, V{version}.0\n")
        tool.chmod(0o755)
    monkeypatch.setattr(compiler, "_ptxas_of_sm90", lambda: triton.knobs.nvidia.ptxas)

    def assemble(ptx: str, metadata: object) -> str:
        return Path(triton.knobs.nvidia.ptxas.path).name

    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.ptxas = str(tmp_path / "ptxas")
        triton.knobs.nvidia.ptxas_blackwell = str(tmp_path / "ptxas-blackwell")
        run = compiler.with_newer_ptxas(assemble)
        assert run(compiler.NEWER_PTXAS, None) == (
            "ptxas-blackwell" if version == "12.8" else "ptxas"
        )
        assert run("// a kernel of others", None) == "ptxas"
        assert Path(triton.knobs.nvidia.ptxas.path).name == "ptxas"


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (OutOfResources(300000, 232448, "shared memory"), True),
        (TritonError("of any kind"), True),
        (compiler.CannotNarrow("products"), True),
        (RuntimeError("PassManager::run failed"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("of a caller"), False),
    ],
)
def test_which_errors_are_the_compilers(error: Exception, failed: bool) -> None:
    assert compiler.is_failed_compilation(error) == failed
