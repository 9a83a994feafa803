"""Compiled blocks of parallel linears: one graph, with the bits and the collectives of eager."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.compiling import compiled_graphs, fresh, graphs
from tests.support.numeric import assert_same
from tests.support.parallel_linears import (
    DIM,
    assert_alike,
    batches,
    compute,
    converted,
    drawn,
    my_part,
    parallel_block,
)
from tests.support.parallel_linears import Mlp as GatedMlp
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import Wire

EAGERLY = {"fullgraph": True, "backend": "aot_eager"}


class Mlp(GatedMlp):
    """With one rounding between its products."""

    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, DIM)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(self.gate(x).relu() * self.up(x))


class Block(nn.Sequential):
    """A module in another, whose hooks are in the graph with it."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def mlp(
    mesh: DeviceMesh,
    sequence: bool = True,
    recipe: Recipe | None = None,
    skip: tuple[str, ...] = (),
) -> Block:
    torch.manual_seed(0)
    model = Mlp(512).bfloat16()
    convert(model, recipe, skip=list(skip), skip_small=False)
    tokens = Shard(0) if sequence else Replicate()
    plan = {
        "": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    return Block(parallelize_module(model, mesh, plan))


def rows(mesh: DeviceMesh, sequence: bool = True, tokens: int = 256) -> tuple[Tensor, Tensor]:
    """This rank's tokens, ``[tokens, DIM]``, and the gradients of what becomes of them."""
    x, grad = (drawn((tokens, DIM), torch.bfloat16, seed) for seed in (1, 2))
    return (my_part(mesh, x, 0), my_part(mesh, grad, 0)) if sequence else (x, grad)


def assert_compiles(make: Callable[[], nn.Module], *inputs: Tensor, **options: Any) -> None:
    with fresh():
        want = compute(make(), *inputs)
        model = make()
        model.compile(**EAGERLY | options)
        assert_alike(compute(model, *inputs), want)
        assert graphs() == 1


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_block(mesh: DeviceMesh, sequence: bool) -> None:
    """With parts of weights, and tokens, off the grid of blocks."""
    assert_compiles(lambda: parallel_block(mesh, sequence), *batches(mesh, 150, sequence))


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self[0], x, use_reentrant=False)


WAYS: dict[str, tuple[Callable[[DeviceMesh], nn.Module], dict[str, Any]]] = {
    "by inductor": (lambda mesh: mlp(mesh), {"backend": "inductor"}),
    "wgrad from 1x128": (lambda mesh: mlp(mesh, recipe=Recipe.deepseek()), {}),
    "wgrad in high precision": (
        lambda mesh: mlp(mesh, recipe=Recipe(wgrad_input="high_precision")),
        {},
    ),
    "checkpointed": (lambda mesh: Checkpointed(mlp(mesh)), {}),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, gpus=())
def test_an_mlp(mesh: DeviceMesh, way: str) -> None:
    make, options = WAYS[way]
    assert_compiles(lambda: make(mesh), *rows(mesh), **options)


def collectives(graph: Any) -> list[tuple[str, int]]:
    """Each collective, and the bytes that this rank brings."""
    found = []
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        name = node.target._opname
        if name != "wait_tensor":
            sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            found.append((name, sum(x.meta["val"].nbytes for x in sent)))
    return sorted(found)


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2, gpus=())
def test_collectives_are_those_of_eager(mesh: DeviceMesh, sequence: bool) -> None:
    """Those of backward stay there: the forward saves this rank's tokens alone."""
    for tokens in (256, 150) if sequence else (256,):
        x, grad = rows(mesh, sequence, tokens)
        model = mlp(mesh, sequence)
        compute(model, x, grad)  # ranks compare
        with Wire() as forward:
            y = model(x.requires_grad_())
        with Wire() as backward:
            y.backward(grad)
        with fresh():
            compiled = compiled_graphs(model, x)
        eager = [sorted(wire.collectives) for wire in (forward, backward)]
        assert [collectives(graph) for graph in compiled] == eager
        assert sum(map(len, eager)) == (7 if sequence else 2)
        saved = next(n for n in compiled[0].nodes if n.op == "output").args[0]
        values = [n.meta["val"] for n in saved]
        own = {v.numel() for v in values if getattr(v, "dtype", None) == torch.float8_e4m3fn}
        # x of gate and up; off the grid x is saved as it came, and the hidden one is padded
        hidden = 256 * (tokens + -tokens % 64)
        assert own == ({x.numel(), hidden} if tokens == 256 else {hidden})


@on_ranks(2, gpus=())
def test_no_grad(mesh: DeviceMesh) -> None:
    model, (x, _) = mlp(mesh), rows(mesh)
    with torch.no_grad(), fresh():
        assert_same(torch.compile(model, **EAGERLY)(x), model(x))
        (graph,) = compiled_graphs(model, x)
    # x rowwise; y
    names = [name for name, _ in collectives(graph)]
    assert names == ["all_gather_into_tensor_coalesced", "reduce_scatter_tensor"]


