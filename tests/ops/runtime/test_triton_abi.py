"""What the fast launcher asks of Triton, and what becomes of kernels where the answer is no."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from blocktensor.ops.runtime import triton_abi
from tests.support.fake_driver import Kernel, axpy, draw, fake_driver, op

__all__ = ["fake_driver"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda launcher, kernel: setattr(launcher, "global_scratch_size", 8),
        lambda launcher, kernel: setattr(launcher, "profile_scratch_size", 8),
        lambda launcher, kernel: kernel.pre_run_hooks.append(print),
    ],
    ids=["scratch", "profile", "hook"],
)
def test_kernels_that_need_more_are_launched_ordinarily(
    spoil: Callable[[Any, Kernel], None],
    fake_driver: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = op(axpy)
    launcher = fake_driver.CudaLauncher
    for name in ("global_scratch_size", "profile_scratch_size"):
        monkeypatch.setattr(launcher, name, 0)
    spoil(launcher, a.kernel)
    x, y = draw(2, 8)
    for _ in range(3):
        assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert (a.kernel.ordinary, a.kernel.direct) == (3, [])


@pytest.mark.usefixtures("fake_driver")
def test_hooks_are_served_by_the_ordinary_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    a = op(axpy)
    x, y = draw(2, 8)
    a.call(x, y, 3), a.call(x, y, 3)
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(triton.knobs.runtime, hook)
        chain.add(print)
        a.call(x, y, 3)
        chain.remove(print)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    a.call(x, y, 3)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", None)
    a.call(x, y, 3)
    assert (a.kernel.ordinary, len(a.kernel.direct)) == (4, 2)


# Tritons that work otherwise


def spoiled(fake_driver: SimpleNamespace, attribute: str, value: Any) -> None:
    setattr(fake_driver, attribute, value) if value else delattr(fake_driver, attribute)


@pytest.mark.parametrize("value", ["iiiKKOOOO", None], ids=["other", "missing"])
def test_another_triton_gives_one_warning(value: Any, fake_driver: SimpleNamespace) -> None:
    spoiled(fake_driver, "_BASE_ARGS_FORMAT", value)
    a, b = op(axpy), op(axpy)
    pairs = [draw(2, size) for size in (8, 8, 4, 8)]
    with pytest.warns(UserWarning, match="in another way than the tested 3.6") as caught:
        results = [(a.call(x, y, 3), b.call(x, y, 3)) for x, y in pairs]
    assert len(caught) == 1
    for (x, y), got in zip(pairs, results, strict=True):
        assert all(torch.equal(each, 3 * x + y) for each in got)
    assert (a.kernel.ordinary, a.kernel.direct) == (4, [])


@pytest.mark.usefixtures("fake_driver")
def test_this_triton_gives_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(axpy).call(*draw(2, 8), 3)


@pytest.mark.parametrize("change", ["names", "kinds", "interpreter"])
def test_an_unexpected_kernel_is_launched_ordinarily(
    change: str, fake_driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = op(axpy)
    original = Kernel.__getitem__

    def compiled(kernel: Kernel, grid: tuple[int]) -> Callable[..., Any]:
        def run(*args: Any, **constants: Any) -> Any:
            made = original(kernel, grid)(*args, **constants)
            if change == "interpreter":
                return None
            signature = made.src.signature
            if change == "kinds":
                signature["count"] = "fp64"
            else:
                signature["another"] = signature.pop("x")
            return made

        return run

    monkeypatch.setattr(Kernel, "__getitem__", compiled)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert (a.kernel.ordinary, a.kernel.direct) == (3, [])


def test_the_installed_triton_is_as_described() -> None:
    from triton.backends.nvidia import driver

    if not triton.__version__.startswith("3.6."):
        pytest.skip(f"tested with Triton 3.6, this is {triton.__version__}")
    assert driver._BASE_ARGS_FORMAT == triton_abi.HEAD_FORMAT
    assert triton_abi.HEAD_FORMAT[triton_abi.STREAM] == "K"
    assert list(inspect.signature(driver.make_tensordesc_arg).parameters) == ["arg", "metadata"]
    wrapper = driver.wrap_handle_tensordesc(len, {"x": "tensordesc<fp32[4]>"}, [{}])
    assert triton_abi._c_function(wrapper) is triton_abi._c_function(len) is len
    assert not triton_abi.hooked()
