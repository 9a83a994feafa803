"""What the memory benchmark counts as saved, on a stack that fits a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks import memory
from benchmarks.llama import Shape, stack
from blocktensor import BlockwiseFP8Weight, SmallKN, convert
from tests.support.models import randn

TINY = Shape(dim=256, hidden=640, heads=4, kv_heads=2)
BATCH, TIME = 2, 96
TOKENS = BATCH * TIME


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = SmallKN(0, 0, 0)
    monkeypatch.setattr(
        memory.bt, "convert", lambda m, *r: convert(m, *r, auto_filter_small_kn=everything)
    )


def saved(policy: str, wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> int:
    torch.manual_seed(0)
    model = stack(TINY, 1, "cpu")
    memory.POLICIES[policy](model)
    x = randn(BATCH, TIME, TINY.dim, grad=True)
    return memory.saved_bytes(model, wrap(model), x)


def test_what_eager_saves_by_policy() -> None:
    got = {policy: saved(policy, lambda model: model) for policy in memory.POLICIES}
    assert got["fp8"] == got["fp8, columnwise kept"]
    assert got["fp8, inputs shared"] == got["fp8, inputs shared, cache_weight=False"]
    # in bf16 q, k, v share what they save, and gate and up; the input of o is saved by attention
    dim, hidden = TOKENS * TINY.dim, TOKENS * TINY.hidden
    form = 1 + 4 * 2 / TOKENS  # bytes an element: two blocks of tokens
    inputs = 2 * dim + hidden
    assert got["fp8, inputs shared"] - got["bf16"] == (inputs + dim) * form - 2 * inputs
    assert got["fp8"] - got["fp8, inputs shared"] == 3 * dim * form
    # without weight gradients no linear saves its input
    assert got["fp8, frozen"] == got["fp8, frozen, columnwise kept"] == got["bf16, frozen"]
    assert got["bf16, frozen"] <= got["bf16"] - 2 * inputs


def test_what_is_compiled_saves_no_fp8_weight() -> None:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    types: set[tuple[torch.dtype, torch.Size]] = set()

    def wrap(model: nn.Module) -> Callable[[Tensor], Tensor]:
        run = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        shapes = {p.shape for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)}

        def recording(x: Tensor) -> Tensor:
            y: Tensor = run(x)
            types.update((t.dtype, t.shape) for t in y.grad_fn.saved_tensors)
            shapes_t = {torch.Size(reversed(shape)) for shape in shapes}
            assert not types & {(torch.float8_e4m3fn, s) for s in shapes | shapes_t}
            return y

        return recording

    assert saved("fp8", wrap) > 0
    assert (torch.float8_e4m3fn, torch.Size([TINY.hidden, TOKENS])) in types
