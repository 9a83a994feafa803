"""Styles on models: before and after convert, in reports, on ranks that disagree."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, convert, explain, freeze
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from blocktensor.tensor_parallel import parallel_forward
from tests.support.asserts import assert_no_marked_product
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import (
    BF16,
    DIM,
    Mlp,
    assert_alike,
    batch,
    batches,
    block,
    compute,
    converted,
    drawn,
    local,
    my_part,
    parallel_block,
    plain,
    tokens_of,
)
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import Wire, scale, whole

POW2 = Recipe(scale="power_of_two")


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_block_computes_what_one_process_does(
    mesh: DeviceMesh, device: str, sequence: bool
) -> None:
    for tokens in (256, 150):
        model = parallel_block(mesh, sequence)
        got = compute(model, *batches(mesh, tokens, sequence))
        want = compute(block().to(device), *(batch(i, tokens).to(device) for i in (1, 2)))
        assert relative_error(got.y, tokens_of(mesh, want.y, sequence)) < 1e-2
        assert relative_error(got.dx, tokens_of(mesh, want.dx, sequence)) < 2e-2
        for name, p in model.named_parameters():
            assert relative_error(whole(p.grad), want.grads[name]) < 0.05, name


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
def test_no_tokens(mesh: DeviceMesh) -> None:
    got = compute(parallel_block(mesh), batch(1)[:, :0], batch(2)[:, :0])
    assert got.y.shape == (2, 0, 256)
    assert not any(grad.any() for grad in got.grads.values())


@on_ranks(2)
def test_a_copy_has_its_own_weights(mesh: DeviceMesh) -> None:
    model, (x, _) = parallel_block(mesh), batches(mesh)
    y = model(x)
    other = copy.deepcopy(model)
    assert_same(other(x), y)
    scale(2, other.mlp.gate.weight)
    assert_same(model(x), y)
    assert (other(x) != y).any()


@pytest.mark.parametrize("by_keyword", [False, True])
@on_ranks(2, gpus=())
def test_a_copy_casts_its_input_by_its_own_recipe(mesh: DeviceMesh, by_keyword: bool) -> None:
    """Not by the recipe of the module that it was copied from, whose hooks it shares."""

    def made(recipe: Recipe) -> Mlp:
        torch.manual_seed(0)
        mlp = Mlp(384).bfloat16()
        convert(mlp, recipe, skip_small=False)
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(mlp, mesh, plan)
        if by_keyword:
            layouts: Any = {
                "input_kwarg_layouts": {"x": Replicate()},
                "desired_input_kwarg_layouts": {"x": Replicate()},
            }
        else:
            layouts = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
        return parallelize_module(mlp, mesh, PrepareModuleInput(**layouts))

    def run(mlp: Mlp) -> Tensor:
        x = batch(1)
        return mlp(x=x) if by_keyword else mlp(x)

    model = made(Recipe())
    want = {Recipe(): run(model), POW2: run(made(POW2))}
    other = copy.deepcopy(model)
    convert(other, POW2, skip_small=False)
    assert_same(run(other), want[POW2])
    assert_same(run(model), want[Recipe()])


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@on_ranks(2, gpus=())
def test_a_copy_has_its_own_gradients(mesh: DeviceMesh, style: Any) -> None:
    """Also of a rank whose part begins inside a block."""
    for recipe in (Recipe(), Recipe(wgrad_input="high_precision")):
        model = plain(128, 128, True, BF16)
        convert(model, recipe, skip_small=False)
        parallelize_module(model, mesh, style())
        model(drawn((32, 128 if style is ColwiseParallel else 64), BF16, 1)).sum().backward()
        other = copy.deepcopy(model)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(local(q.grad), local(p.grad))
            q.grad.mul_(2)
            assert (local(q.grad) != local(p.grad)).any()


@on_ranks(2, gpus=())
def test_no_module_is_pickled(mesh: DeviceMesh) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        module = nn.Sequential(parallelize_module(converted(), mesh, style))
        for save in (lambda model: torch.save(model, io.BytesIO()), pickle.dumps):
            with pytest.raises(NotImplementedError, match=r"get_model_state_dict\(model\)"):
                save(module)


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
    sizes = {(p.layer, p.kind): p.sizes for p in explain(model, 512).products}
    assert sizes["attention.k", "fprop"] == "512 x 64 x 256"
    assert sizes["attention.o", "dgrad"] == "512 x 128 x 256"


@on_ranks(2, gpus=())
def test_styles_of_torch_name_ours(mesh: DeviceMesh) -> None:
    for style in (torch_styles.ColwiseParallel(), torch_styles.RowwiseParallel()):
        module = converted(bias=True)
        with pytest.raises(NotImplementedError, match="ColwiseParallel or RowwiseParallel of"):
            parallelize_module(module, mesh, style)
        assert module(drawn((128, 256), BF16, 1)).shape == (128, 256)  # as it was
        module = parallelize_module(plain(256, 256, True, BF16), mesh, style)
        with pytest.raises(NotImplementedError, match="ColwiseParallel or RowwiseParallel of"):
            convert(module, skip_small=False)
        assert type(module.weight.to_local()) is Tensor


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


@on_ranks(2)
def test_frozen_weights(mesh: DeviceMesh, device: str) -> None:
    x, single = drawn((128, 512), BF16, 1).to(device), converted(512, 512).to(device)
    of_bias = parallelize_module(converted(512, 512, True).to(device), mesh, RowwiseParallel())
    of_bias.weight.requires_grad_(False)
    of_bias(my_part(mesh, x, -1)).sum().backward()
    assert (of_bias.bias.grad.to_local() == 128).all()
    freeze(single)
    want = single(x)
    colwise = parallelize_module(copy.deepcopy(single), mesh, ColwiseParallel())
    assert_same(colwise(x), my_part(mesh, want, -1))
    uneven = distribute_tensor(x[:127], mesh, [Shard(0)])
    assert_same(colwise(uneven), my_part(mesh, single(x[:127]), -1))
    with Wire() as wire:
        assert_same(colwise(distribute_tensor(x, mesh, [Shard(0)])), my_part(mesh, want, -1))
    assert {sent.dtype for sent in wire.gathered} == {torch.uint8}  # in FP8 where parts are equal
    rowwise = parallelize_module(single, mesh, RowwiseParallel(in_rank_order=True))
    assert relative_error(rowwise(my_part(mesh, x, -1)), want) < 4e-3
    assert not any(p.requires_grad for m in (colwise, rowwise) for p in m.parameters())


@on_ranks(2, gpus=())
def test_tokens_in_unequal_parts(mesh: DeviceMesh) -> None:
    x, grad, whole = drawn((127, 256), BF16, 1), drawn((127, 512), BF16, 2), converted(512)
    want = compute(whole, x, grad)
    module = parallelize_module(converted(512), mesh, ColwiseParallel())
    cut = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    module(cut).backward(my_part(mesh, grad, -1))
    assert relative_error(cut.grad.full_tensor(), want.dx) < 4e-3
    assert_same(local(module.weight.grad), my_part(mesh, want.grads["weight"], 0))


@on_ranks(2)
def test_no_product_is_in_high_precision(mesh: DeviceMesh) -> None:
    for sequence in (False, True):
        model = parallel_block(mesh, sequence)
        # of a length that no other test has: DTensor asks for shapes that it has not met
        notes = assert_no_marked_product(model, batches(mesh, 66, sequence)[0]).notes
        # 33 tokens a rank and sequence
        assert [note.partition(",")[0] for note in notes] == sequence * [
            "tokens travel in high precision for weight gradients"
        ]
        if sequence:
            assert {"attention.o", "mlp.down"} < set(notes[0].rpartition(": ")[2].split(", "))
        report = assert_no_marked_product(model, batches(mesh, 256, sequence)[0])
        assert report.notes == ()
        kinds = [e.kind for e in report.entries if e.precision == "FP8"]
        assert len({kinds.count(kind) for kind in ("fprop", "dgrad", "wgrad")}) == 1


@pytest.mark.parametrize("what", ["converted", "recipe", "alone", "layouts"])
@on_ranks(2, gpus=())
def test_ranks_that_disagree(mesh: DeviceMesh, what: str) -> None:
    rank, started = mesh.get_local_rank(), time.monotonic()
    if what in ("alone", "layouts"):  # a linear without a shared input
        module, is_local = plain(256, 256, False, BF16), rank == 0 or what == "alone"
        if rank or what == "layouts":
            convert(module, skip_small=False)
        style = ColwiseParallel(input_layouts=Shard(0), use_local_output=is_local)
        parallelize_module(module, mesh, style)
        text = r"^ranks disagree on tensor parallel linear layers: rank"
        with pytest.raises(RuntimeError, match=text):
            module(drawn((128, 256), BF16, 1))
    else:
        model = parallel_block(mesh, recipe=None)
        if what == "recipe" or rank == 0:
            convert(model, (Recipe(), POW2)[rank], skip_small=False)
        for _ in range(2):  # nothing that differs is remembered as agreed on
            with pytest.raises(RuntimeError, match=r"^ranks disagree on inputs of tensor parallel"):
                model(batches(mesh)[0])
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("what", ["dtype", "outputs", "inputs", "style"])
@on_ranks(2, gpus=())
def test_ranks_whose_linears_differ(mesh: DeviceMesh, what: str) -> None:
    rank = mesh.get_local_rank()
    n, k = (256 << (rank * (what == each)) for each in ("outputs", "inputs"))
    dtype = torch.float32 if rank and what == "dtype" else BF16
    style = RowwiseParallel if rank and what == "style" else ColwiseParallel
    module = converted(n, k, dtype=dtype)
    layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    parallelize_module(module, mesh, style(**layouts), src_data_rank=None)
    x = drawn((4, k), dtype, 1)
    with pytest.raises(RuntimeError, match=r"^ranks disagree on tensor parallel linear layers: ra"):
        module(x)


@on_ranks(2, gpus=())
def test_ranks_compare_once_and_after_a_change(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    agree = parallel_forward.agree
    monkeypatch.setattr(parallel_forward, "agree", lambda *x: (found.append(x[0]), agree(*x)))
    x = batches(mesh)[0]
    model = parallel_block(mesh)
    wanted = 2 * ["inputs of tensor parallel linear layers"] + 7 * ["tensor parallel linear layers"]
    for recipe in (Recipe(), POW2):
        convert(model, recipe, skip_small=False)
        found.clear()
        for _ in range(2):
            model(x)
        assert sorted(found) == wanted


@on_ranks(2)
def test_activation_checkpointing(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    want = compute(parallel_block(mesh), *batches(mesh))
    model = parallel_block(mesh)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x: checkpoint(forward, x, use_reentrant=False))
    assert_alike(compute(model, *batches(mesh)), want)


@on_ranks(2)
def test_inputs_and_outputs_as_dtensors(mesh: DeviceMesh, device: str) -> None:
    """As SequenceParallel gives them, and as loss_parallel takes them."""
    plan = {
        "0": torch_styles.SequenceParallel(),
        "1": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    up, down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
    model = nn.Sequential(nn.RMSNorm(256), up, down).to(device, BF16)
    convert(model, skip_small=False)
    single = copy.deepcopy(model)
    parallelize_module(model, mesh, plan)
    y = model(batches(mesh)[0])
    assert y.placements == (Shard(1),)
    y.full_tensor().float().square().sum().backward()
    want = single(batch(1).to(device))
    want.float().square().sum().backward()
    assert relative_error(y.full_tensor(), want) < 1e-2
    for got, one in zip(model.parameters(), single.parameters(), strict=True):
        assert relative_error(got.grad.full_tensor(), one.grad) < 0.05


@on_ranks(2)
def test_state_dict_holds_masters(mesh: DeviceMesh, device: str) -> None:
    model, other = parallel_block(mesh), parallel_block(mesh)
    masters = block(None).to(device).state_dict()
    for name, value in model.state_dict().items():
        assert type(local(value)) is Tensor
        assert_same(whole(value), masters[name])
    scale(0, *other.parameters())
    other.load_state_dict(model.state_dict())
    assert_alike(compute(other, *batches(mesh)), compute(model, *batches(mesh)))
    other.load_state_dict(model.state_dict(), assign=True)
    assert isinstance(other.mlp.gate.weight.to_local(), BlockwiseFP8Weight)


@pytest.mark.parametrize("policy", ["backward", False])
@on_ranks(2, gpus=())
def test_a_weight_that_changed_is_cast_again(mesh: DeviceMesh, policy: Any) -> None:
    """The casts of parts off the grid follow the master, and a change before backward raises."""
    module = converted(384, 256, recipe=Recipe(cache_weight=policy))
    parallelize_module(module, mesh, ColwiseParallel())
    x = drawn((128, 256), BF16, 1).requires_grad_()
    before = module(x)
    scale(2, module.weight)
    assert_same(module(x), before * 2)
    (part,) = module.weight.to_local().cache.parts()  # with the whole's scales
    casts = part.casts
    y = module(x)
    assert part.casts == casts + 1
    scale(2, module.weight)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.sum().backward()


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel, PrepareModuleInput])
def test_options_and_their_defaults_are_those_of_torchs_style(style: Any) -> None:
    own, torchs = (
        {name: (x.kind, x.default) for name, x in inspect.signature(kind).parameters.items()}
        for kind in (style, getattr(torch_styles, style.__name__))
    )
    more = {"reduce_dtype": None, "in_rank_order": False}
    assert own == torchs | {name: (inspect.Parameter.KEYWORD_ONLY, x) for name, x in more.items()}


class Seen(nn.Module):
    """Returns its arguments, which a linear layer could read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, dtype=BF16)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [*args, *kwargs.values()]


