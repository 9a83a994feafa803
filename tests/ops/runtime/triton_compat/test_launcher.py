"""What recordings ask of Triton, and what becomes of kernels where the answer is no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from blocktensor.ops.runtime import record
from tests.support.fake_driver import Kernel, axpy, draw, fake_driver, op

__all__ = ["fake_driver"]


@pytest.mark.usefixtures("fake_driver")
@pytest.mark.parametrize(
    "change",
    [
        "global_scratch_size",
        "profile_scratch_size",
        "gsan_enabled",
        "a hook",
        "names",
        "kinds",
        "interpreter",
        "no metadata",
        "one parameter more",
        "another parameter",
    ],
)
def test_kernels_that_need_more_or_are_unexpected_are_launched_ordinarily(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Kernel.__getitem__

    def compiled(kernel: Kernel, grid: tuple[int]) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Any:
            made = original(kernel, grid)(*args, **constants)
            signature = made.src.signature
            if change == "a hook":
                kernel.pre_run_hooks.append(print)
            elif change == "names":
                signature["another"] = signature.pop("x")
            elif change == "kinds":
                signature["count"] = "fp64"
            elif change == "no metadata":
                del made.metadata.num_ctas
            elif change == "one parameter more":
                made.asm["ptx"] = made.asm["ptx"].replace(")", ",.param .u32 p)")
            elif change == "another parameter":
                made.asm["ptx"] = made.asm["ptx"].replace(".u64 .ptr", ".u32", 1)
            else:
                setattr(made.run, change, 8)
            return None if change == "interpreter" else made

        return run

    monkeypatch.setattr(Kernel, "__getitem__", compiled)
    record._warn_once.cache_clear()
    a, (x, y) = op(axpy), draw(2, 8)
    if "metadata" in change or "parameter" in change:
        with pytest.warns(UserWarning, match="describes them in another way than 3.6 to 3.9"):
            a.call(x, y, 3)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert a.kernel.direct == []
    assert a.kernel.ordinary in (3, 4)


@pytest.mark.usefixtures("fake_driver")
def test_hooks_are_served_by_the_ordinary_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, runtime = op(axpy), triton.knobs.runtime
    args = *draw(2, 8), 3
    runtime.launch_enter_hook.add(print)  # before anything is recorded
    a.call(*args), a.call(*args)
    runtime.launch_enter_hook.remove(print)
    a.call(*args), a.call(*args)
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(runtime, hook)
        chain.add(print)
        a.call(*args)
        chain.remove(print)
    for own in (print, None):
        monkeypatch.setattr(runtime, "launch_enter_hook", own)
        a.call(*args)
    assert (a.kernel.ordinary, len(a.kernel.direct)) == (6, 2)
