"""``parallelize_module`` with our styles: the values that a rank gets, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import BlockwiseFP8Weight, Recipe, convert, explain, freeze
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from blocktensor.sharding.cuts import frozen_parts, frozen_twin
from tests.support.numeric import assert_same
from tests.support.parallel_linears import (
    BF16,
    assert_alike,
    batches,
    block,
    compute,
    converted,
    drawn,
    local,
    my_part,
    parallel_block,
    plain,
)
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import whole

POW2 = Recipe(scale="power_of_two")


@on_ranks(2, gpus=())
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_frozen_weights_keep_their_recipe(mesh: DeviceMesh, style: Any) -> None:
    linear = nn.Linear(512, 512, bias=False).bfloat16()
    convert(linear, POW2, skip_small=False)
    freeze(linear)
    parallelize_module(linear, mesh, style())
    assert linear.weight.to_local().recipe == POW2


@on_ranks(2, gpus=())
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("kind", ["trainable", "frozen", "not converted"])
def test_which_ranks_values_are_taken(mesh: DeviceMesh, style: Any, kind: str) -> None:
    """``src_data_rank`` names the rank; with None, each rank keeps its own."""
    rank, dim = mesh.get_local_rank(), 0 if style is ColwiseParallel else 1
    for source, taken in ((None, rank), (0, 0), (1, 1)):
        linears = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            linear = nn.Linear(256, 256).bfloat16()
            if kind != "not converted":
                convert(linear, skip_small=False)
            if kind == "frozen":
                freeze(linear)
            linears.append(linear)
        want = copy.deepcopy(linears[taken])
        made = parallelize_module(linears[rank], mesh, style(), src_data_rank=source)
        got = made.weight.to_local()
        values = [
            x.dequantize() if kind == "frozen" else whole(x).contiguous()
            for x in (got, want.weight)
        ]
        assert_same(values[0], my_part(mesh, values[1], dim))
        if kind != "not converted":  # and not the memory of the whole
            held = got.rowwise_data if kind == "frozen" else got.master
            assert held.is_contiguous() and held.untyped_storage().nbytes() == held.nbytes
        bias = want.bias.detach()
        assert_same(local(made.bias), my_part(mesh, bias, 0) if dim == 0 else bias)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@on_ranks(2, gpus=())
def test_what_is_frozen_stays_frozen(mesh: DeviceMesh, style: Any) -> None:
    flags = itertools.product((False, True), repeat=3)
    for in_fp8, weight, bias in flags:
        module = plain(256, 256, True, BF16)
        module.weight.requires_grad_(weight)
        module.bias.requires_grad_(bias)
        if in_fp8:
            convert(module, skip_small=False)
        parallelize_module(module, mesh, style())
        assert (module.weight.requires_grad, module.bias.requires_grad) == (weight, bias)


@on_ranks(2)
def test_the_order_of_convert_does_not_matter(mesh: DeviceMesh) -> None:
    inputs = batches(mesh)
    want = {
        recipe: compute(parallel_block(mesh, recipe=recipe), *inputs) for recipe in (Recipe(), POW2)
    }
    model = parallel_block(mesh, recipe=None)
    identities = [id(p) for p in model.parameters()]
    for recipe in (Recipe(), POW2):
        assert len(convert(model, recipe, skip_small=False).converted) == 7
        assert [id(p) for p in model.parameters()] == identities
        assert isinstance(model.attention.k.weight.to_local(), BlockwiseFP8Weight)
        assert_alike(compute(model, *inputs), want[recipe])
        model.zero_grad()


@on_ranks(2, gpus=())
def test_the_report_judges_the_whole_weight(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2048, 8192, bias=False), nn.Linear(2048, 1024, bias=False))
    parallelize_module(model.bfloat16(), mesh, {"0": ColwiseParallel()})
    first, second = convert(model).entries
    assert first.reason == "trainable, tensor parallel: 4096 x 2048 a rank"
    assert second.reason.startswith("small: N K=2097152 <")
    assert convert(block(None), skip_small=False).bytes_after > 0
    model = parallel_block(mesh, recipe=None)
    entries = {e.name: e for e in convert(model, skip_small=False).converted}
    assert entries["attention.k"].shape == (128, 256)
    assert entries["attention.k"].reason == (
        "trainable, tensor parallel: 64 x 256 a rank, small for its speed: N=64 < 1024 and "
        "K=256 < 1024 and N K=16384 < 4194304"
    )
    sizes = {(p.layer, p.kind): p.sizes for p in explain(model, 512).matmuls}
    assert sizes["attention.k", "fprop"] == "512 x 64 x 256"
    assert sizes["attention.o", "dgrad"] == "512 x 128 x 256"


@on_ranks(2, gpus=())
def test_what_cannot_be_cut_raises(mesh: DeviceMesh) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        odd, frozen = converted(255, 255), converted(384, 384)
        freeze(frozen)
        for module, message in (
            (odd, "expected a multiple of 2;"),
            (frozen, r"a frozen FP8 weight .* a multiple of 256;"),
            (parallelize_module(converted(), mesh, style), "and each linear layer once"),
        ):
            with pytest.raises(NotImplementedError, match=message):
                parallelize_module(module, mesh, style)
        assert isinstance(odd.weight, BlockwiseFP8Weight)
    for kind in (ColwiseParallel, RowwiseParallel, PrepareModuleInput):
        with pytest.raises(TypeError, match=r"reduce_dtype=torch.int8: expected one of"):
            kind(reduce_dtype=torch.int8)


@pytest.mark.parametrize("n", [200, 384])
@on_ranks(2, gpus=())
def test_parts_off_the_grid_stay_trainable(mesh: DeviceMesh, n: int) -> None:
    """All ranks decide alike, also one whose part has as many blocks as it would have alone."""
    for style, sizes in ((ColwiseParallel(), (n, 256)), (RowwiseParallel(), (256, n))):
        linear = parallelize_module(converted(*sizes), mesh, style)
        with pytest.raises(NotImplementedError, match=r"^the weight \[.*\] with the placements .*"):
            freeze(linear)
        assert isinstance(linear.weight.to_local(), BlockwiseFP8Weight)
        with pytest.raises(NotImplementedError, match="which cut 128x128 blocks"):
            frozen_parts(frozen_twin(linear.weight))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_a_parameter_more() -> nn.Linear:
    module = plain(256, 256, True, BF16)
    module.register_parameter("gain", nn.Parameter(torch.ones(256)))
    return module


def with_a_dtensor(name: str) -> Callable[[DeviceMesh], nn.Linear]:
    def made(mesh: DeviceMesh) -> nn.Linear:
        module = plain(256, 256, True, BF16)
        cut = distribute_tensor(module.get_parameter(name).detach(), mesh, [Replicate()])
        module.register_parameter(name, nn.Parameter(cut))
        return module

    return made


NOT_CUT: dict[str, tuple[Callable[[DeviceMesh], nn.Module], type[Exception], str]] = {
    "a forward of its own": (
        lambda _: Doubled(256, 256),
        NotImplementedError,
        "Doubled with a forward of its own, which would not run",
    ),
    "a computed weight": (
        lambda _: nn.utils.parametrizations.weight_norm(nn.Linear(256, 256)),
        NotImplementedError,
        r"with the parameters \['bias'\]: expected a weight and a bias",
    ),
    "a parameter more": (
        lambda _: with_a_parameter_more(),
        NotImplementedError,
        r"with the parameters \['bias', 'gain', 'weight'\]: expected a weight and a bias",
    ),
    "a weight that is cut": (with_a_dtensor("weight"), ValueError, "the weight of this Linear is"),
    "a bias that is cut": (with_a_dtensor("bias"), ValueError, "the bias of this Linear is a DT"),
}


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("case", NOT_CUT)
@on_ranks(2, gpus=())
def test_modules_that_are_not_cut(mesh: DeviceMesh, case: str, style: Any) -> None:
    make, error, message = NOT_CUT[case]
    module = make(mesh)
    before = dict(module.named_parameters())
    with pytest.raises(error, match=message):
        parallelize_module(module, mesh, style())
    assert all(module.get_parameter(name) is x for name, x in before.items())
    assert "forward" not in vars(module)


@on_ranks(2, gpus=())
def test_layouts_that_do_not_fit(mesh: DeviceMesh, world: int, device: str) -> None:
    two = shared_mesh(device, 1, world, names=("one", "all"))
    with pytest.raises(ValueError, match=r"a Linear on a mesh of 2 dimensions: pass one of them"):
        ColwiseParallel()._apply(converted(), two)
    x = drawn((3, 256), BF16, 1)
    for style, layouts in (
        (ColwiseParallel, {"input_layouts": Shard(2)}),
        (ColwiseParallel, {"input_layouts": Shard(-3)}),
        (RowwiseParallel, {"output_layouts": Shard(2)}),
    ):
        given = x if style is ColwiseParallel else my_part(mesh, x, 1)
        module = parallelize_module(converted(), mesh, style(**layouts))
        with pytest.raises(ValueError, match="of a tensor of 2 dimensions"):
            module(given)
    module = parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(ValueError, match=r"dimension 0 of an output \[3, 128\] cannot be cut into"):
        module(my_part(mesh, x, 1))
