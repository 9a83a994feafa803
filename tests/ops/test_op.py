"""An op that is declared in one place, with a reference and a backend of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.op import OPS, op
from blocktensor.ops.registry import Backend, first_choice
from blocktensor.ops.scale_layouts import empty_quantized
from tests.support.numeric import assert_same_forms

ran: list[str] = []


def halved(x: Tensor, format: BlockFormat, also: BlockFormat | None, halve: bool) -> Any:
    y = x / 2 if halve else x
    return tuple(None if f is None else reference.quantize_rowwise(y, f) for f in (format, also))


def backend_of(name: str, declined: torch.dtype | None = None) -> Backend[Tensor]:
    def run(*args: Any) -> Any:
        ran.append(name)
        return halved(*args)

    functions = SimpleNamespace(tried_halved=run)
    declines = {declined: "another dtype"}
    return Backend(
        name, lambda: (functions,), declines=lambda x: declines.get(x.dtype), launches=False
    )


BACKENDS = backend_of("fake kernels", torch.float16), backend_of("reference")


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


NAMES = torch.ops.blocktensor


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    ran.clear()
    yield
    OPS["tried_halved"].forget()


def test_the_schema_follows_from_the_declaration() -> None:
    assert str(NAMES.tried_halved.default._schema) == (
        "blocktensor::tried_halved(Tensor x, str format, str? also=None, bool halve=True) "
        "-> Tensor[]"
    )
    assert str(NAMES.gemm.default._schema) == (
        "blocktensor::gemm(Tensor a, Tensor a_scale, str a_format, Tensor b, Tensor b_scale, "
        "str b_format, Tensor? bias, ScalarType out_dtype, bool batch_invariant=False) "
        "-> Tensor"
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
    x, cast = torch.randn(130, 300), reference.quantize_rowwise
    for given, name in ((x, "fake kernels"), (x.half(), "reference")):
        for _ in range(2):
            half = cast(given / 2, BLOCKS_1X128)
            assert_same_forms(tried_halved(given, BLOCKS_1X128), (half, None))
        assert ran == [name, name]
        ran.clear()
    whole = cast(x, BLOCKS_1X128)
    made = tried_halved(x, BLOCKS_1X128, halve=False, also=BLOCKS_128X128)
    assert_same_forms(made, (whole, cast(x, BLOCKS_128X128)))
    with pytest.raises(ValueError, match="a scalar"):
        tried_halved(x[0, 0], BLOCKS_1X128)


def test_a_gradient_that_would_be_lost_raises() -> None:
    data, _ = NAMES.tried_halved(torch.randn(130, 300, requires_grad=True), "1x128")
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        data.float().sum().backward()
