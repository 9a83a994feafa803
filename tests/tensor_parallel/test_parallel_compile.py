"""Compiled blocks of parallel linears: one graph, with the bits and the collectives of eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from tests.support.compiling import fresh, graphs
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
from tests.support.parallel_mlps import Block, mlp, rows
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.wire import Wire


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


@on_ranks(2, gpus=())
def test_inductor(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    with fresh():
        inputs = (rows(mesh, True, seed) for seed in (1, 2))
        assert_compiles(lambda: mlp(mesh, True), *inputs, backend="inductor")
        assert graphs() == 1


@pytest.mark.parametrize("wgrad_input", ["128x128", "high_precision"])
@on_ranks(2, gpus=())
def test_recipes(world: int, device: str, wgrad_input: Any) -> None:
    mesh, recipe = mesh_of(world, device), Recipe(wgrad_input=wgrad_input)
    inputs = (rows(mesh, True, seed) for seed in (1, 2))
    with fresh():
        assert_compiles(lambda: mlp(mesh, True, recipe), *inputs)


class Recorded:
    """A backend that keeps the graphs of forward and backward."""

    def __init__(self) -> None:
        self.forward: Any = None
        self.backward: Any = None
        self.backend = aot_autograd(
            fw_compiler=self._keep("forward"),
            bw_compiler=self._keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _keep(self, name: str) -> Callable[..., Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            setattr(self, name, graph)
            return graph

        return compiler


def collectives(graph: Any) -> list[tuple[str, int]]:
    """Each collective, and the bytes that this rank brings."""
    found = []
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        name = node.target._opname
        if name != "wait_tensor":
            sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            found.append((name, sum(x.meta["val"].nbytes for x in sent)))
    return sorted(found)


@contextmanager
def eager_collectives(found: list[tuple[str, int]]) -> Iterator[None]:
    """As :func:`collectives`, of what runs in eager mode."""
    with Wire() as wire:
        yield
    found += sorted(wire.collectives)


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2, gpus=())
def test_collectives_are_those_of_eager(world: int, device: str, sequence: bool) -> None:
    """Those of backward stay there: the forward saves this rank's tokens alone."""
    mesh = mesh_of(world, device)
    for tokens in (256, 150) if sequence else (256,):
        x, grad = (rows(mesh, sequence, seed, tokens) for seed in (1, 2))
        model, recorded = mlp(mesh, sequence), Recorded()
        compute(model, x, grad)  # ranks compare
        forward: list[tuple[str, int]] = []
        backward: list[tuple[str, int]] = []
        with eager_collectives(forward):
            y = model(x.requires_grad_())
        with eager_collectives(backward):
            y.backward(grad)
        with fresh():
            torch.compile(model, fullgraph=True, backend=recorded.backend)(x).backward(grad)
        assert collectives(recorded.forward) == forward
        assert collectives(recorded.backward) == backward
        assert len(forward) + len(backward) == (7 if sequence else 2)
        saved = next(n for n in recorded.forward.graph.nodes if n.op == "output").args[0]
        values = [n.meta["val"] for n in saved]
        own = {v.numel() for v in values if getattr(v, "dtype", None) == torch.float8_e4m3fn}
        # x of gate and up; off the grid x is saved as it came, and the hidden one is padded
        hidden = 256 * (tokens + -tokens % 16)
        assert own == ({x.numel(), hidden} if tokens == 256 else {hidden})


@on_ranks(2, gpus=())
def test_no_grad(world: int, device: str) -> None:
    mesh, recorded = mesh_of(world, device), Recorded()
    model, x = mlp(mesh, True), rows(mesh, True, 1)
    with torch.no_grad():
        want = model(x)
        with fresh():
            got = torch.compile(model, fullgraph=True, backend=recorded.backend)(x)
    assert_same(got, want)
    assert recorded.backward is None
    # x rowwise; y
    names = [name for name, _ in collectives(recorded.forward)]
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
            model = mlp(mesh, sequence, recipe).mlp
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
def test_activation_checkpointing(world: int, device: str) -> None:
    mesh = mesh_of(world, device)

    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.mlp, x, use_reentrant=False)
            return made

    with fresh():
        inputs = (rows(mesh, True, seed) for seed in (1, 2))
        assert_compiles(lambda: Checkpointed(mlp(mesh, True)), *inputs)
        assert graphs() == 1


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
        model.mlp.add_module("other", other)
        model.mlp.forward = MethodType(lambda mlp, x: mlp.other(x), model.mlp)
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
