"""Compiled blocks of parallel linears: one graph, with the bits and the collectives of eager."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.compiling import compiled_graphs, fresh, graphs
from tests.support.numeric import assert_same
from tests.support.parallel_blocks import (
    DIM,
    UNALIGNED,
    assert_alike,
    batch,
    block,
    compute,
    parallelize,
    tokens_of,
)
from tests.support.parallel_linears import converted, drawn
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.wire import Wire


class Mlp(nn.Module):
    """A gated one, with one rounding between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, 512, bias=False) for _ in range(2))
        self.down = nn.Linear(512, DIM, bias=True)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, DIM)
        if self.breaks:
            torch._dynamo.graph_break()
        made: Tensor = self.down(self.gate(x).relu() * self.up(x))
        return made


class Block(nn.Sequential):
    """A module in another, whose hooks are in the graph with it."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self[0](x)
        return made


def mlp(
    mesh: DeviceMesh, sequence: bool, recipe: Recipe | None = None, skip: tuple[str, ...] = ()
) -> Block:
    """A parallel one."""
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    convert(model, recipe, skip=list(skip), skip_small=False)
    tokens = Shard(0) if sequence else Replicate()
    plan = {
        "": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    return Block(parallelize_module(model, mesh, plan))


def rows(mesh: DeviceMesh, sequence: bool, seed: int, tokens: int = 256) -> Tensor:
    """This rank's tokens, ``[tokens, DIM]``."""
    x = drawn((tokens, DIM), torch.bfloat16, seed)
    return x.chunk(mesh.size())[mesh.get_local_rank()].contiguous() if sequence else x


def assert_compiles(make: Callable[[], nn.Module], *inputs: Tensor, **options: Any) -> nn.Module:
    """Eager and compiled models compute the same; the compiled one is returned."""
    want = compute(make(), *inputs)
    model = make()
    model.compile(fullgraph=True, **{"backend": "aot_eager", **options})
    assert_alike(compute(model, *inputs), want)
    return model


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_block(world: int, device: str, sequence: bool) -> None:
    """With parts of weights, and tokens, off the grid of blocks."""
    mesh = mesh_of(world, device)

    def make() -> nn.Module:
        model = block(**UNALIGNED).to(device)
        parallelize(model, mesh, sequence)
        return model

    inputs = (tokens_of(mesh, batch(i, 150).to(device), sequence) for i in (1, 2))
    with fresh():
        assert_compiles(make, *inputs)
        assert graphs() == 1


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self[0], x, use_reentrant=False)
        return made


WAYS: dict[str, tuple[Callable[[DeviceMesh], nn.Module], dict[str, Any]]] = {
    "by inductor": (lambda mesh: mlp(mesh, True), {"backend": "inductor"}),
    "wgrad from 128x128": (lambda mesh: mlp(mesh, True, Recipe(wgrad_input="128x128")), {}),
    "wgrad in high precision": (
        lambda mesh: mlp(mesh, True, Recipe(wgrad_input="high_precision")),
        {},
    ),
    "checkpointed": (lambda mesh: Checkpointed(mlp(mesh, True)), {}),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, gpus=())
def test_an_mlp(world: int, device: str, way: str) -> None:
    (make, options), mesh = WAYS[way], mesh_of(world, device)
    with fresh():
        inputs = (rows(mesh, True, seed) for seed in (1, 2))
        assert_compiles(lambda: make(mesh), *inputs, **options)
        assert graphs() == 1


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
def test_collectives_are_those_of_eager(world: int, device: str, sequence: bool) -> None:
    """Those of backward stay there: the forward saves this rank's tokens alone."""
    mesh = mesh_of(world, device)
    for tokens in (256, 150) if sequence else (256,):
        x, grad = (rows(mesh, sequence, seed, tokens) for seed in (1, 2))
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
        hidden = 256 * (tokens + -tokens % 16)
        assert own == ({x.numel(), hidden} if tokens == 256 else {hidden})


@on_ranks(2, gpus=())
def test_no_grad(world: int, device: str) -> None:
    model, x = mlp(mesh_of(world, device), True), rows(mesh_of(world, device), True, 1)
    with torch.no_grad(), fresh():
        assert_same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
        (graph,) = compiled_graphs(model, x)
    # x rowwise; y
    names = [name for name, _ in collectives(graph)]
    assert names == ["all_gather_into_tensor_coalesced", "reduce_scatter_tensor"]


