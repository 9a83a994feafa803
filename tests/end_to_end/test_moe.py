"""Experts of unmodified torchtitan and transformers models, forward and backward, on a CPU."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from blocktensor import BlockwiseFP8Weight, audit, convert, functional
from tests.support.compiling import fresh, instantiates, reads_grad
from tests.support.models import randn
from tests.support.moe_models import TOKENS, GroupedExperts, TitanMoE, transformers_moe
from tests.support.numeric import relative_error
from tests.support.published import expert_parallel
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.steps import assert_bits, step

needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs transformers"
)
KINDS = ("qwen3", "mixtral", "deepseek", "gpt_oss", "llama4")


def stacks(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.ndim == 3}


class ByFunctional(GroupedExperts):
    """Experts of ``grouped_linear``, which ``tests/autograd`` compares with dense linears."""

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        offs = sizes.cumsum(0, dtype=torch.int32)
        with torch.autocast("cpu", torch.bfloat16):
            gate, up = (functional.grouped_linear(x, w, offs) for w in (self.w1_EFD, self.w3_EFD))
            y = functional.grouped_linear(F.silu(gate) * up, self.w2_EDF, offs)
        return y.type_as(x)


X = randn(60, 128, dtype=torch.float32)
EMBEDDED = randn(2, 16, 128, dtype=torch.float32)


@pytest.mark.parametrize("before", [False, True], ids=["", "transposed before the cast"])
def test_torchtitan_s_experts_are_fp8_linears(before: bool) -> None:
    model = TitanMoE(before=before)
    convert(model, skip_small=False, skip=["gate"])
    twin = copy.deepcopy(model)
    twin.experts.__class__ = ByFunctional
    made, wanted = step(model, X), step(twin, X)
    assert_bits(made[:2], wanted[:2])
    for w, other in zip(model.experts.parameters(), twin.experts.parameters(), strict=True):
        assert isinstance(w, BlockwiseFP8Weight)
        assert w.grad.dtype == torch.float32
        torch.testing.assert_close(w.grad, other.grad, rtol=2**-7, atol=1e-6)  # via bf16
        assert w.cache.casts == 1
        assert w.cache.nbytes() == 0


@needs_transformers
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_experts_run_in_fp8(kind: str, implementation: str) -> None:
    if (kind, implementation) == ("llama4", "grouped_mm"):
        pytest.skip("it has one implementation")
    ordinary = transformers_moe(kind, implementation)
    model = copy.deepcopy(ordinary)
    report = convert(model, filter=lambda _, name: ".experts." in name, skip_small=False)
    assert stacks(model).keys() == {entry.name for entry in report.converted}
    losses = []
    for made in (ordinary, model):
        loss = made(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=4e-4)
    assert losses[1] != losses[0]
    for name, w in stacks(model).items():
        assert isinstance(w, BlockwiseFP8Weight)
        error = relative_error(w.grad, ordinary.get_parameter(name).grad)
        assert 0.05 < error < (0.2 if kind == "gpt_oss" else 0.072)  # FP8, and the right ones
        assert max([w.cache.casts, *(cache.casts for cache in w.cache.parts())]) == 1
        assert w.cache.nbytes() == 0
    of_experts = [p for p in audit(model, TOKENS).entries if p.module.endswith("experts")]
    assert {p.precision for p in of_experts} == {"FP8"}
    assert {p.kind for p in of_experts} == {"fprop", "dgrad", "wgrad"}


@needs_transformers
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_implementation_that_copies_experts_is_refused(mode: Callable[[], Any]) -> None:
    model = transformers_moe("qwen3", "batched_mm")
    convert(model, skip_small=False)
    with mode(), pytest.raises(NotImplementedError, match="experts_implementation='grouped_mm'"):
        model(TOKENS)
    model.set_experts_implementation("grouped_mm")
    with mode():
        model(TOKENS)


@needs_transformers
@pytest.mark.slow
@instantiates
@reads_grad
def test_experts_one_by_one_run_between_graphs() -> None:
    """Their loop over the experts with tokens breaks the graph; operations on weights run as is."""
    with fresh():
        model = transformers_moe("mixtral", "eager", num_hidden_layers=1)
        convert(model, skip_small=False)
        compiled = torch.compile(model, backend="aot_eager")
        got, want = (
            step(lambda x, run=run: run(inputs_embeds=x).logits, EMBEDDED, of=[model])
            for run in (compiled, model)
        )
        assert counters["graph_break"]
        assert_bits(got, want)


# Expert parallelism: FP8 on every rank, as in one process


@needs_transformers
@on_ranks(2, gpus=())
def test_transformers_experts_on_two_ranks(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    plain = transformers_moe("qwen3").bfloat16().to(device)
    single = copy.deepcopy(plain)
    convert(single, skip_small=False)
    wanted = single(input_ids=TOKENS, labels=TOKENS).loss
    wanted.backward()
    of_single = dict(single.named_parameters())
    for before in (True, False):
        model = copy.deepcopy(plain)
        if before:
            convert(model, skip_small=False)
        expert_parallel(model, mesh)
        if not before:
            convert(model, skip_small=False)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        # a token's two experts are summed alike on one rank and over two
        assert torch.equal(loss.detach(), wanted.detach())
        for name, p in model.named_parameters():
            if "experts" in name:
                assert type(p._local_tensor) is BlockwiseFP8Weight
                assert torch.equal(p.grad.full_tensor(), of_single[name].grad), name
        assert not audit(model, input_ids=TOKENS, labels=TOKENS).marked
