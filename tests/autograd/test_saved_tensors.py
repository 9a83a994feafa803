"""Activations saved in FP8: gradients as in plain torch with rounded tensors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import convert, functional, fuse, monitor, saved_tensors_in_fp8
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.saved import K, T, assert_bits, data, gradients, is_activation, model, rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_are_those_of_rounded_tensors(
    fp8: bool, dtype: torch.dtype, device: torch.device
) -> None:
    made = model(fp8, dtype=dtype).to(device)
    plain = gradients(made, made, nullcontext())
    saved = saved_tensors_in_fp8()
    packed = gradients(made, made, saved)
    assert_bits(packed, gradients(made, made, rounding()))
    assert not all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True))
    # norms on a GPU save no fp32 values, which shrink most
    assert saved.bytes_after < (0.9 if device.type == "cuda" else 0.75) * saved.bytes_before


def test_a_fused_mlp(device: torch.device) -> None:
    """Its function saves gate and up, which no graph of autograd has."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(LlamaConfig(hidden_size=K, intermediate_size=640)).bfloat16()
    made = nn.Sequential(nn.Linear(K, K, dtype=torch.bfloat16), mlp).to(device)
    convert(made, skip_small=False)
    fuse(made, recompute=True)
    saved = saved_tensors_in_fp8()
    packed = gradients(made, made, saved)
    in_fp8 = {(kind.shape, kind.tensors) for kind in saved.kinds if kind.kept_as == "FP8"}
    assert in_fp8 >= {((2 * T, 640), 2)}
    chosen = rounding(lambda x: is_activation(x) or (x.shape[-1], x.dtype) == (640, torch.bfloat16))
    assert_bits(packed, gradients(made, made, chosen))


def test_fused_experts() -> None:
    tokens, experts, width = 96, 3, 128
    torch.manual_seed(0)
    first = nn.Linear(K, K, dtype=torch.bfloat16)
    weights = [
        nn.Parameter(torch.randn(experts, *shape, dtype=torch.bfloat16) / 16)
        for shape in ((width, K), (width, K), (K, width))
    ]
    offs = torch.tensor([40, 40, 90], dtype=torch.int32)

    def step(context: Any) -> list[Tensor]:
        with context:
            y = functional.gated_experts(first(x), *weights, offs, recompute=True)
        return [*torch.autograd.grad(y.float().square().sum(), [*weights, *first.parameters()])]

    x, saved = randn(tokens, K), saved_tensors_in_fp8()
    packed = step(saved)
    in_fp8 = {(kind.shape, kind.tensors) for kind in saved.kinds if kind.kept_as == "FP8"}
    assert in_fp8 == {((tokens, width), 2)}
    assert_bits(packed, step(rounding(lambda x: x.shape == (tokens, width))))


SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda h: h.amax(0),
    "amin": lambda h: h.amin(-1),
    "max": lambda h: h.max(),
    "median": lambda h: h.median(),
    "largest of a norm": lambda h: torch.linalg.vector_norm(h, float("inf"), 0),
    "norms of a list": lambda h: torch.stack(norms([h.roll(i, 0) for i in range(20)])),
    "logsumexp": lambda h: (100 * h).logsumexp(-1),
    "scatter": lambda h: h.new_zeros(8, K).scatter_reduce(0, groups(h), h, "amax"),
    "index_reduce": lambda h: h.new_zeros(8, K).index_reduce(0, groups(h)[:, 0], h, "amin"),
    "segment": lambda h: torch.segment_reduce(h, "max", lengths=torch.full((4,), T // 4)),
    "prod": lambda h: (h / 3).prod(0),
    "in place": lambda h: h.new_zeros(T, K).scatter_reduce_(0, groups(h), h, "amax"),
    "a view of what was written to": lambda h: written(h).amax(0),
}


def norms(tensors: list[Tensor]) -> Any:
    return torch._foreach_norm(tensors, float("inf"))


def written(h: Tensor) -> Tensor:
    view = h[:]
    h.neg_()
    return view


def groups(h: Tensor) -> Tensor:
    return (torch.arange(T) % 8)[:, None].expand_as(h)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_is_compared_with_a_result_is_exact(name: str) -> None:
    """A rounded input has no element that equals the largest one: its gradient would be lost."""
    x = randn(T, K, dtype=torch.float32).requires_grad_()

    def step(context: Any) -> Tensor:
        with context:
            y = SELECTIONS[name](x - 3)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return grad

    saved = saved_tensors_in_fp8()
    assert torch.equal(step(saved), step(nullcontext()))
    kept = {kind.kept_as for kind in saved.kinds}
    assert "compared with a result" in kept
    assert "FP8" not in kept


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda h: F.normalize(h),
    "std": lambda h: h.std(0),
    "pow": lambda h: h**2.5,
    "max and its index": lambda h: h.max(0).values,
    "layer norm": lambda h: F.layer_norm(h, (K,)),
    "checkpoint": lambda h: checkpoint(torch.sin, h, use_reentrant=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_do_not_keep_their_inputs(name: str) -> None:
    x = randn(T, K, dtype=torch.float32).requires_grad_()
    with saved_tensors_in_fp8() as saved:
        OTHERS[name](x.exp() + 1)
    kept = {kind.kept_as for kind in saved.kinds}
    assert "FP8" in kept
    assert "compared with a result" not in kept


def test_a_result_that_a_later_operation_saves() -> None:
    """Only its own operation compares with it."""
    x = randn(T, K, dtype=torch.float32).requires_grad_()
    with saved_tensors_in_fp8() as saved:
        sums = (x - 0).logsumexp(-1, keepdim=True)
        (x - 1).sin() * sums  # saves the sine, and the sums
        checkpoint(lambda y, z: y.sin() + z, x - 2, sums, use_reentrant=False)
    found = [(kind.kept_as, kind.tensors) for kind in saved.kinds if kind.shape == (T, K)]
    assert sorted(found) == [("FP8", 3), ("compared with a result", 1)]


def test_only_the_comparing_operation_keeps_its_input() -> None:
    """Another one that saved it before goes on with the cast; later ones share what is kept."""
    x = randn(T, K, dtype=torch.float32).requires_grad_()

    def step(context: Any) -> Tensor:
        with context:
            h = x - 3
            y = h.sin() + h.amax(0)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return grad

    saved = saved_tensors_in_fp8()
    got = step(saved)
    counts = {(kind.kept_as, kind.shape): kind.tensors for kind in saved.kinds}
    assert counts == {
        ("FP8", (T, K)): 1,
        ("compared with a result", (T, K)): 1,
        ("less than 4096 elements", (K,)): 1,
    }
    calls = itertools.count()
    assert_bits([got], [step(rounding(lambda h: h.shape == (T, K) and next(calls) == 0))])


@on_ranks(2, gpus=())
def test_sequence_parallel_norms(mesh: DeviceMesh) -> None:
    """They save DTensors, which are kept and counted."""
    norm = parallelize_module(nn.LayerNorm(K), mesh, SequenceParallel(use_local_output=True))
    x = randn(2, T, K, dtype=torch.float32).requires_grad_()
    with saved_tensors_in_fp8() as saved:
        y = norm(x)
    y.sum().backward()
    assert x.grad is not None
    kept = {(kind.kept_as, kind.shape, kind.bytes_after) for kind in saved.kinds}
    assert ("a DTensor", (2, 2 * T, K), x.nbytes) in kept, kept


def test_an_adapter() -> None:
    """With frozen FP8 weights and trained adapters."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(K, K, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            self.a = nn.Linear(K, 16, bias=False, dtype=torch.bfloat16)
            self.b = nn.Linear(16, K, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    made = nn.Sequential(Adapted(), nn.SiLU(), Adapted())
    convert(made, skip=["*a", "*b"], skip_small=False)
    assert_bits(gradients(made, made, saved_tensors_in_fp8()), gradients(made, made, rounding()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    """Inputs are packed, and nothing inside; forwards run again on the rounded inputs."""
    made = model(layers=3)

    def run(x: Tensor) -> Tensor:
        x = made[0](x)
        for block in made[1:]:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    saved = saved_tensors_in_fp8()
    packed = gradients(made, run, saved)
    assert_bits(packed, gradients(made, run, rounding()))
    assert [(kind.shape, kind.tensors) for kind in saved.kinds if kind.kept_as == "FP8"] == [
        ((2, T, K), 3)
    ]


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_context_inside_of_a_checkpoint(reentrant: bool, around: bool) -> None:
    """It leaves the hooks in place by which torch saves nothing; nor does it pack what runs again.

    ``around``: of the backward too.
    """
    made = model()
    twin = copy.deepcopy(made)
    saved = saved_tensors_in_fp8()
    for block in made[1:]:
        saved.register(block)

    def run(x: Tensor, blocks: Any) -> Tensor:
        x = blocks[0](x)
        for block in blocks[1:]:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    wanted = gradients(twin, lambda x: run(x, twin), nullcontext())
    with saved_tensors_in_fp8(enabled=False) if around else nullcontext():
        assert_bits(gradients(made, lambda x: run(x, made), nullcontext()), wanted)
    assert saved.kinds == ()


def test_a_context_around_the_backward() -> None:
    """What a backward saves is read soon."""
    made = model()

    def step(outside: bool) -> list[Tensor]:
        made.zero_grad()
        with (saved := saved_tensors_in_fp8()):
            loss = checkpoint(made[1], made[0](data()), use_reentrant=True).sum()
            if not outside:
                loss.backward()
                kept_as = {kind.kept_as for kind in saved.kinds}
                assert kept_as >= {"FP8", "saved in a backward"}
        if outside:
            loss.backward()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    assert_bits(step(False), step(True))


def test_a_graph_that_is_used_again() -> None:
    made = model()
    leaves = [*made.parameters()]
    with saved_tensors_in_fp8():
        loss = made(data()).float().square().mean()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    part = torch.autograd.grad(loss, leaves[3:5], retain_graph=True)
    assert_bits([*part], [*first[3:5]])
    assert_bits([*torch.autograd.grad(loss, leaves)], [*first])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_second_derivatives() -> None:
    """They are those of plain torch with rounded tensors, whose rounding has gradient one."""
    w = nn.Parameter(randn(K, K, dtype=torch.float32) / 16)
    x = randn(T, K, dtype=torch.float32)

    def second(context: Any) -> list[Tensor]:
        with context:
            loss = (x @ w).tanh().square().sum()
        (dw,) = torch.autograd.grad(loss, w, create_graph=True)
        return [dw.detach(), *torch.autograd.grad(dw.square().sum(), w)]

    assert_bits(second(saved_tensors_in_fp8()), second(rounding()))


def test_autocast() -> None:
    """Weights that autocast has cast are no activations."""
    made = nn.Sequential(nn.Linear(K, 640), nn.SiLU(), nn.Linear(640, K), nn.SiLU())

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made(x)

    cast_weights = {(p.shape[1], p.shape[0]) for p in made.parameters() if p.ndim == 2}
    chosen = rounding(lambda x: is_activation(x) and tuple(x.shape) not in cast_weights)
    saved = saved_tensors_in_fp8()
    packed = gradients(made, run, saved)
    assert {kind.shape for kind in saved.kinds if kind.kept_as == "FP8"}.isdisjoint(cast_weights)
    assert_bits(packed, gradients(made, run, chosen))


def test_dispatch_modes() -> None:
    made = model()
    with FlopCounterMode(display=False) as counter:
        packed = gradients(made, made, saved_tensors_in_fp8())
        assert_bits(packed, gradients(made, made, rounding()))
    assert counter.get_total_flops() > 0


def test_a_monitor_measures_packing_by_itself() -> None:
    made = model(True)

    def figures(context: Any) -> dict[str, float]:
        health = monitor(made, every=1)
        with health, context:
            made(data()).sum().backward()
        return health.scalars()

    outside, inside = figures(nullcontext()), figures(saved_tensors_in_fp8())
    packed = {name: x for name, x in inside.items() if "/saved/" in name}
    assert inside.keys() - packed.keys() == outside.keys()
    inputs = {name: x for name, x in outside.items() if "/x/" in name}
    assert {name: inside[name] for name in inputs} == inputs
    sqnrs = {name: x for name, x in packed.items() if name.endswith("/sqnr")}
    assert sqnrs.keys() == {f"fp8/{i}{of}/saved/sqnr" for i in (1, 2) for of in ("", ".norm")}
    assert all(30 < x < 34 for x in sqnrs.values())
