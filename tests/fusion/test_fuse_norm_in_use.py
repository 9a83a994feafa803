"""A fused norm keeps its bits in its surroundings: other readers, adapters, compilers, FSDP2."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, freeze, fuse, to_blockwise_fp8_weights
from blocktensor.distributed import ColwiseParallel
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.gated import assert_bits
from tests.support.mlps import K, X, converted, results, with_adapter
from tests.support.models import POWER_OF_TWO, Trace, plain, randn
from tests.support.norms import (
    Norm,
    OfTorch,
    blocks,
    fused_blocks,
    fused_norms,
    runs_fused,
)
from tests.support.ranks import on_ranks, shared_mesh

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "as written": (Norm, {}),
    "of torch": (OfTorch, {"fused": []}),
}
"""A norm of every kind, and how it is fused."""

every_way = pytest.mark.parametrize("way", WAYS)


def fused_way(way: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    norm, how = WAYS[way]
    return fused_blocks(norm, *args, **how, **options)


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", [POWER_OF_TWO, Recipe(wgrad_input="128x128")])
def test_bits(recipe: Recipe, dtype: torch.dtype, way: str, device: torch.device) -> None:
    model, twin = (x.to(device) for x in fused_way(way, recipe=recipe, dtype=dtype))
    for i, rows in enumerate((0, 1, 127, 129, 300)):
        x = randn(rows, K, seed=i, device=device)
        assert_bits(results(model, x), results(twin, x))
    # in fp32 gradients of x from elsewhere are added between those of the norm's two reads
    as_written = dtype == torch.float32 and WAYS[way][0] is Norm
    assert runs_fused(model, x.to(dtype)) == (0 if as_written else len(fused_norms(model)))


READERS = {
    "a router": lambda h: h @ torch.ones(K, K, dtype=h.dtype) / K,
    "a residual": lambda h: h,
    "a gather": lambda h: h[torch.arange(len(h))] * 0.5,
    "heads": lambda h: h.view(len(h), 3, 64).transpose(0, 1).flatten(1).view(-1, K)[: len(h)],
    "its size": lambda h: torch.zeros(h.shape, dtype=h.dtype, device=h.device),
}


@every_way
@pytest.mark.parametrize("reader", READERS)
def test_other_readers_get_the_norm_itself(reader: str, way: str) -> None:
    model, twin = fused_way(way, READERS[reader])
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == len(fused_norms(model))
    run = functools.partial(checkpoint, model, use_reentrant=False)
    assert_bits(results(model, run=run), results(twin))


def test_what_changes_later() -> None:
    def other_eps(block: Any) -> None:
        block.input_layernorm.variance_epsilon = 1e-2

    def other_dtype(block: Any) -> None:
        block.input_layernorm.float()

    def plain_linear(block: Any) -> None:
        q = block.self_attn.q_proj
        q.weight = nn.Parameter(plain(q.weight))

    def no_weight(block: Any) -> None:
        block.input_layernorm.weight = None
        block.input_layernorm.forward = lambda x: x * 2

    for change in (other_eps, other_dtype, plain_linear, no_weight):
        model, twin = fused_blocks()
        for each in (model, twin):
            change(each.layers[0])
        x = X.bfloat16()
        with torch.no_grad():
            if change is other_dtype:  # fp32 beside bf16 weights
                for each in (model, twin):
                    with pytest.raises((TypeError, ValueError)):
                        each(x)
                continue
            assert torch.equal(model(x), twin(x))
        assert runs_fused(model) == 3 + (change is plain_linear)


def test_hooks_see_the_norm() -> None:
    model, twin = fused_blocks()
    for each in (model, twin):
        each.layers[0].input_layernorm.register_forward_hook(lambda m, args, y: y * 3)
        each.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    assert_bits(results(model), results(twin))


@pytest.mark.parametrize("first", ["adapters", "fuse"])
def test_adapters(first: str) -> None:
    model = blocks()
    freeze(model)
    wanted = with_adapter(copy.deepcopy(model), "q_proj")
    if first == "fuse":
        fuse(model)
        made = with_adapter(model, "q_proj")
    else:
        made = with_adapter(model, "q_proj")
        reasons = [x.reason for x in fuse(made).left_alone]
        assert reasons == []
    assert_bits(results(made), results(wanted))


def test_torch_func_runs_as_written() -> None:
    model, twin = fused_blocks()
    x = X.bfloat16()
    for each in (model, twin):
        for p in each.parameters():
            p.requires_grad_(False)
    outputs = [torch.func.vmap(each.layers[0].input_layernorm)(x[None]) for each in (model, twin)]
    assert torch.equal(*outputs)


@every_way
def test_products_run_as_after_the_norm_as_written(way: str) -> None:
    """Weights are cast once a step, and changed ones are noticed: no linear runs as if traced."""
    model, twin = fused_way(way)
    traces = []
    for each in (model, twin):
        with Trace() as trace:
            results(each)
        traces.append([op for op in trace.ops if "gemm" in op or "128x128" in op])
    assert sorted(traces[0]) == sorted(traces[1])


@every_way
@pytest.mark.parametrize("replaced", [True, False])
def test_weights_changed_between_forward_and_backward(replaced: bool, way: str) -> None:
    """Backward reads the cast of its forward, as with the norm as written, or raises."""
    x = X.bfloat16().requires_grad_()
    grads = []
    for each in fused_way(way):
        y = each(x)
        weight = each.get_submodule("layers.0.mlp.up_proj").weight
        if replaced:
            weight.data = weight.data * 2
            grads += torch.autograd.grad(y.sum(), x)
            continue
        weight.master.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an in-place"):
            y.sum().backward()
    if replaced:
        assert torch.equal(*grads)


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("reader", "way"), [*(("a residual", way) for way in WAYS), (None, next(iter(WAYS)))]
)
def test_compiled(reader: str | None, way: str) -> None:
    model, twin = fused_way(way, READERS[reader] if reader else None)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_bits(results(model, run=compiled), results(twin))
    assert graphs() == 1
    with torch.no_grad():
        assert torch.equal(compiled(X.bfloat16()), twin(X.bfloat16()))


@on_ranks(2)
def test_tensor_parallel_readers(world: int, device: str) -> None:
    mesh = shared_mesh(device, 1, world, names=("data", "tensor"))["tensor"]
    model, twin = (x.to(device) for x in fused_blocks())
    for each in (model, twin):
        for layer in each.layers:
            for name in ("q_proj", "v_proj"):
                style = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(layer.self_attn, mesh, {name: style})
    assert_bits(results(model, X.to(device)), results(twin, X.to(device)))
    assert runs_fused(model, X.to(device).bfloat16()) == 4


# Whatever reads it


# Dynamo itself reads the gradients of inputs, and instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("part", ["mlp", "self_attn", "self_attn.q_proj", "input_layernorm"])
def test_compiled_parts(part: str) -> None:
    """A graph may begin or end at the norm's result, as graph breaks make it."""
    model, twin = fused_blocks()
    for layer in model.layers:
        layer.get_submodule(part).compile(backend="aot_eager")
    for _ in range(2):
        assert_bits(results(model), results(twin))


