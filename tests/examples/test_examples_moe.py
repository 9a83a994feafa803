"""The demo's mixture of experts: its routing, its products, and what a run writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from blocktensor import BlockwiseFP8Weight, audit, convert, explain
from tests.support.asserts import no_synchronization
from tests.support.models import randn
from tests.support.scripts import TINY_MODEL, Load, flags

TINY = [*TINY_MODEL, *flags(experts=4, samples=0)]


def small(load: Load) -> Any:
    gpt = load("common.gpt")
    torch.manual_seed(0)
    return gpt.GPT(gpt.ModelConfig(dim=32, layers=1, heads=2, seq=16, experts=4))


def test_experts_begin_like_linears(load: Load) -> None:
    experts = small(load).blocks[0].mlp.experts
    residual = 2**-0.5  # of one layer with two branches
    for w, scale in ((experts.w1, 1.0), (experts.w2, residual), (experts.w3, 1.0)):
        assert w.std().item() == pytest.approx(scale / w.shape[-1] ** 0.5, rel=0.05)


def test_each_token_gets_the_weighted_sum_of_its_experts(load: Load) -> None:
    moe = small(load).blocks[0].mlp
    # Chooses other experts than the scores, and weighs nothing.
    moe.bias.copy_(torch.tensor([0.3, -0.3, 0.0, 0.3]))
    moe.eval()
    x = randn(3, 5, 32, dtype=torch.float32)
    y = moe(x)
    scores = moe.router(x.view(-1, 32)).sigmoid()
    for token, row, score in zip(x.view(-1, 32).bfloat16(), y.view(-1, 32), scores, strict=True):
        chosen = (score + moe.bias).argsort(descending=True)[:2]
        wanted = torch.zeros(32)
        for e in chosen.tolist():
            w1, w2, w3 = (w[e].bfloat16() for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
            out = w2 @ (torch.nn.functional.silu(w1 @ token) * (w3 @ token))
            wanted += out.float() * score[e] / score[chosen].sum()
        torch.testing.assert_close(row, wanted, rtol=2e-2, atol=2e-3)


def test_training_raises_the_bias_of_experts_with_few_tokens(load: Load) -> None:
    moe = small(load).blocks[0].mlp
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([0.3, 0.2, 0.1, 0.0])[:, None].expand(4, 32))
    x = torch.ones(6, 32)  # every token goes to the first two
    moe.eval()
    moe(x)
    assert moe.bias.tolist() == [0.0] * 4
    moe.train()
    moe(x)
    assert moe.bias.tolist() == pytest.approx([-1e-3, -1e-3, 1e-3, 1e-3])


def test_all_products_of_experts_are_fp8_and_the_router_is_not(load: Load) -> None:
    model = small(load)
    convert(model, skip=["*.router"], skip_small=False)
    assert all(isinstance(w, BlockwiseFP8Weight) for w in model.blocks[0].mlp.experts.parameters())
    report = audit(model, torch.zeros(2, 16, dtype=torch.long))
    assert report.marked == ()
    found = {(e.module.split(".")[-1], e.precision) for e in report.entries if "mlp" in e.module}
    assert found == {("experts", "FP8"), ("router", "fp32")}
    rows = {p.m for p in explain(model, tokens=32).matmuls if p.groups > 1 and p.kind == "fprop"}
    assert rows == {64}, "of two experts for every token"


@pytest.mark.unchecked
@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu(load: Load) -> None:
    torch.use_deterministic_algorithms(False)
    model = small(load).cuda()
    convert(model, skip=["*.router"], skip_small=False)
    moe = model.blocks[0].mlp
    x = randn(4, 16, 32, dtype=torch.float32).cuda().requires_grad_()
    for _ in range(3):  # kernels are compiled, and what is decided once is decided
        moe(x).backward(x.detach())
    with no_synchronization():
        moe(x).backward(x.detach())
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_run_writes_json_and_plot(stdlib: Path, load: Load, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert load("train_lm").main([*TINY, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"train_moe.json", "train_moe.png"}
    bf16, fp8 = json.loads((out / "train_moe.json").read_text())["runs"]
    assert fp8["losses"][-1] < fp8["losses"][0]
    # The same weights and data: the first losses differ by rounding, and do differ.
    assert fp8["losses"] != bf16["losses"]
    assert fp8["losses"][0] == pytest.approx(bf16["losses"][0], rel=0.02)
    assert "experts, E x N x K: E=4, N=64, K=16" in fp8["conversion"]
    assert "in 4 groups" in fp8["explanation"]
