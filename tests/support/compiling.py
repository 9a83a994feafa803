"""Shared by the tests of torch.compile: a clean start, eager's bits, and what graphs hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.support.steps import assert_bits, leaves_of, step

instantiates = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"
)
"""Dynamo itself instantiates the Functions that it traces."""

reads_grad = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
"""Dynamo reads ``.grad`` of a graph's inputs. It hides the warning, but not an error made of it."""


class Traced(nn.Linear):
    """A linear layer that ``compile()`` compiles: Dynamo skips the forward of ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


@contextmanager
def fresh() -> Iterator[None]:
    """Nothing compiled before counts; and fresh memory is not filled, which compilers see."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """:func:`fresh`, for every test of a file that imports it."""
    with fresh():
        yield


def graphs() -> int:
    """How many were compiled since; none has a break."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def assert_as_eager(
    run: Any,
    *batches: Any,
    of: Iterable[nn.Module | Tensor] = (),
    backend: str = "aot_eager",
    strides: bool = False,
    compiled: Any = None,
) -> None:
    """A compiled forward and backward without breaks gives eager's bits, for every batch.

    ``compiled``: ``run`` as it was compiled before.
    """
    of = leaves_of(*(list(of) or [run]))
    compiled = compiled or torch.compile(run, fullgraph=True, backend=backend)
    for batch in batches:
        given = batch if isinstance(batch, tuple) else (batch,)
        got, want = step(compiled, *given, of=of), step(run, *given, of=of)
        assert_bits(got, want)
        if strides:
            assert [t is None or t.stride() for t in got] == [t is None or t.stride() for t in want]


def compiled_graphs(
    run: Any,
    *inputs: Any,
    of: Iterable[nn.Module | Tensor] = (),
    call: Callable[[Any], object] | None = None,
) -> list[torch.fx.Graph]:
    """Return the graph of a compiled forward and that of its backward, as eager mode runs them.

    ``call``: runs both, given the compiled function; by default :func:`step`.
    """
    seen: list[torch.fx.Graph] = []

    def see(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=see, bw_compiler=see, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    call(compiled) if call else step(compiled, *inputs, of=list(of) or [run])
    return seen


def ops_in(graph: torch.fx.Graph) -> list[str]:
    """Return the names of a graph's ops, without overloads."""
    return [str(x.target).removesuffix(".default") for x in graph.nodes if x.op == "call_function"]
