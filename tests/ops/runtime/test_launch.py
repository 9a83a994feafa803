"""A launch as a value: what it says of a kernel that does not compile, and what it enters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from blocktensor.ops.registry import NotCompiled
from blocktensor.ops.runtime.launch import Launch, not_recorded, watch_launches
from tests.support.fake_driver import Kernel, axpy_body, draw, fake_driver

__all__ = ["fake_driver"]

pytestmark = pytest.mark.usefixtures("fake_driver")


class Broken:
    """A kernel that Triton fails to launch."""

    __name__ = "broken_kernel"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            raise self.error

        return run


def test_a_failed_compilation_names_the_kernel() -> None:
    launch = Launch(
        Broken(OutOfResources(300000, 232448, "shared memory")), (1,), (draw(8),), {}, {}
    )
    with pytest.raises(NotCompiled, match=r"compile broken_kernel: .*Required: 300000") as failure:
        launch()
    assert isinstance(failure.value.__cause__, OutOfResources)


def test_other_errors_are_raised_as_they_are() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised:
        Launch(Broken(error), (1,), (draw(8),), {}, {})()
    assert raised.value is error


def axpy() -> Kernel:
    return Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])


def test_the_compiler_is_prepared_while_a_kernel_is_launched() -> None:
    entered: list[str] = []

    @contextmanager
    def prepare() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    x, y, out = draw(8), draw(8), torch.empty(8)
    launch = Launch(axpy(), (1,), (x, y, out, 8, 3), {"FLAG": True}, {}, prepare)
    launch()
    assert entered == ["in", "out"]
    assert torch.equal(out, 3 * x + y)
    launch._replace(grid=(0,))()
    assert entered == ["in", "out"]


def test_launches_beside_a_recording() -> None:
    x, y, out = draw(8), draw(8), torch.empty(8)
    launch = Launch(axpy(), (1,), (x, y, out, 8, 3), {"FLAG": True}, {})
    with watch_launches() as seen:
        with not_recorded():
            launch()
        assert seen == []
        launch()
    assert [found for found, _ in seen] == [launch]
