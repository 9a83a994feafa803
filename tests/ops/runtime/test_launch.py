"""A launch as a value; recordings of functions that call another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from blocktensor.ops.runtime.launch import Launch, not_recorded, this_thread, watch_launches
from tests.support.fake_driver import Kernel, axpy, draw, fake_driver, op

__all__ = ["fake_driver"]

pytestmark = pytest.mark.usefixtures("fake_driver")


def broken(error: Exception) -> Launch:
    """Launch a kernel that Triton fails to launch."""

    def body(*_: int) -> None:
        raise error

    kernel = Kernel(body, ["x"])
    vars(kernel)["__name__"] = "broken_kernel"
    return Launch(kernel, (1,), (draw(8),), {}, {})


def test_a_failed_compilation_names_the_kernel() -> None:
    """Other errors are raised as they are."""
    too_large = OutOfResources(300000, 232448, "shared memory")
    said = r"compile broken_kernel .*Required: 300000.*FAST_PATH=0"
    with pytest.raises(RuntimeError, match=said) as failure:
        broken(too_large)()
    assert failure.value.__cause__ is too_large
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised:
        broken(error)()
    assert raised.value is error


def add(x: Tensor, y: Tensor, out: Tensor, *prepare: Any) -> Launch:
    return Launch(op(axpy).kernel, (1,), (x, y, out, 8, 3), {"FLAG": True}, {}, *prepare)


def test_the_compiler_is_prepared_while_a_kernel_is_launched() -> None:
    entered: list[str] = []

    @contextmanager
    def prepare() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    x, y, out = draw(8), draw(8), torch.empty(8)
    launch = add(x, y, out, prepare)
    launch()
    assert entered == ["in", "out"]
    assert torch.equal(out, 3 * x + y)
    launch._replace(grid=(0,))()
    assert entered == ["in", "out"]


def test_a_watch_sees_its_own_launches_alone() -> None:
    launch = add(draw(8), draw(8), torch.empty(8))
    with watch_launches() as outer:
        launch()
        with watch_launches() as inner, not_recorded():
            launch()
        assert inner == []
        with watch_launches() as inner:
            launch()
        launch()
    launch()
    assert [found for found, _ in inner] == [launch]
    assert [found for found, _ in outer] == [launch] * 2
    assert this_thread.launches is None


@pytest.mark.parametrize("is_first", [False, True])
def test_an_outer_recording_has_the_launches_of_an_inner_function(is_first: bool) -> None:
    inner = op(axpy)
    outer = op(lambda kernel, x, y: axpy(kernel, inner.call(x, y, 3), y, 2))
    if is_first:
        inner.call(*draw(2, 8), 3)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(outer.call(x, y), 6 * x + 3 * y)
    assert (outer.calls, inner.calls) == (1, 1 + is_first)
    assert (inner.kernel.ordinary, len(inner.kernel.direct)) == (1 + is_first, 2)
    assert torch.equal(inner.call(x, y, 3), 3 * x + y)
    assert (inner.calls, len(inner.kernel.direct)) == (2, 2 + is_first)
