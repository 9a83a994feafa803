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
from blocktensor.ops.runtime.triton_compat.compiler import hopper_gemm

RUNTIME = triton.knobs.runtime


def test_the_pass_goes_behind_a_hook_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def theirs(*args: Any) -> tuple[str, str]:
        seen.append(args and list(args[1]))
        return "their key", "their hash"

    monkeypatch.setattr(RUNTIME, "add_stages_inspection_hook", theirs)
    monkeypatch.setattr(compiler, "with_newer_ptxas", lambda stage: ("with the pass", stage))
    stages = {"ptx": "their stage", "cubin": "their stage"}
    with hopper_gemm():
        RUNTIME.add_stages_inspection_hook(None, stages, None, None, None)
        assert RUNTIME.add_stages_inspection_hook() == ("their key", "their hash")
    assert RUNTIME.add_stages_inspection_hook is theirs
    assert seen == [["ptx", "cubin"], ()]
    assert stages == {"ptx": "their stage", "cubin": ("with the pass", "their stage")}


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNTIME, "add_stages_inspection_hook", None)


@pytest.mark.usefixtures("unhooked")
def test_the_pass_is_gone_afterwards() -> None:
    with hopper_gemm():  # Triton 3.7 and later ask a hook for a part of the compiler's cache key
        assert RUNTIME.add_stages_inspection_hook() == ("", "")
        assert RUNTIME.add_stages_inspection_hook(None, {"cubin": print}) is None
    with pytest.raises(ZeroDivisionError), hopper_gemm(), hopper_gemm():
        raise ZeroDivisionError
    assert RUNTIME.add_stages_inspection_hook is None


@pytest.mark.usefixtures("unhooked")
def test_threads_take_turns() -> None:
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
        (RuntimeError("PassManager::run failed"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("of a caller"), False),
    ],
)
def test_which_errors_are_the_compilers(error: Exception, failed: bool) -> None:
    assert compiler.is_failed_compilation(error) == failed
