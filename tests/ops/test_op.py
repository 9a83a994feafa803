"""An op that is declared in one place, with a reference and a backend of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.op import OPS, op
from blocktensor.ops.registry import Backend, first_choice
from blocktensor.ops.scale_layouts import empty_quantized
from tests.support.numeric import assert_same

ran: list[str] = []


def runs(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        ran.append(backend)
        return function(*args)

    return run


def halved(x: Tensor, format: BlockFormat, also: BlockFormat | None, halve: bool) -> Any:
    y = x / 2 if halve else x
    return tuple(None if f is None else reference.quantize_rowwise(y, f) for f in (format, also))


def added(out: Tensor, x: Quantized, times: int) -> None:
    out += times * reference.dequantize(x, out.dtype)


def backend_of(name: str) -> Backend[Tensor]:
    functions = {"tried_halved": halved, "tried_added_": added}
    module = SimpleNamespace(**{key: runs(f, name) for key, f in functions.items()})

    def declines(x: Tensor) -> str | None:
        return "no fp16" if name == "fake kernels" and x.dtype == torch.float16 else None

    return Backend(name, (module,), declines=declines, launches=False)


BACKENDS = backend_of("fake kernels"), backend_of("reference")


def choose(x: Tensor, *_: object) -> Backend[Tensor]:
    return first_choice(BACKENDS, x, x.device).backend


def refuse_scalars(x: Tensor, *_: object) -> None:
    if x.ndim == 0:
        raise ValueError("a scalar")


@op(choose, check=refuse_scalars, formats=lambda x, format, also, halve: (format, also))
def tried_halved(
    x: Tensor, format: BlockFormat, also: BlockFormat | None = None, halve: bool = True
) -> tuple[Quantized | None, Quantized | None]:
    """Cast half of ``x``."""
    formats = (format, also)
    row, other = (None if f is None else empty_quantized(x.shape, f, x.device) for f in formats)
    return row, other


@op(choose, mutates="out")
def tried_added_(out: Tensor, x: Quantized, times: int) -> Tensor:
    """Add a cast several times."""
    return out


NAMES = torch.ops.blocktensor


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    ran.clear()
    yield
    for name in ("tried_halved", "tried_added_"):
        OPS[name].forget()


def test_the_schema_follows_from_the_declaration() -> None:
    assert str(NAMES.tried_halved.default._schema) == (
        "blocktensor::tried_halved(Tensor x, str format, str? also=None, bool halve=True) "
        "-> Tensor[]"
    )
    assert str(NAMES.tried_added_.default._schema) == (
        "blocktensor::tried_added_(Tensor(a!) out, Tensor data, Tensor scale, str format, "
        "SymInt times) -> ()"
    )


def test_the_function_looks_as_it_was_declared() -> None:
    assert tried_halved.__name__ == "tried_halved"
    assert tried_halved.__doc__ == "Cast half of ``x``."
    assert [*inspect.signature(tried_halved).parameters] == ["x", "format", "also", "halve"]
    assert inspect.signature(tried_halved).parameters["halve"].default is True
    assert inspect.getsource(tried_halved).startswith("@op(choose")
    with pytest.raises(TypeError, match=r"tried_halved\(\) missing 1 required positional argument"):
        tried_halved(torch.ones(2, 3))  # type: ignore[call-arg]


def test_eager_calls_run_the_first_backend_that_takes_them() -> None:
    x = torch.randn(130, 300)
    for given, name in ((x, "fake kernels"), (x.half(), "reference")):
        for _ in range(2):
            row, none = tried_halved(given, BLOCKS_1X128)
            assert none is None
            assert row is not None
            assert row.format is BLOCKS_1X128
            assert_same(row.data, reference.quantize_rowwise(given / 2, BLOCKS_1X128).data)
        assert set(ran) == {name}
        ran.clear()
    whole, square = tried_halved(x, BLOCKS_1X128, halve=False, also=BLOCKS_128X128)
    assert whole is not None
    assert square is not None
    assert_same(whole.data, reference.quantize_rowwise(x, BLOCKS_1X128).data)
    assert square.format is BLOCKS_128X128
    with pytest.raises(ValueError, match="a scalar"):
        tried_halved(x[0, 0], BLOCKS_1X128)
    out = torch.zeros(130, 300)
    assert tried_added_(out, whole, 3) is out
    assert_same(out, 3 * reference.dequantize(whole, torch.float32))


def test_it_is_no_op_in_eager_mode_unless_a_mode_sees_it() -> None:
    x = torch.randn(130, 300)
    with FakeTensorMode() as mode:
        fake, other = tried_halved(mode.from_tensor(x), BLOCKS_1X128, BLOCKS_128X128)
    real, also = tried_halved(x, BLOCKS_1X128, BLOCKS_128X128)
    for ours, theirs in ((fake, real), (other, also)):
        assert ours is not None
        assert theirs is not None
        assert ours.format is theirs.format
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert ran == ["fake kernels"]


@pytest.mark.parametrize("rest", [("1x128",), ("1x128", "128x128"), ("1x128", None, False)])
def test_opcheck(rest: tuple[Any, ...]) -> None:
    torch.library.opcheck(NAMES.tried_halved.default, (torch.randn(130, 300), *rest))
    x = reference.quantize_rowwise(torch.randn(130, 300), BLOCKS_1X128)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = torch.zeros(130, 300), *x[:2], "1x128", 2
    torch.library.opcheck(NAMES.tried_added_.default, args, test_utils=checks)


def test_a_gradient_that_would_be_lost_raises() -> None:
    x = torch.randn(130, 300, requires_grad=True)
    data, _ = NAMES.tried_halved(x, "1x128")
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        data.float().sum().backward()