class Odd(nn.Module):
    """A block that treats the norm's result as any tensor."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention_norm, self.use = Norm(), use
        self.q, self.k, self.v = (nn.Linear(K, K, bias=False) for _ in range(3))
        self.other = nn.Linear(K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        y = self.q(h) * self.k(h) + self.v(h)
        return self.use(self, h) + y


def added_in_place(block: Any, h: Tensor) -> Tensor:
    kept = block.q(h)
    h += kept
    return block.k(h)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a linear of another recipe": lambda block, h: block.other(h),
    "a plain linear": lambda block, h: torch.nn.functional.linear(
        h, block.other.weight.dequantize()
    ),
    "an addition in place": added_in_place,
    "a list": lambda block, h: h * len(h.tolist()),
    "numpy": lambda block, h: h + torch.from_numpy(h.detach().float().numpy()).to(h),
    "a part": lambda block, h: block.q(h[:, :, None].squeeze(-1)),
    "autocast": lambda block, h: torch.autocast("cpu", torch.float16)(block.q)(h).to(h.dtype),
    "a copy": lambda block, h: copy.deepcopy(h.detach()) * h,
}


@pytest.mark.parametrize("use", USES)
def test_the_result_is_any_plain_tensor(use: str) -> None:
    model = converted(Odd(USES[use]))
    to_blockwise_fp8_weights(model.other, POWER_OF_TWO)
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    for _ in range(2):
        assert_bits(results(model), results(twin))
    with torch.inference_mode():
        assert torch.equal(model(X.bfloat16()), twin(X.bfloat16()))
    assert type(model.attention_norm(X.bfloat16())) is torch.Tensor
