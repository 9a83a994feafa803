"""Repeated launches: the same numbers as the ordinary ones, from whatever addresses.

Here with kernels that are Python and run on the CPU (``tests/support/fake_driver.py``);
``test_replay_gpu.py`` has the real ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

pytest.importorskip("triton")

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.runtime import replay
from blocktensor.ops.runtime.launch import Launch, Rows
from blocktensor.ops.runtime.replay import Replay
from tests.support.fake_driver import (
    STREAM,
    Descriptor,
    Kernel,
    Op,
    axpy,
    axpy_body,
    draw,
    fake_driver,
    floats,
    launch,
    op,
)

__all__ = ["fake_driver"]

pytestmark = pytest.mark.usefixtures("fake_driver")


def test_the_second_call_of_a_kind_is_direct() -> None:
    a, outputs = op(axpy), []
    for turn in range(5):
        x, y = draw(2, 8)
        found = a.table.find(x, y, 3)
        assert (found.player is None) == (turn == 0)
        outputs.append(a.call(x, y, 3))
        assert torch.equal(outputs[-1], 3 * x + y)
    assert len({out.data_ptr() for out in outputs}) == 5
    assert (a.calls, a.kernel.ordinary, len(a.kernel.direct)) == (1, 1, 4)
    head, metadata = a.kernel.direct[-1], (4, 1, 0)
    assert head[:7] == (1, 1, 1, STREAM, 1234, 0, 0)
    last = (None, None, metadata, None, None, None) if len(head) == 13 else (metadata, *(None,) * 5)
    assert head[7:13] == last


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
        assert (a.table.find(*args).player == a._counted) == (launches == 0)
    assert (a.calls, len(a.kernel.direct)) == (1 if launches else 4, 3 * launches)


def test_memory_of_views_is_that_of_ordinary_launches() -> None:
    a = op(twice)
    for _ in range(2):
        out, padded, _ = a.call(*pair(3))
        assert (out._is_view(), padded._is_view()) == (False, True)  # views cost host time
        assert padded.untyped_storage().nbytes() == 11 * 4


def test_what_is_not_returned_shares_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def thrice(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
        first, second, third = torch.empty(8), torch.empty(2, 8), torch.empty(8)
        launch(kernel, x, y, first, 2)
        launch(kernel, y, first, second, 3)
        launch(kernel, first, second, third, 4)
        return third

    sizes: list[tuple[int, ...]] = []

    def counted(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        sizes.append(size)
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(replay, "fresh_empty", lambda: counted)
    a = op(thrice)
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y), 10 * x + 8 * y)
    assert sizes == 2 * [(1024,), (8,)]
    assert (a.calls, len(a.kernel.direct)) == (1, 6)


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
        found = a.table.find(*args(x, x))
        assert found.player is None
    for _ in range(2):
        assert torch.equal(a.call(*args(y, z)), 3 * y + z)
    assert torch.equal(a.call(*args(x, x)), 4 * x)
    assert (a.calls, len(a.kernel.direct)) == (3, 2)


def copy_body(source: Any, rows: int, stride: int, target: Any, *_: int) -> None:
    assert (rows, stride) == (source.shape[0], 1)
    for i in range(rows):
        floats(target.address, rows)[i] = floats(source.address, rows)[i]


def copy(kernel: Kernel, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    Launch(kernel, (1,), (Descriptor(x), Descriptor(out)), {}, {})()
    return out


@pytest.fixture
def maps(fake_driver: SimpleNamespace) -> list[int]:
    """The addresses of all tensor maps made."""
    made: list[int] = []
    original = fake_driver.make_tensordesc_arg

    @functools.wraps(original)
    def make(descriptor: Any, *rest: Any) -> list[Any]:
        made.append(descriptor.base.data_ptr())
        return original(descriptor, *rest)

    fake_driver.make_tensordesc_arg = make
    return made


def test_tensor_maps_are_made_once_an_address(maps: list[int]) -> None:
    a = Op(copy, Kernel(copy_body, ["source", "target"]))
    inputs = [draw(8) for _ in range(3)]
    kept = []
    for turn in range(12):
        x = inputs[turn % 3]
        x.add_(1)
        kept.append(a.call(x))  # a new address each
        assert torch.equal(kept[-1], x)
    assert a.calls == 1
    assert len(maps) == len(set(maps)) == 3 + 12


def test_tensor_maps_are_bounded(maps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_MAPS", 4)
    run = Replay(lambda x: copy(kernel, x))
    kernel = Kernel(copy_body, ["source", "target"])
    kept = [(x, run(x)) for x in (draw(8) for _ in range(20))]
    assert all(torch.equal(x, y) for x, y in kept)
    cells = [cell.cell_contents for cell in run.player.__closure__]
    known = [content for content in cells if isinstance(content, dict)]
    assert [len(maps) <= 4 for maps in known] == [True, True]


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


def test_calls_that_differ_in_sizes_have_one_text() -> None:
    a = op(twice)
    replay._maker.cache_clear()
    for size in (5, 8, 300) * 3:
        x, y = draw(2, size)
        assert torch.equal(a.call(x, y, size)[0], size * y + x)
    assert (replay._maker.cache_info().misses, len(a.kernel.direct)) == (1, 18)


@pytest.mark.parametrize("of_tensor", [True, False])
def test_numbers_of_rows_are_read_at_every_call(of_tensor: bool) -> None:
    """Outputs, returned or not, have as many: those of the first tensor, or the first integer."""

    def sums(first: Any, y: Tensor, tokens: int) -> Tensor:
        x = first if of_tensor else first.data
        rows = Rows(len(x) if of_tensor else tokens)
        between, out = torch.empty(rows, 1), torch.empty(rows, 1)
        for source, made in ((x, between), (between, out)):
            Launch(kernel, (1,), (source, y, made, rows, 3), {"FLAG": True}, {}, sized=made)()
        return out

    kernel = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])
    run, (x, y) = Replay(sums), draw(2, 8)
    for rows in (8, 5, 7, 3, 8):
        made = run(x[:rows] if of_tensor else Quantized(x, draw(1), BLOCKS_1X128), y, rows)
        assert torch.equal(made[:, 0], (9 * x + 4 * y)[:rows])
    assert len(kernel.direct) == 8


def test_two_inner_tensors_grow_with_the_rows() -> None:
    """They are not returned, and may not lie in scratch of the size that was recorded."""

    def sums(x: Tensor, y: Tensor) -> Tensor:
        rows = Rows(len(x))
        one, two, out = (torch.empty(rows, 1) for _ in range(3))
        for source, made in ((x, one), (one, two), (two, out)):
            Launch(kernel, (1,), (source, y, made, rows, 3), {"FLAG": True}, {}, sized=made)()
        return out

    kernel = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"])
    run, (x, y) = Replay(sums), draw(2, 129)
    for rows in (128, 129):  # where scratch is one after the other in steps of 512 bytes
        want = x[:rows]
        for _ in range(3):
            want = 3 * want + y[:rows]
        assert torch.equal(run(x[:rows], y[:rows])[:, 0], want)
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


def test_another_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    a = op(axpy)
    a.call(*draw(2, 8), 3)
    current, streams = [5], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(replay, "current_device", lambda: current[-1])
    monkeypatch.setattr(replay, "current_stream", lambda i: streams.append((i, current[-1])) or 7)
    x, y = draw(2, 8)
    assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert (streams, current) == ([(-1, -1)], [5])
