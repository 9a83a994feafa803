"""A launch as a value; recordings of tuples, and of functions that call another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.runtime.launch import Launch, not_recorded, this_thread, watch_launches
from tests.support.fake_driver import Kernel, axpy, draw, fake_driver, launch, op

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
    """Other errors are raised as they are."""
    too_large = OutOfResources(300000, 232448, "shared memory")
    with pytest.raises(
        RuntimeError, match=r"compile broken_kernel .*Required: 300000.*FAST_PATH=0"
    ) as failure:
        Launch(Broken(too_large), (1,), (draw(8),), {}, {})()
    assert failure.value.__cause__ is too_large
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised:
        Launch(Broken(error), (1,), (draw(8),), {}, {})()
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


def test_launches_beside_a_recording() -> None:
    launch = add(draw(8), draw(8), torch.empty(8))
    with watch_launches() as seen:
        with not_recorded():
            launch()
        assert seen == []
        launch()
    assert [found for found, _ in seen] == [launch]
    assert this_thread.launches is None


def test_a_watch_within_another_sees_its_own_launches_alone() -> None:
    launch = add(draw(8), draw(8), torch.empty(8))
    with watch_launches() as outer:
        launch()
        with watch_launches() as inner:
            launch()
        launch()
    launch()
    assert (len(inner), len(outer)) == (1, 2)


def half(kernel: Kernel, x: Quantized, factor: int) -> Quantized:
    """Another form of ``x``, from its data and its scale."""
    made = torch.empty_like(x.data)
    launch(kernel, x.data, x.scale, made, factor)
    return Quantized(made, torch.empty(2, 3), BLOCKS_128X128)


def test_tuples_are_taken_and_returned() -> None:
    """Arguments that are ``Quantized``; a result whose tuples are nested."""

    def both(kernel: Kernel, x: Quantized, y: Tensor, factor: int) -> tuple[Any, ...]:
        out = torch.empty_like(y)
        launch(kernel, y, x.scale, out, factor)
        return half(kernel, x, factor), (out, (half(kernel, x, 5),)), None, factor

    a = op(both)
    for _ in range(4):
        x, y = Quantized(draw(8), draw(8), BLOCKS_1X128), draw(8)
        first, (out, (second,)), nothing, factor = a.call(x, y, 3)
        for form, times in ((first, 3), (second, 5)):
            assert type(form) is Quantized
            assert form.format is BLOCKS_128X128
            assert torch.equal(form.data, times * x.data + x.scale)
            assert form.scale.shape == (2, 3)
        assert torch.equal(out, 3 * y + x.scale)
        assert (nothing, factor) == (None, 3)
    assert (a.calls, len(a.kernel.direct)) == (1, 9)


def test_a_tuple_of_another_format_or_layout_is_another_kind() -> None:
    a = op(half)
    for _ in range(2):
        for x in (
            Quantized(draw(8), draw(8), BLOCKS_1X128),
            Quantized(draw(8), draw(8), BLOCKS_128X128),
            Quantized(draw(8), draw(9)[1:], BLOCKS_1X128),
        ):
            assert torch.equal(a.call(x, 2).data, 2 * x.data + x.scale)
    assert (a.calls, len(a.kernel.direct)) == (3, 3)


def test_a_tuple_without_tensors_is_passed_on() -> None:
    a = op(lambda kernel, x, y, factors: axpy(kernel, x, y, factors[1]))
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y, (2, 3)), 3 * x + y)
    assert (a.calls, len(a.kernel.direct)) == (1, 2)


def test_tensors_of_a_tuple_at_one_address_are_not_recorded() -> None:
    a = op(half)
    x, y = draw(2, 8)
    for _ in range(2):
        assert torch.equal(a.call(Quantized(x, x, BLOCKS_1X128), 2).data, 3 * x)
    for _ in range(2):
        assert torch.equal(a.call(Quantized(x, y, BLOCKS_1X128), 2).data, 2 * x + y)
    assert (a.calls, len(a.kernel.direct)) == (3, 1)


def test_an_inner_recording_waits_while_an_outer_one_is_made() -> None:
    inner = op(axpy)

    def both(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
        return axpy(kernel, inner.call(x, y, 3), y, 2)

    outer = op(both)
    x, y = draw(2, 8)
    assert torch.equal(outer.call(x, y), 6 * x + 3 * y)
    found: Any = inner.table.find(x, y, 3)
    assert (found.is_recorded, found.is_refused) == (False, False)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(outer.call(x, y), 6 * x + 3 * y)
    assert (outer.calls, inner.calls) == (1, 1)
    assert (inner.kernel.ordinary, len(inner.kernel.direct)) == (1, 3)  # by the outer recording
    for _ in range(3):
        assert torch.equal(inner.call(x, y, 3), 3 * x + y)
    assert found.is_recorded
    assert (inner.calls, inner.kernel.ordinary, len(inner.kernel.direct)) == (2, 2, 5)


def test_an_inner_function_that_is_recorded_runs_plainly_in_an_outer_recording() -> None:
    """Its repeated launches would not be seen."""
    inner = op(axpy)
    for _ in range(2):
        inner.call(*draw(2, 8), 3)
    outer = op(lambda kernel, x, y: axpy(kernel, inner.call(x, y, 3), y, 2))
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(outer.call(x, y), 6 * x + 3 * y)
    assert (outer.calls, inner.calls) == (1, 2)
    assert (inner.kernel.ordinary, len(inner.kernel.direct)) == (2, 1 + 2)