@on_ranks(2, gpus=())
def test_blocks_and_batches_share_graphs(mesh: DeviceMesh) -> None:
    with fresh():
        models = [mlp(mesh) for _ in range(3)]
        x, _ = rows(mesh)
        for model in models:
            model.compile(**EAGERLY)
            assert_same(model(x), models[0](x))
        assert graphs() == 1
        eager = mlp(mesh)
        for tokens in (512, 768):
            inputs = rows(mesh, True, tokens)
            models[0].zero_grad()
            eager.zero_grad()
            assert_alike(compute(models[0], *inputs), compute(eager, *inputs))
    assert graphs() == 2  # with and without a gradient of x; any number of tokens


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2, gpus=())
def test_graphs_that_begin_and_end_with_a_prepared_input(mesh: DeviceMesh, sequence: bool) -> None:
    """As where a hook of the compiled module prepares it, and where a graph breaks after."""
    for recipe, breaks in ((Recipe(), False), (Recipe(wgrad_input="high_precision"), True)):
        want, model = (mlp(mesh, sequence, recipe)[0] for _ in range(2))
        want.breaks = model.breaks = breaks
        with fresh():
            compiled = torch.compile(model, **EAGERLY | {"fullgraph": not breaks})
            for tokens in (256, 384) if sequence and not breaks else (256,):
                inputs = rows(mesh, sequence, tokens)
                for each in (want, model):
                    each.zero_grad()
                got = compute(compiled, *inputs)
                grads = {name.removeprefix("_orig_mod."): g for name, g in got.grads.items()}
                assert_alike(got._replace(grads=grads), compute(want, *inputs))


@on_ranks(2, gpus=())
def test_one_linear(mesh: DeviceMesh) -> None:
    with fresh():
        module = parallelize_module(converted(bias=True), mesh, ColwiseParallel())
        x = drawn((128, 256), torch.bfloat16, 1)
        assert_same(torch.compile(module, **EAGERLY)(x), module(x))

    def make() -> nn.Module:
        torch.manual_seed(0)
        norm, up, down = nn.RMSNorm(256), *(nn.Linear(256, 256, bias=False) for _ in range(2))
        model = nn.Sequential(norm, up, down).bfloat16()
        convert(model, skip_small=False)
        plan = {
            "0": torch_styles.SequenceParallel(),
            "1": ColwiseParallel(use_local_output=False),
            "2": RowwiseParallel(output_layouts=Shard(1)),
        }
        return Block(parallelize_module(model, mesh, plan))

    assert_compiles(make, *batches(mesh))


@on_ranks(2, gpus=())
def test_linears_left_in_high_precision(mesh: DeviceMesh) -> None:
    inputs, (model, plain) = rows(mesh), (mlp(mesh, skip=("up",)) for _ in range(2))
    model.compile(**EAGERLY)
    with fresh():
        assert_alike(compute(model, *inputs), compute(plain, *inputs))
        model.zero_grad()
        convert(model, skip_small=False)
        assert_alike(compute(model, *inputs), compute(mlp(mesh), *inputs))
        assert graphs() == 2


@on_ranks(2, gpus=())
def test_fsdp_besides(device: str) -> None:
    mesh = shared_mesh(device, 1, 2, names=("data", "tensor"))
    made = []
    for compiles in (False, True):
        model = nn.Sequential(mlp(mesh["tensor"]))
        if compiles:
            model[0].compile(**EAGERLY)
        for part in (model[0], model):
            fully_shard(part, mesh=mesh["data"])
        with fresh():
            made.append(compute(model, *rows(mesh["tensor"])))
            assert graphs() == int(compiles)
    assert_alike(made[1], made[0])


@pytest.mark.parametrize("fp8", [False, True])
@on_ranks(2, gpus=())
def test_other_products_of_a_prepared_input_are_refused(mesh: DeviceMesh, fp8: bool) -> None:
    model: Any = mlp(mesh)
    other = nn.Linear(DIM, DIM, bias=False).bfloat16()
    if fp8:
        convert(other, skip_small=False)
    model[0].add_module("other", other)
    model[0].forward = MethodType(lambda mlp, x: mlp.other(x), model[0])
    refused = pytest.raises(Exception, match="a matmul of a layer without ColwiseParallel")
    with fresh(), refused:
        torch.compile(model, **EAGERLY)(rows(mesh)[0])


@pytest.mark.parametrize(
    "what", ["inputs of tensor parallel linear layers", "tensor parallel linear layers"]
)
@on_ranks(2, gpus=())
def test_ranks_that_disagree(mesh: DeviceMesh, what: str) -> None:
    """They compare while the first forward is traced."""
    started = time.monotonic()
    recipe = (Recipe(), Recipe(scale="power_of_two"))[mesh.get_local_rank()]
    module: nn.Module
    if what == "tensor parallel linear layers":
        module = parallelize_module(converted(recipe=recipe), mesh, ColwiseParallel())
        x = drawn((128, 256), torch.bfloat16, 1)
    else:
        module, (x, _) = mlp(mesh, recipe=recipe), rows(mesh)
    with fresh(), pytest.raises(Exception, match=f"ranks disagree on {what}: rank"):
        torch.compile(module, **EAGERLY)(x)
    assert time.monotonic() - started < 30