@pytest.mark.parametrize("by_keyword", [False, True])
@on_ranks(2, gpus=())
def test_arguments_that_are_not_cast_are_those_of_torchs_style(
    mesh: DeviceMesh, by_keyword: bool
) -> None:
    """If a linear layer is not converted, there is none, or its input is not gathered."""
    x, mask = tokens_of(mesh, batch(1)), torch.ones(3)
    ways = itertools.product((False, True), (Replicate(), Shard(2), Shard(1)), ("", "fp8", "none"))
    for is_local, layout, linear in ways:
        if linear == "fp8" and layout == Replicate():
            continue
        found = []
        for kind in (PrepareModuleInput, torch_styles.PrepareModuleInput):
            module = Seen()
            if linear == "none":
                del module.linear
            else:
                parallelize_module(module.linear, mesh, ColwiseParallel())
            if linear == "fp8":
                convert(module, skip_small=False)
            given: Any = {"x": Shard(1)} if by_keyword else (Shard(1), None)
            wanted: Any = {"x": layout} if by_keyword else (layout, None)
            infix = "_kwarg" if by_keyword else ""
            layouts = {f"input{infix}_layouts": given, f"desired_input{infix}_layouts": wanted}
            parallelize_module(module, mesh, kind(**layouts, use_local_output=is_local))
            found.append(module(x=x, mask=mask) if by_keyword else module(x, mask))
        (got, other), (want, _) = found
        assert other is mask
        assert type(got) is type(want) is (Tensor if is_local else DTensor)
        assert getattr(got, "placements", None) == getattr(want, "placements", None)
        assert_same(local(got), local(want))


@on_ranks(2, gpus=())
def test_unconverted_linears_send_what_torchs_do(mesh: DeviceMesh) -> None:
    sent: list[Any] = []
    ours = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    torchs = tuple(getattr(torch_styles, style.__name__) for style in ours)
    for colwise, rowwise, prepare in (ours, torchs):
        torch.manual_seed(0)
        plan = {
            "gate": colwise(),
            "up": colwise(),
            "down": rowwise(output_layouts=Shard(1)),
            "": prepare(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        model = parallelize_module(Mlp(512).bfloat16(), mesh, plan)
        x = batches(mesh)[0].requires_grad_()
        model(x)  # ranks compare
        with Wire() as wire:
            y = model(x)
            y.sum().backward()
        kinds = (wire.gathered, wire.reduced, wire.scattered)
        sent.append(([sorted(t.nbytes for t in kind) for kind in kinds], y.detach(), x.grad))
    assert sent[0][0] == sent[1][0]
    assert sum(map(len, sent[0][0])) == 4
    for got, want in zip(sent[0][1:], sent[1][1:], strict=True):
        assert_same(got, want)
