"""Tables of ``player.cpp``: which calls share an entry, and how entries end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from blocktensor import quantize
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, GROUP_STEP, Quantized
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE, key_of
from tests.support.fake_driver import player
from tests.support.models import unaligned


def table(most: int = 100) -> Any:
    """A table that says "unknown" of calls without an entry."""
    return player().Table(lambda *args: "unknown", most)


def apart(*calls: tuple[Any, ...]) -> bool:
    """Each of the calls finds its own entry, and no other."""
    found = table()
    for i, call in enumerate(calls):
        if found(*call) != "unknown":
            return False
        found.put(call, lambda *args, i=i: i)
    return [found(*call) for call in calls] == [*range(len(calls))]


class Pair(NamedTuple):
    a: Any
    b: Any


def test_what_tells_calls_apart() -> None:
    x, y = torch.rand(6, 8), torch.rand(7)
    q = Quantized(x, y, BLOCKS_1X128)
    assert apart(
        *[(each,) for each in (x, x.t(), x[:, :4], x[:, ::2], x.double(), unaligned(x))],
        *[(each,) for each in (x.view(8, 6), x.view(48), x.view(1, 6, 8), torch.rand(0, 8))],
        *[
            (each,)
            for each in (None, True, False, 1, 2, -1, 2**40, 1.0, 0.5, "one", "", BLOCKS_1X128)
        ],
        *[(x, each) for each in (None, True, 1, 1.0, "one", x, q, (x, y), Pair(x, y), (x,), ())],
        (q,),
        (q._replace(format=BLOCKS_128X128),),
        (q._replace(scale=y[:6]),),
        (q._replace(scale=y[1:]),),
        (q, 1),
        ((q,), 1),
        (q, (1,)),
        (),
    )


def test_equal_arguments_are_one_kind() -> None:
    found = table()
    x, name = torch.rand(6, 8), "".join(["na", "me"])  # not one object
    found.put((x, name, 0.5, 2**40, (x, (1, None))), lambda *args: "known")
    for other in (torch.rand(6, 8), nn.Parameter(torch.rand(6, 8)), x[:]):
        text = "".join(["n", "ame"])
        assert found(other, text, 0.25 * 2, 2 * 2**39, (other, (1, None))) == "known"


def test_rows_in_groups_count_in_steps() -> None:
    ends = torch.zeros(3, dtype=torch.int32)
    step = GROUP_STEP + 300
    x, more, many = (torch.rand(rows, 8) for rows in (300, 301, step))
    form, other = (Quantized(t, t, BLOCKS_1X128) for t in (x, more))
    for call, same, different in [
        ((x, ends), (more, ends), (many, ends)),
        ((x, x, ends), (more, more, ends), (x, more, ends)),
        ((form, ends, 300), (form, ends, 301), (form, ends, step)),
        ((x, form, ends), (more, form, ends), (more, other, ends)),
        ((x, ends, 7), (more, ends, 7), (x, ends, 8)),
        ((x, ends), (more, ends), (x, ends[:2])),
        ((x, ends), (more, ends), (x, ends.long())),
    ]:
        found = table()
        found.put(call, lambda *args: "known")
        assert (found(*call), found(*same), found(*different)) == ("known", "known", "unknown")


class Subclass(Tensor):
    pass


def test_tensors_with_memory_are_one_kind_whatever_their_type() -> None:
    found, x = table(), torch.rand(2, 3)
    found.put((x, x), lambda *args: "known")
    assert found(x.as_subclass(Subclass), nn.Parameter(x)) == "known"


def test_tensors_without_memory_are_not_remembered() -> None:
    found, x = table(), torch.rand(2, 3)
    conjugate = torch.view_as_complex(torch.rand(3, 2)).conj()
    fake = FakeTensorMode().from_tensor(x)
    for other in (x.to("meta"), fake, quantize(x), conjugate):
        for call in ((other,), (x, other), ((x, other),)):
            assert found.put(call, lambda *args: "known") is False
            assert found(*call) == "unknown"
    assert len(found) == 0


def test_the_forced_backend_is_part_of_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GEMM_VARIABLE, raising=False)
    found, x = table(), torch.rand(2)
    found.put((x,), lambda *args: "free")
    for name in ("triton", "reference"):
        monkeypatch.setenv(GEMM_VARIABLE, name)
        assert found(x) == "unknown"
        found.put((x,), lambda *args, name=name: name)
        assert found(x) == name
    monkeypatch.delenv(GEMM_VARIABLE)
    assert found(x) == "free"


def test_the_oldest_entry_is_forgotten() -> None:
    found = table(3)
    for size in range(1, 6):
        found.put((torch.rand(size),), lambda *args, size=size: size)
    assert [found(torch.rand(size)) for size in range(1, 6)] == ["unknown", "unknown", 3, 4, 5]
    found.put((torch.rand(3),), lambda *args: "anew")
    assert (len(found), found(torch.rand(3))) == (3, "anew")
    found.forget()
    assert (len(found), found(torch.rand(3))) == (0, "unknown")


def test_objects_of_keys_are_kept() -> None:
    """An address says which object: another one must not take it while the entry stands."""
    found = table(10**6)
    for _ in range(2000):
        found.put((object(),), lambda *args: "known")
    assert found(object()) == "unknown"


def test_errors_pass() -> None:
    found, x = table(), torch.rand(2)

    def fail(*args: Any) -> None:
        raise ValueError("of the function")

    found.put((x,), fail)
    with pytest.raises(ValueError, match="of the function"):
        found(x)
    with pytest.raises(OverflowError):
        found(2**70)
    missing = player().Table(fail, 3)
    with pytest.raises(ValueError, match="of the function"):
        missing(x)
    with pytest.raises(TypeError):
        found.put([x], fail)


SIZES = st.sampled_from([(4, 6), (6, 4), (24,), (300, 4), (301, 4), (5, 4)])
LAYOUTS: list[Callable[[Tensor], Tensor]] = [Tensor.clone, unaligned, lambda x: x.t().clone().t()]
TENSORS = st.builds(
    lambda size, dtype, layout: layout(torch.zeros(size, dtype=dtype)),
    SIZES,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(LAYOUTS),
)
ENDS = st.sampled_from([torch.zeros(size, dtype=torch.int32) for size in (2, 3)])
CASTS = st.builds(Quantized, TENSORS, TENSORS, st.sampled_from([BLOCKS_1X128, BLOCKS_128X128]))
OTHERS = st.sampled_from([None, 300, 301, 4, "silu", 1e-6, torch.bfloat16])
ARGUMENTS = st.tuples(TENSORS | CASTS, TENSORS | CASTS | OTHERS, OTHERS | ENDS | st.tuples(TENSORS))


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, ARGUMENTS)
def test_python_and_cpp_tell_the_same_calls_apart(a: Any, b: Any) -> None:
    found = table()
    found.put(a, lambda *args: "known")
    assert found(*a) == "known"
    assert (found(*b) == "known") == (key_of(a) == key_of(b))


ROWS = st.sampled_from([1, 5, 63, 64, 65, 70, 100, 127, 128, 129])
CALLS = st.tuples(ROWS, st.booleans(), st.sampled_from([70, 128, 5]), st.booleans())


@settings(max_examples=300, deadline=None)
@given(CALLS, CALLS)
def test_rows_of_the_arguments_that_have_them_count_in_steps(a: Any, b: Any) -> None:
    """Whole steps, and rows that another size equals, make kinds of their own."""

    def call(rows: int, leading: bool, features: int, is_cast: bool) -> tuple[Any, ...]:
        x, w = torch.zeros(rows, 3), torch.zeros(features, 3)
        form = torch.zeros(rows, 3), torch.zeros(rows, 3).t()
        return x.view(1, rows, 3) if leading else x, form if is_cast else None, w

    def kind(rows: int, leading: bool, features: int, is_cast: bool) -> Any:
        if rows < 64 or rows % 64 == 0 or rows == features:
            return rows, leading, features, is_cast
        # the second part of the cast has other sizes
        return "steps", -(-rows // 64), features, is_cast and rows

    found = player().Table(lambda *args: "unknown", 100, 0b11)
    found.put(call(*a), lambda *args: "known")
    assert found(*call(*a)) == "known"
    assert (found(*call(*b)) == "known") == (kind(*a) == kind(*b))