@on_ranks(2, gpus=())
def test_blocks_and_batches_share_graphs(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    with fresh():
        models = [mlp(mesh, True) for _ in range(3)]
        for model in models:
            model.compile(fullgraph=True, backend="aot_eager")
            assert_same(model(rows(mesh, True, 1)), models[0](rows(mesh, True, 1)))
        assert graphs() == 1
        eager = mlp(mesh, True)
        for tokens in (512, 768):
            inputs = [rows(mesh, True, seed, tokens) for seed in (1, 2)]
            models[0].zero_grad()
            eager.zero_grad()
            assert_alike(compute(models[0], *inputs), compute(eager, *inputs))
        # with and without a gradient of x, and any number of tokens
        assert graphs() == 2


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2, gpus=())
def test_graphs_that_begin_and_end_with_a_prepared_input(
    world: int, device: str, sequence: bool
) -> None:
    """As where a hook of the compiled module prepares it, and where a graph breaks after."""
    mesh = mesh_of(world, device)
    for recipe, breaks in ((Recipe(), False), (Recipe(wgrad_input="high_precision"), True)):

        def make(recipe: Recipe = recipe, breaks: bool = breaks) -> nn.Module:
            model = mlp(mesh, sequence, recipe)[0]
            model.breaks = breaks  # type: ignore[assignment]
            return model

        with fresh():
            want, model = make(), make()
            compiled = torch.compile(model, fullgraph=not breaks, backend="aot_eager")
            for tokens in (256,) if breaks else (256, 384):
                inputs = [rows(mesh, sequence, seed, tokens) for seed in (1, 2)]
                for each in (want, model):
                    each.zero_grad()
                got = compute(compiled, *inputs)
                grads = {name.removeprefix("_orig_mod."): g for name, g in got.grads.items()}
                assert_alike(got._replace(grads=grads), compute(want, *inputs))


@on_ranks(2, gpus=())
def test_one_linear(world: int, device: str) -> None:
    """Compiled by itself, and with DTensors in and out."""
    mesh = mesh_of(world, device)
    with fresh():
        module = parallelize_module(
            converted(256, 256, True, torch.bfloat16), mesh, ColwiseParallel()
        )
        x = drawn((128, 256), torch.bfloat16, 1)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(compiled(x), module(x))

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

    with fresh():
        assert_compiles(make, *(tokens_of(mesh, batch(seed)) for seed in (1, 2)))
        assert graphs() == 1


@on_ranks(2, gpus=())
def test_linears_left_in_high_precision(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    inputs = [rows(mesh, True, seed) for seed in (1, 2)]
    with fresh():
        model = assert_compiles(lambda: mlp(mesh, True, skip=("up",)), *inputs)
        model.zero_grad()
        convert(model, skip_small=False)
        assert_alike(compute(model, *inputs), compute(mlp(mesh, True), *inputs))
        assert graphs() == 2


@on_ranks(2, gpus=())
def test_fsdp_besides(world: int, device: str) -> None:
    """A compiled block that FSDP2 gathers, on a mesh of 1 x 2."""
    mesh = init_device_mesh(device, (1, world), mesh_dim_names=("data", "tensor"))
    made = []
    for compiles in (False, True):
        model = nn.Sequential(mlp(mesh["tensor"], True))
        if compiles:
            model[0].compile(fullgraph=True, backend="aot_eager")
        for part in (model[0], model):
            fully_shard(part, mesh=mesh["data"])
        with fresh():
            made.append(compute(model, *(rows(mesh["tensor"], True, seed) for seed in (1, 2))))
            assert graphs() == int(compiles)
    assert_alike(made[1], made[0])


@on_ranks(2, gpus=())
def test_other_products_of_a_prepared_input_are_refused(world: int, device: str) -> None:
    for fp8 in (False, True):
        model: Any = mlp(mesh_of(world, device), True)
        other = nn.Linear(DIM, DIM, bias=False).bfloat16()
        if fp8:
            convert(other, skip_small=False)
        model[0].add_module("other", other)
        model[0].forward = MethodType(lambda mlp, x: mlp.other(x), model[0])
        with (
            fresh(),
            pytest.raises(Exception, match="a product that is not one of ColwiseParallel"),
        ):
            torch.compile(model, fullgraph=True, backend="aot_eager")(
                rows(mesh_of(world, device), True, 1)
            )


@pytest.mark.parametrize("where", ["parameter", "local part"])
@on_ranks(2, gpus=())
def test_main_grad_is_refused(world: int, device: str, where: str) -> None:
    """Also where it is set after the first forward."""
    module: Any = converted(256, 256, False, torch.bfloat16)
    parallelize_module(module, mesh_of(world, device), ColwiseParallel())
    x = drawn((128, 256), torch.bfloat16, 1)
    with fresh():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        compiled(x)
        owner = module.weight if where == "parameter" else module.weight._local_tensor
        owner.main_grad = torch.zeros(128, 256)
        with pytest.raises(Exception, match=r"weight.main_grad of a tensor parallel linear"):
            compiled(x)


@pytest.mark.parametrize("what", ["input", "linear"])
@on_ranks(2, gpus=())
def test_ranks_that_disagree(world: int, device: str, what: str) -> None:
    """They compare while the first forward is traced."""
    mesh, started = mesh_of(world, device), time.monotonic()
    recipe = (Recipe(), Recipe(scale="power_of_two"))[dist.get_rank()]
    module: nn.Module = converted(256, 256, False, torch.bfloat16, recipe)
    x = drawn((128, 256), torch.bfloat16, 1)
    if what == "linear":
        parallelize_module(module, mesh, ColwiseParallel())
    else:
        module, x = mlp(mesh, True, recipe), rows(mesh, True, 1)
    noun = {"input": "inputs of tensor parallel linears", "linear": "tensor parallel linears"}[what]
    with fresh(), pytest.raises(Exception, match=f"ranks disagree on {noun}: rank"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert time.monotonic() - started < 30
