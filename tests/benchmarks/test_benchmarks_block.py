"""The Llama stack of the benchmarks, small enough for a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks import block, microbatches
from benchmarks.llama import Shape, stack, step
from blocktensor import BlockwiseFP8Weight, SmallKN, convert
from tests.support.models import randn

TINY = Shape(dim=64, hidden=160, heads=4, kv_heads=2)


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        block.bt, "convert", lambda m, r: convert(m, r, auto_filter_small_kn=SmallKN(0, 0, 0))
    )


@pytest.mark.usefixtures("every_size")
def test_all_variants_compute_alike_and_cast_once_a_step() -> None:
    torch.manual_seed(0)
    base = stack(TINY, 2, "cpu")
    x, grad = randn(2, 8, TINY.dim, grad=True), randn(2, 8, TINY.dim, seed=1)
    results: dict[str, list[Tensor]] = {}
    for name in block.VARIANTS:
        model = block.variant(name, base)
        weights = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
        assert len(weights) == (0 if name == "bf16" else 14)
        call = block.step(model, model, x, grad)
        call()
        call()
        casts = 4 if "cache_weight=False" in name else 2
        assert all(weight.cache.casts == casts for weight in weights)
        assert x.grad is not None
        results[name] = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
    fp8 = results.pop("fp8")
    for name, found in results.items():
        assert len(found) == len(fp8)
        for a, b in zip(found, fp8, strict=True):
            rounds = name == "bf16" or "store_fp8" in name
            if rounds or ("wgrad_input" in name and a.ndim == 2):
                assert (a - b).norm() < 0.1 * a.norm()
                assert not torch.equal(a, b) or "store_fp8" in name  # the last down's gradient
            else:
                assert torch.equal(a, b)


@pytest.mark.usefixtures("every_size")
def test_a_block_compiles_in_one_graph() -> None:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    model: nn.Module = block.variant("fp8", stack(TINY, 1, "cpu"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, grad = randn(2, 8, TINY.dim, grad=True), randn(2, 8, TINY.dim, seed=1)
    got = []
    for run in (model, compiled):
        block.step(model, run, x, grad)()
        got.append([x.grad, *[p.grad for p in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))
    torch._dynamo.reset()


@pytest.mark.usefixtures("every_size")
def test_policies_of_the_microbatches_compute_alike_and_cast_as_they_say() -> None:
    torch.manual_seed(0)
    base = stack(TINY, 1, "cpu")
    x, grad = randn(2, 8, TINY.dim, grad=True), randn(2, 8, TINY.dim, seed=1)
    casts, results = {}, []
    for policy in microbatches.POLICIES:
        model = microbatches.variant(policy, base)
        call = step(model, model, x, grad, microbatches=4)
        call()
        first = model[0].q.weight.cache.casts
        call()
        casts[policy] = model[0].q.weight.cache.casts - first
        results.append([p.grad for p in model.parameters()])
    assert casts == {"backward": 4, "step": 1, False: 8}
    for grads in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0], strict=True))
