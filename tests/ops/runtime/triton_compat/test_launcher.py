"""What the fast launcher asks of Triton, and what becomes of kernels where the answer is no."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from blocktensor.ops.runtime.triton_compat import launcher as launchers
from tests.support.fake_driver import Kernel, axpy, draw, fake_driver, op

__all__ = ["fake_driver"]


@pytest.mark.usefixtures("fake_driver")
@pytest.mark.parametrize(
    "change",
    [
        *("global_scratch_size", "profile_scratch_size", "gsan_enabled"),
        *("a hook", "names", "kinds", "interpreter"),
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
            else:
                setattr(made.run, change, 8)
            return None if change == "interpreter" else made

        return run

    monkeypatch.setattr(Kernel, "__getitem__", compiled)
    a = op(axpy)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert (a.kernel.ordinary, a.kernel.direct) == (3, [])


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


@pytest.mark.usefixtures("fake_driver")
def test_another_triton_gives_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "LAUNCHERS", ())
    a, b = op(axpy), op(axpy)
    pairs = [draw(2, size) for size in (8, 8, 4, 8)]
    with pytest.warns(UserWarning, match="in another way than those known") as caught:
        results = [(a.call(x, y, 3), b.call(x, y, 3)) for x, y in pairs]
    assert len(caught) == 1
    for (x, y), got in zip(pairs, results, strict=True):
        assert all(torch.equal(each, 3 * x + y) for each in got)
    assert (a.kernel.ordinary, a.kernel.direct) == (4, [])


@pytest.mark.parametrize(
    "change", ["_BASE_ARGS_FORMAT", "annotate_arguments", "make_kernel_signature", "called"]
)
def test_a_driver_that_lacks_a_part_or_is_called_otherwise_is_another(
    change: str, fake_driver: SimpleNamespace
) -> None:
    class Other(fake_driver.CudaLauncher):  # type: ignore[name-defined, misc]
        def __call__(self, gridX: int, *args: Any) -> None:
            raise NotImplementedError

    if change == "called":
        fake_driver.CudaLauncher, fake_driver._BASE_ARGS_FORMAT = Other, None
    elif hasattr(fake_driver, change):
        delattr(fake_driver, change)
    else:
        pytest.skip("of the other launcher")
    with pytest.warns(UserWarning, match="in another way than those known"):
        assert launchers.launcher() is None


def test_the_installed_triton_is_known() -> None:
    launchers.launcher.cache_clear()
    found = launchers.launcher()
    assert found is not None
    minor = int(triton.__version__.split(".")[1])
    assert found.tritons == ("3.6" if minor == 6 else "3.7 to 3.9")
    assert not launchers.hooked()


def test_the_c_function_of_a_wrapped_launcher() -> None:
    """Triton 3.6 wraps it for kernels with tensor descriptors."""
    from triton.backends.nvidia import driver

    (per_signature, _) = launchers.LAUNCHERS
    if not per_signature.matches(driver):
        pytest.skip("this Triton has one function for all kernels")
    wrapper = driver.wrap_handle_tensordesc(len, {"x": "tensordesc<fp32[4]>"}, [{}])
    for launch in (wrapper, len):
        assert per_signature.function(SimpleNamespace(launch=launch)) is len
    for launch, said in ((lambda: wrapper, "closes over"), (wrapper.__call__, "launcher is")):
        with pytest.raises(launchers.Unsupported, match=said):
            per_signature.function(SimpleNamespace(launch=launch))
