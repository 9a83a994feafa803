"""Repeated launches: the same numbers as the ordinary ones, from whatever addresses.

Here with kernels that are Python and run on the CPU (``tests/support/fake_driver.py``);
``test_record_gpu.py`` has the real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

pytest.importorskip("triton")

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.runtime.launch import Launch, Rows
from blocktensor.ops.runtime.record import record
from blocktensor.ops.runtime.specialize import Specialized, recorded
from blocktensor.ops.scale_layouts import empty_scale
from tests.support.fake_driver import (
    Descriptor,
    Kernel,
    Op,
    axpy,
    axpy_body,
    draw,
    encoded,
    fake_driver,
    floats,
    launch,
    op,
    player,
)

__all__ = ["fake_driver"]

pytestmark = pytest.mark.usefixtures("fake_driver")


def test_the_second_call_of_a_kind_is_direct() -> None:
    a, outputs = op(axpy), []
    for turn in range(5):
        x, y = draw(2, 8)
        assert len(a.table) == (turn > 0)
        outputs.append(a.call(x, y, 3))
        assert torch.equal(outputs[-1], 3 * x + y)
    assert len({out.data_ptr() for out in outputs}) == 5
    assert (a.calls, a.kernel.ordinary, len(a.kernel.direct)) == (1, 1, 4)
    grid, threads, shared, stream, attributes = a.kernel.direct[-1]
    assert (grid, threads, shared, stream, attributes) == (1, 128, 0, None, 0)


def twice(kernel: Kernel, x: Tensor, y: Tensor, factor: int) -> tuple[Tensor, Tensor, Tensor]:
    between, padded, out = torch.empty_like(x), torch.empty(x.numel() + 3), torch.empty_like(x)
    launch(kernel, x, y, between, factor)  # which is never returned
    launch(kernel, between, y, padded, factor)
    launch(kernel, y, x, out, factor)
    return out, padded[: x.numel()], padded[None, :4].t()


def by_halves(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for factor, part, made in zip((3, 4), x.chunk(2), out.chunk(2), strict=True):
        launch(kernel, part, y, made, factor)
    return out


def maybe(kernel: Kernel, x: Tensor, y: Tensor | None, z: Tensor) -> Tensor:
    return axpy(kernel, x, z if y is None else y, 1)


def of_casts(kernel: Kernel, x: Quantized, y: Tensor, factors: tuple[int, int]) -> tuple[Any, ...]:
    form = Quantized(axpy(kernel, *x[:2], factors[1]), torch.empty(2, 0), BLOCKS_128X128)
    return form, (axpy(kernel, y, x.scale, 2), (form,)), None, factors


def add_to_zeros(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(8)  # no uninitialised memory, whatever it holds the next time
    launch(kernel, x, out, out, 1)
    return out


def pair(*others: int) -> tuple[Any, ...]:
    return *draw(2, 8), *others


REPEATED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "several": (twice, lambda: pair(3), 3),
    "parts": (by_halves, lambda: (draw(8), draw(4)), 2),
    "in place": (lambda kernel, out, x: launch(kernel, x, out, out, 2), pair, 1),
    "a tensor": (maybe, lambda: tuple(draw(3, 8)), 1),
    "no tensor": (maybe, lambda: (draw(8), None, draw(8)), 1),
    "tuples": (of_casts, lambda: (Quantized(*pair(), BLOCKS_1X128), draw(8), (2, 3)), 2),
    # Whatever else a function does it does every time
    "other bits": (lambda kernel, x, y: axpy(kernel, x, y, 2).view(torch.int32), pair, 0),
    "made before": (lambda kernel, x, y: axpy(kernel, x + 1, y, 2), pair, 0),
    "changed after": (lambda kernel, x, y: axpy(kernel, x, y, 2).add_(2), pair, 0),
    "zeros": (add_to_zeros, pair, 0),
    "a part of either": (lambda kernel, x, y: axpy(kernel, x[4:], y[4:], 2), pair, 0),
    "an argument": (lambda kernel, x, y: (axpy(kernel, x, y, 2), x)[1], pair, 0),
    "a value": (lambda kernel, x, y: (axpy(kernel, x, y, 2), y.sum().item())[0], pair, 0),
}
"""Functions, their arguments, and the launches that each call of them repeats."""


@pytest.mark.parametrize("label", REPEATED)
def test_results_are_those_of_ordinary_launches(label: str) -> None:
    function, inputs, launches = REPEATED[label]
    a = op(function)
    for _ in range(4):
        args = inputs()
        theirs = tree_map_only(Tensor, torch.clone, args)
        plain = function(Kernel(axpy_body, a.kernel.arg_names), *theirs), theirs
        got, want = (tree_flatten(each) for each in ((a.call(*args), args), plain))
        assert got[1] == want[1]
        for x, y in zip(got[0], want[0], strict=True):
            if isinstance(x, Tensor):
                assert torch.equal(x, y)
                assert x.stride() == y.stride()
            else:
                assert x == y
    assert (a.calls, len(a.kernel.direct)) == (1 if launches else 4, 3 * launches)


def test_memory_of_views_is_that_of_ordinary_launches() -> None:
    a = op(twice)
    for _ in range(2):
        out, padded, _ = a.call(*pair(3))
        assert (out._is_view(), padded._is_view()) == (False, True)  # views cost host time
        assert padded.untyped_storage().nbytes() == 11 * 4


def test_what_is_not_returned_shares_one_allocation() -> None:
    def thrice(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
        first, second, third = torch.empty(8), torch.empty(2, 8), torch.empty(8)
        launch(kernel, x, y, first, 2)
        launch(kernel, y, first, second, 3)
        launch(kernel, first, second, third, 4)
        return third

    a = op(thrice)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y), 10 * x + 8 * y)
    assert (a.calls, len(a.kernel.direct)) == (1, 6)
    kernel = Kernel(axpy_body, a.kernel.arg_names)
    _, recording = record(lambda x, y: thrice(kernel, x, y), (draw(8), draw(8)), player())
    assert recording.allocations == [([1024], [1]), ([8], [1])]


def test_an_empty_grid_launches_nothing() -> None:
    def nothing(kernel: Kernel, x: Tensor) -> Tensor:
        out = torch.empty(3)
        Launch(kernel, (0,), (x, x, out, 0, 0), {"FLAG": True}, {})()
        return out

    a = op(nothing)
    assert [a.call(draw(2)).shape for _ in range(3)] == [(3,)] * 3
    assert (a.calls, a.kernel.ordinary, a.kernel.direct) == (1, 0, [])


@pytest.mark.parametrize("in_tuple", [False, True])
def test_arguments_at_one_address_are_not_recorded(in_tuple: bool) -> None:
    a = op(lambda kernel, *args: axpy(kernel, *(args[0][:2] if in_tuple else args), 3))

    def args(x: Tensor, y: Tensor) -> tuple[Any, ...]:
        return (Quantized(x, y, BLOCKS_1X128),) if in_tuple else (x, y)

    x, y, z = draw(3, 8)
    for _ in range(2):
        assert torch.equal(a.call(*args(x, x)), 4 * x)
        assert len(a.table) == 0
    for _ in range(2):
        assert torch.equal(a.call(*args(y, z)), 3 * y + z)
    assert torch.equal(a.call(*args(x, x)), 4 * x)
    assert (a.calls, len(a.kernel.direct)) == (3, 2)


def copy_body(source: Any, rows: int, stride: int, target: Any, *_: int) -> None:
    assert (rows, stride) == (source.size, 1)
    for i in range(rows):
        floats(target.address, rows)[i] = floats(source.address, rows)[i]


def copy(kernel: Kernel, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    Launch(kernel, (1,), (Descriptor(x), Descriptor(out)), {}, {})()
    return out


def test_tensor_maps_are_encoded_at_every_call() -> None:
    a = Op(copy, Kernel(copy_body, ["source", "target"]))
    inputs = [draw(8) for _ in range(3)]
    for turn in range(12):
        x = inputs[turn % 3]
        x.add_(1)
        made = a.call(x)
        assert torch.equal(made, x)
        if turn:  # address, dtype, rank, size, box, swizzle, fill
            maps = encoded[-2:]
            assert maps == [(t.data_ptr(), 8, 1, 8, 4, 1, 0) for t in (x, made)]
    assert (a.calls, len(encoded)) == (1, 2 * 11)


def test_a_recording_keeps_no_tensor_alive() -> None:
    a = Op(copy, Kernel(copy_body, ["source", "target"]))
    x = draw(8)
    b = op(axpy)
    y, z = draw(8), draw(8)
    dead = [weakref.ref(t) for t in (x, a.call(x), y, z, b.call(y, z, 3))]
    del x, y, z
    assert [ref() for ref in dead] == [None] * 5
    assert (a.calls, b.calls) == (1, 1)
    a.call(draw(8)), b.call(*draw(2, 8), 3)
    assert (a.calls, b.calls) == (1, 1)


@pytest.mark.parametrize("of_tensor", [True, False])
def test_numbers_of_rows_are_read_at_every_call(of_tensor: bool) -> None:
    """Outputs, returned or not, have as many: those of the first tensor, or the first integer."""

    def sums(first: Any, y: Tensor, tokens: int, _: Tensor) -> Tensor:
        x = first if of_tensor else first.data
        rows = Rows(len(x) if of_tensor else tokens)
        between, out = torch.empty(rows, 1), torch.empty(rows, 1)
        for source, made in ((x, between), (between, out)):
            Launch(kernel, (1,), (source, y, made, rows, 3), {"FLAG": True}, {}, sized=(made,))()
        return out

    kernel = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])
    x, y, offs = draw(8, 1), draw(8), torch.zeros(1, dtype=torch.int32)
    run = Specialized(lambda *args: recorded(sums))
    scale = draw(1)
    for rows in (8, 5, 7, 3, 8):
        first = x[:rows] if of_tensor else Quantized(x, scale, BLOCKS_1X128)
        made = run(first, y, rows, offs)
        assert torch.equal(made[:, 0], (9 * x[:, 0] + 4 * y)[:rows])
    assert len(kernel.direct) == 8


def test_a_number_of_rows_that_no_argument_says_is_the_recorded_one() -> None:
    """As of a grouped GEMM that is not told the tokens: it computes all rows of its cast."""

    def sums(x: Quantized, y: Tensor) -> Tensor:
        rows, out = Rows(len(x.data)), torch.empty(len(x.data), 1)
        arguments = x.data, y, out, rows, 3
        Launch(kernel, (1,), arguments, {"FLAG": True}, {}, sized=(out,))()
        return out

    kernel = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])
    run = Specialized(lambda *args: recorded(sums))
    for _ in range(3):
        x, y = draw(8, 1), draw(8)
        made = run(Quantized(x, draw(1), BLOCKS_1X128), y)
        assert torch.equal(made[:, 0], 3 * x[:, 0] + y)
    assert len(kernel.direct) == 2


def rows_body(x: Any, height: int, width: int, out: int, count: int, *_: int) -> None:
    assert (x.size, height) == (count * width + 2, count * width + 2)
    for i in range(count * width):
        floats(out, count * width)[i] = 2 * floats(x.address, count * width)[i]


class OfRows:
    """A sequence whose first two arguments have the rows of a call, and how it ran."""

    def __init__(self) -> None:
        self.kernel = Kernel(rows_body, ["x", "out", "count"])
        self.calls = 0
        self.run = Specialized(lambda *_: recorded(self._function), with_rows=(0, 1))

    def _function(self, x: Tensor, form: Quantized, w: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        x = x.flatten(0, -2)
        rows = Rows(len(x))
        made = []
        for source in (x, form.data):
            source, out = source.flatten(), torch.empty(len(x), 1)
            described = Descriptor(source)
            described.shape = [rows.plus(2)]
            Launch(self.kernel, (1,), (described, out, rows), {}, {}, sized=(out,))()
            made.append(out)
        return made[1], torch.empty(len(w))

    def __call__(self, x: Tensor, w: Tensor) -> None:
        rows = x.numel()
        form = Quantized(draw(rows, 1), draw(rows, 1), BLOCKS_1X128)
        y, of_w = self.run(x, form, w)
        assert torch.equal(y, 2 * form.data)
        assert of_w.shape == (len(w),)


def test_sequences_repeat_within_a_step_of_rows() -> None:
    """In all tensors that have them, however many dimensions the first one has."""
    a, w = OfRows(), draw(128)
    for shape in ((65, 1), (66, 1), (127, 1), (70, 1), (2, 35, 1), (3, 1, 30, 1)):
        a(draw(*shape), w)
    assert (a.calls, a.kernel.ordinary, len(a.kernel.direct)) == (1, 2, 10)


@pytest.mark.parametrize("shape", [(128, 1), (64, 1), (129, 1), (63, 1), (1, 1)], ids=str)
def test_other_steps_and_whole_steps_are_recorded_by_themselves(shape: Any) -> None:
    a, w = OfRows(), draw(200)
    a(draw(65, 1), w)
    a(draw(*shape), w)
    assert a.calls == 2
    a(draw(65, 1), w), a(draw(*shape), w)
    assert (a.calls, len(a.kernel.direct)) == (2, 4)


def test_a_size_that_equals_the_rows_is_told_apart() -> None:
    """A kernel is not told whether 70 is the number of rows or of features."""
    a = OfRows()
    a(draw(65, 1), draw(70))
    a(draw(70, 1), draw(70))
    assert a.calls == 2
    a(draw(70, 1), draw(70))
    a(draw(66, 1), draw(70))
    assert a.calls == 2


def test_views_of_what_has_the_rows_are_not_repeated() -> None:
    def half(x: Tensor) -> Tensor:
        out, rows = torch.empty(len(x), 2), Rows(len(x))
        Launch(kernel, (1,), (x, x, out, rows, 1), {"FLAG": True}, {}, sized=(out,))()
        return out[:, :1]

    kernel = Kernel(lambda *_: None, ["x", "y", "out", "count", "factor", "FLAG"])
    run = Specialized(lambda *_: recorded(half), with_rows=(0,))
    assert [run(draw(rows, 1)).shape for rows in (65, 66, 65)] == [(65, 1), (66, 1), (65, 1)]
    assert (kernel.ordinary, kernel.direct) == (3, [])


def test_lines_of_scales_that_equal_the_rows_are_as_many_for_all_rows() -> None:
    """The scales of ``x[70, 70 * 128]`` lie in memory as 70 lines, one for each 128 features."""

    def cast(x: Tensor) -> Any:
        scale = empty_scale((len(x), 70 * 128), BLOCKS_1X128, x.device)
        args = x, x, scale, Rows(len(x)), 1
        Launch(kernel, (1,), args, {"FLAG": True}, {}, sized=(scale,))()
        return scale._base  # all of its memory

    kernel = Kernel(lambda *_: None, ["x", "y", "out", "count", "factor", "FLAG"])
    run = Specialized(lambda *_: recorded(cast), with_rows=(0,))
    assert [run(draw(rows, 1)).shape for rows in (70, 66, 127)] == [(70, 128)] * 3
    assert len(kernel.direct) == 2


def test_two_inner_tensors_grow_with_the_rows() -> None:
    """They are not returned, and may not lie in scratch of the size that was recorded."""

    def sums(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        rows = Rows(len(x))
        one, two, out = (torch.empty(rows, 1) for _ in range(3))
        for source, made in ((x, one), (one, two), (two, out)):
            Launch(kernel, (1,), (source, y, made, rows, 3), {"FLAG": True}, {}, sized=(made,))()
        return out

    kernel = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])
    run, ends = Specialized(lambda *args: recorded(sums)), torch.zeros(1, dtype=torch.int32)
    x, y = draw(129, 1), draw(129)
    for rows in (128, 129):  # where scratch is one after the other in steps of 512 bytes
        want = x[:rows, 0]
        for _ in range(3):
            want = 3 * want + y[:rows]
        assert torch.equal(run(x[:rows], y, ends)[:, 0], want)
    assert len(kernel.direct) == 3


def test_threads_share_recordings() -> None:
    a = op(axpy)

    def work(seed: int) -> None:
        for turn in range(50):
            x, y = (torch.full((4 + (seed + turn) % 3,), float(number)) for number in (seed, turn))
            assert torch.equal(a.call(x, y, 3), 3 * x + y), (seed, turn)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(a.kernel.direct) >= 150
