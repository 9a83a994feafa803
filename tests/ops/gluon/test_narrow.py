"""The pass that makes products of 128 columns products of 96."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton

from blocktensor.ops.gluon import narrow
from blocktensor.ops.gluon.narrow import MARK, install, narrow_products


def product(columns: int) -> str:
    registers = ",".join(f"%r{i}" for i in range(columns // 2))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    return f"{name} {{{registers}}}, %rd1, %rd2, p, 1, 1;\n"


def test_the_last_quarter_of_the_registers_goes() -> None:
    narrowed = narrow_products(MARK + "\n" + product(128) + "add.s32 %r1, %r2;\n" + product(128))
    assert narrowed == MARK + "\n" + product(96) + "add.s32 %r1, %r2;\n" + product(96)


def test_kernels_without_the_mark_are_left_alone() -> None:
    assert narrow_products(product(128)) == product(128)


@pytest.mark.parametrize("ptx", [MARK, MARK + product(64), MARK + product(128) + product(64)])
def test_unexpected_products_are_an_error(ptx: str) -> None:
    with pytest.raises(RuntimeError, match="expected all of them"):
        narrow_products(ptx)


def test_the_pass_goes_behind_a_hook_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    theirs = lambda backend, stages, *_: seen.append(list(stages))  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", theirs)
    monkeypatch.setattr(narrow, "KNOWN", True)
    install()
    ours = triton.knobs.runtime.add_stages_inspection_hook
    install()
    assert triton.knobs.runtime.add_stages_inspection_hook is ours
    stages = {"ptx": lambda source, metadata: MARK + product(128), "cubin": None}
    ours(None, stages, None, None, None)
    assert seen == [["ptx", "cubin"]]
    assert stages["ptx"](None, None) == MARK + product(96)


def test_an_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(narrow, "KNOWN", False)
    install()
    assert triton.knobs.runtime.add_stages_inspection_hook is None
