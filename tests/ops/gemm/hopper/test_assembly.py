"""What is changed in the assembly of kernels that ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from blocktensor.ops.gemm.hopper import assembly
from blocktensor.ops.gemm.hopper.assembly import (
    NARROW,
    NEWER_PTXAS,
    install,
    narrow_products,
    with_newer_ptxas,
)


def product(columns: int) -> str:
    registers = ",".join(f"%r{i}" for i in range(columns // 2))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    return f"{name} {{{registers}}}, %rd1, %rd2, p, 1, 1;\n"


def test_the_last_quarter_of_the_registers_goes() -> None:
    narrowed = narrow_products(NARROW + "\n" + product(128) + "add.s32 %r1, %r2;\n" + product(128))
    assert narrowed == NARROW + "\n" + product(96) + "add.s32 %r1, %r2;\n" + product(96)


def test_kernels_without_the_mark_are_left_alone() -> None:
    assert narrow_products(product(128)) == product(128)


@pytest.mark.parametrize("ptx", [NARROW, NARROW + product(64), NARROW + product(128) + product(64)])
def test_unexpected_products_are_an_error(ptx: str) -> None:
    with pytest.raises(RuntimeError, match="expected all of them"):
        narrow_products(ptx)


def test_the_pass_goes_behind_a_hook_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    theirs = lambda backend, stages, *_: seen.append(list(stages))  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", theirs)
    monkeypatch.setattr(assembly, "KNOWN", True)
    install()
    ours = triton.knobs.runtime.add_stages_inspection_hook
    install()
    assert triton.knobs.runtime.add_stages_inspection_hook is ours
    stages = {"ptx": lambda source, metadata: NARROW + product(128), "cubin": lambda *_: b""}
    ours(None, stages, None, None, None)
    assert seen == [["ptx", "cubin"]]
    assert stages["ptx"](None, None) == NARROW + product(96)


def test_an_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(assembly, "KNOWN", False)
    install()
    assert triton.knobs.runtime.add_stages_inspection_hook is None


def test_only_kernels_that_ask_get_the_newer_ptxas(tmp_path: Path) -> None:
    for name in ("ptxas", "ptxas-blackwell"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho release 12.8, V12.8.0\n")
        tool.chmod(0o755)

    def assemble(ptx: str, metadata: object) -> str:
        return Path(triton.knobs.nvidia.ptxas.path).name

    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.ptxas = str(tmp_path / "ptxas")
        run = with_newer_ptxas(assemble)
        assert run(NEWER_PTXAS, None) == "ptxas-blackwell"
        assert run("// a kernel of others", None) == "ptxas"
        (tmp_path / "ptxas-blackwell").unlink()
        assert run(NEWER_PTXAS, None) == "ptxas"
