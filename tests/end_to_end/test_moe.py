"""Experts of unmodified torchtitan and transformers models, forward and backward, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, audit, convert, freeze, functional
from tests.support.models import plain, randn
from tests.support.moe_models import TOKENS, GroupedExperts, TitanMoE, transformers_moe
from tests.support.steps import assert_bits, step

KINDS = ("qwen3", "mixtral", "deepseek", "gpt_oss", "llama4")


def sqnr(got: Tensor, wanted: Tensor) -> float:
    """In decibels."""
    return (20 * torch.log10(wanted.norm() / (got - wanted).norm())).item()


def stacks(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.ndim == 3}


class OneByOne(nn.Module):
    """The experts of a :class:`GroupedExperts`, one dense FP8 linear for each."""

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__()
        self.stacks = nn.ParameterList(nn.Parameter(plain(w)) for w in experts.parameters())

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        up, down, gate = self.stacks

        def linear(x: Tensor, w: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return functional.linear(x, w)

        parts = []
        for e, rows in enumerate(x.split(sizes.tolist())):
            hidden = F.silu(linear(rows, up[e])) * linear(rows, gate[e])
            parts.append(linear(hidden, down[e]))
        return torch.cat(parts).type_as(x)


@pytest.mark.parametrize("before", [False, True], ids=["", "transposed before the cast"])
def test_torchtitan_s_experts_are_dense_fp8_linears(before: bool) -> None:
    model = TitanMoE(before=before)
    convert(model, skip_small=False, skip=["gate"])
    one_by_one = copy.deepcopy(model)
    one_by_one.experts = OneByOne(model.experts)
    x = randn(60, 128, dtype=torch.float32)
    assert_bits(step(model, x)[:2], step(one_by_one, x)[:2])
    for w, leaf in zip(model.experts.parameters(), one_by_one.experts.stacks, strict=True):
        assert isinstance(w, BlockwiseFP8Weight)
        assert w.grad.dtype == torch.float32
        torch.testing.assert_close(w.grad, leaf.grad, rtol=2**-7, atol=1e-6)  # via bf16
        assert w.cache.casts == 1
        assert w.cache.nbytes() == 0


def test_evaluation_has_the_bits_of_training() -> None:
    model = TitanMoE()
    convert(model, skip_small=False, skip=["gate"])
    x = randn(60, 128, dtype=torch.float32)
    wanted = model(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), wanted)
    freeze(model)
    assert torch.equal(model(x), wanted)


def test_an_audit_changes_no_bit_and_finds_every_product() -> None:
    model = TitanMoE()
    convert(model, skip_small=False, skip=["gate"])
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda *args: outputs.append(args[-1]))
    x = randn(60, 128, dtype=torch.float32)
    report = audit(model, x)
    model(x)
    assert torch.equal(*outputs)
    assert report.marked == ()
    kinds = [(e.kind, e.precision) for e in report.entries if e.module == "experts"]
    sizes = {(e.kind, e.m, e.n, e.k) for e in report.entries if e.module == "experts"}
    assert sizes == {
        *(("fprop", 120, 256, 128), ("fprop", 120, 128, 256), ("dgrad", 120, 256, 128)),
        *(("wgrad", 256, 128, 120), ("wgrad", 128, 256, 120)),
    }
    assert sorted(kinds) == [("dgrad", "FP8"), *[("fprop", "FP8")] * 3, *[("wgrad", "FP8")] * 3]


def test_main_grad_of_an_fp32_master() -> None:
    experts = GroupedExperts(3, 128, 256)
    convert(experts, skip_small=False)
    twin = copy.deepcopy(experts)
    for w in twin.parameters():
        w.main_grad = torch.zeros(w.shape)
    x, sizes = randn(10, 128, dtype=torch.float32), torch.tensor([4, 0, 6])
    for _ in range(2):
        experts(x, sizes).sum().backward()
        twin(x, sizes).sum().backward()
    for w, with_buffer in zip(experts.parameters(), twin.parameters(), strict=True):
        assert with_buffer.grad is None
        torch.testing.assert_close(with_buffer.main_grad, w.grad, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_experts_run_in_fp8(kind: str, implementation: str) -> None:
    if (kind, implementation) == ("llama4", "grouped_mm"):
        pytest.skip("it has one implementation")
    pytest.importorskip("transformers")
    ordinary = transformers_moe(kind, implementation)
    model = copy.deepcopy(ordinary)
    report = convert(model, filter=lambda _, name: ".experts." in name, skip_small=False)
    names = stacks(model).keys()
    assert names == {entry.name for entry in report.converted}
    losses = []
    for made in (ordinary, model):
        loss = made(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1] != losses[0]
    for name, w in stacks(model).items():
        assert isinstance(w, BlockwiseFP8Weight)
        assert 12 < sqnr(w.grad, ordinary.get_parameter(name).grad) < 60  # FP8, and the right ones
        casts = [w.cache.casts, *(cache.casts for cache in w.cache.parts())]
        assert max(casts) == 1
        assert w.cache.nbytes() == 0
    found = audit(model, TOKENS)
    of_experts = [p for p in found.entries if p.module.endswith("experts")]
    assert {p.precision for p in of_experts} == {"FP8"}
    assert {p.kind for p in of_experts} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_implementations_of_transformers_agree(kind: str) -> None:
    pytest.importorskip("transformers")
    losses, gradients = [], []
    for implementation in ("grouped_mm", "eager"):
        model = transformers_moe(kind, implementation)
        convert(model, skip_small=False)
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append([w.grad for w in stacks(model).values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(*gradients, strict=True):
        assert sqnr(a, b) > 25  # sums in another order may round to another e4m3 number


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_implementation_that_copies_experts_is_refused(mode: Callable[[], Any]) -> None:
    pytest.importorskip("transformers")
    model = transformers_moe("qwen3", "batched_mm")
    convert(model, skip_small=False)
    with mode(), pytest.raises(NotImplementedError, match="experts_implementation='grouped_mm'"):
        model(TOKENS)
    model.set_experts_implementation("grouped_mm")
    with mode():
        model(TOKENS)
