"""Shards: how they come to be, what others see, what FSDP2 gathers, frozen ones under adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert, freeze
from blocktensor.ops import reference
from blocktensor.sharding.fsdp.amax_table import Reduced, Reduction
from blocktensor.sharding.fsdp.shards import FP8Shard, FrozenShard, chunks
from tests.support.models import linear, plain, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    HIDDEN,
    OUT,
    RECIPES,
    K,
    Wire,
    assert_same_cast,
    assert_trains_as,
    batch,
    build,
    deep,
    loss_of,
    nbytes,
    reductions,
    shard,
    shard_of,
    step,
    twins,
    whole,
)


@on_ranks(2)
def test_converted_after_it_was_sharded(mesh: DeviceMesh, device: str) -> None:
    model, single = build().to(device), build(Recipe()).to(device)
    shard(model, mesh)
    report = convert(model, skip_small=False)
    assert [entry.reason for entry in report.converted] == 3 * ["trainable, gathered in FP8"]
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_sharded_on_the_meta_device_and_filled_and_loaded(mesh: DeviceMesh, device: str) -> None:
    single = build(Recipe()).to(device)
    with torch.device("meta"):
        model = build(Recipe())
    shard(model, mesh)
    model.to_empty(device=device)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(whole(q), mesh))
    assert_trains_as(single, model, device)
    other = build(Recipe()).to(device)
    model.load_state_dict({k: distribute_tensor(v, mesh) for k, v in other.state_dict().items()})
    assert_trains_as(other, model, device)


@on_ranks(2, gpus=())
def test_fsdp1_is_refused_on_every_rank() -> None:
    with pytest.raises(NotImplementedError, match=r"^FullyShardedDataParallel"):
        FullyShardedDataParallel(build(Recipe()), device_id=torch.device("cpu"))


new_zeros = torch.ops.aten.new_zeros


@pytest.mark.parametrize(
    "zeros",
    [
        lambda w: new_zeros(w, (3, 192), dtype=torch.int64),
        lambda w: new_zeros(w, (3, 192), dtype=torch.float32),
        lambda w: new_zeros(w, (3, 192), device="meta"),
        lambda w: new_zeros(w, (192,)),
        lambda w: new_zeros(w, (1, 3, 192)),
    ],
)
def test_only_zeros_that_a_shard_could_be_made_of_are_shards(zeros: Callable[..., Tensor]) -> None:
    weight, frozen = linear(128, 192).weight, linear(128, 192, frozen=True).weight
    assert type(new_zeros(weight, (3, 192))) is FP8Shard
    assert type(new_zeros(frozen, (3, 192))) is FrozenShard
    wanted, got = zeros(plain(weight)), zeros(weight)
    assert type(got) is Tensor
    assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
    with pytest.raises(NotImplementedError, match="new_zeros"):
        zeros(frozen)
    for w in (weight, frozen):  # called by anyone but FSDP
        made = w.new_zeros(3, 192)
        assert (type(made), made.dtype, made.any().item()) == (Tensor, w.dtype, False)


def test_which_tensors_are_shards_with_the_same_rows() -> None:
    master = torch.ones(3, 192)
    rows = FP8Shard(master, Recipe())
    for same in (rows.detach(), torch.ops.aten.alias(rows)):
        assert type(same) is FP8Shard
        assert same.master is master
    copies = (rows.clone(), torch.empty_like(rows), rows.new_zeros(3, 192), rows.bfloat16())
    for other in (*copies, rows[:2], rows.cfloat()):  # of model.to(torch.complex64)
        assert type(other) is FP8Shard
        assert other.master is not master
    stack = FP8Shard(torch.ones(2, 3, 192), Recipe())
    for part in (rows.t(), *rows.split(2), rows.view(1, 3, 192), stack.transpose(1, 2), stack[0]):
        assert type(part) is FP8Shard  # with which products raise
    assert type(rows.view(-1)) is type(rows[0]) is type(rows.int()) is Tensor
    assert type(rows.new_zeros(1, 3, 192)) is type(stack.new_zeros(3, 192)) is Tensor


aten = torch.ops.aten
PRODUCTS: dict[str, Callable[[FP8Shard, FP8Shard, Tensor], Tensor]] = {
    "linear": lambda rows, stack, x: nn.functional.linear(x, rows),
    "mm": lambda rows, stack, x: torch.mm(x, rows),
    "mm from the left": lambda rows, stack, x: rows.mm(x),
    "matmul": lambda rows, stack, x: torch.matmul(x, rows),
    "@": lambda rows, stack, x: x @ rows,
    "@ from the left": lambda rows, stack, x: rows @ x,
    "addmm": lambda rows, stack, x: torch.addmm(x, x, rows),
    "x.addmm": lambda rows, stack, x: x.addmm(rows, x),
    "aten.mm": lambda rows, stack, x: aten.mm(x, rows),
    "aten.addmm": lambda rows, stack, x: aten.addmm(x, rows, x),
    "aten.bmm": lambda rows, stack, x: aten.bmm(x.expand(2, 4, 4), stack),
    "aten.baddbmm": lambda rows, stack, x: aten.baddbmm(x, stack, x.expand(2, 4, 4)),
    "aten.mv": lambda rows, stack, x: aten.mv(rows, x[0]),
    "aten.linear": lambda rows, stack, x: aten.linear(x, rows),
    "aten._grouped_mm": lambda rows, stack, x: aten._grouped_mm(
        x, stack, torch.tensor([2, 4], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("grad", [False, True])
def test_products_with_rows_are_refused(product: str, grad: bool) -> None:
    """By functions of torch, and by ops, which other code may call at once."""
    rows, stack = (
        FP8Shard(torch.ones(*shape, dtype=torch.bfloat16), Recipe()).requires_grad_(grad)
        for shape in ((4, 4), (2, 4, 4))
    )
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    for views in ((rows, stack), (rows.t(), stack.transpose(1, 2)), (rows.view(4, 4), stack)):
        with pytest.raises(NotImplementedError, match="shard of an FP8 weight: a matmul needs"):
            PRODUCTS[product](*views, x)


@on_ranks(2)
def test_what_others_see_of_a_sharded_model(mesh: DeviceMesh, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh)
    shards = [s for p in model.parameters() if (s := shard_of(p)) is not None]
    weights = [w for w in single.parameters() if isinstance(w, BlockwiseFP8Weight)]
    rows = sum(shard.master.nbytes for shard in shards)
    assert 0 < rows < sum(w.master.nbytes for w in weights)
    for m in (model, single):
        loss_of(m, batch(0, device)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, single)]
    assert torch.allclose(norms[0].full_tensor(), norms[1], rtol=1e-2)
    for name, value in get_model_state_dict(model).items():
        assert type(value._local_tensor) is Tensor, name
    state = model.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in model.named_parameters())
    weight = model.up.weight
    for full in (weight.full_tensor(), weight.detach().full_tensor()):
        assert type(full) is Tensor
        assert torch.equal(full, single.up.weight.master)
    local = weight.detach().to_local()
    assert torch.equal(torch.tensor(local.tolist(), device=device), local.master.float())

    x = torch.ones(1, local.shape[0], dtype=local.dtype, device=device)
    needs = pytest.raises(NotImplementedError, match="shard of an FP8 weight: a matmul needs")
    for rows in (local, weight.to_local(), local[:5]):
        with needs:
            nn.functional.linear(x.new_ones(3, K), rows)
    with needs:
        torch.mm(x, local)


@on_ranks(1, gpus=())
def test_a_full_tensor_of_one_rank_is_plain(mesh: DeviceMesh, device: str) -> None:
    model, _ = twins(device)
    shard(model, mesh)
    for weight in (model.up.weight, model.up.weight.detach()):
        assert type(weight.full_tensor()) is Tensor


def adapters_on_a_frozen_base(device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    model = build(Recipe()).to(device)
    model.requires_grad_(False)
    freeze(model)
    tail = nn.Linear(OUT, OUT, bias=False, device=device, dtype=torch.bfloat16)
    model.down = nn.Sequential(model.down, tail)
    return model, copy.deepcopy(model)


def another_frozen_base(
    model: nn.Module, recipe: Recipe | None = None, device: str = "cpu"
) -> tuple[nn.Module, nn.Module]:
    """Return a base of other values, under the adapter of ``model``, and a copy of it."""
    other = build(recipe or Recipe()).to(device)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    other.requires_grad_(False)
    freeze(other)
    other.down = nn.Sequential(other.down, copy.deepcopy(model.down[1]))
    return other, copy.deepcopy(other)


def shard_base(model: nn.Module, mesh: DeviceMesh) -> list[FrozenShard]:
    for part in (model.up, model):
        fully_shard(part, mesh=mesh)
    held = [p._local_tensor for p in model.parameters()]
    return [x for x in held if isinstance(x, FrozenShard)]


def test_frozen_rows_move() -> None:
    rows = chunks(adapters_on_a_frozen_base()[0].up.weight, 2)[0]
    assert (rows.dtype, rows.to(torch.float32).dtype) == (torch.bfloat16, torch.float32)
    assert rows.float().new_zeros(2, 3).dtype == torch.float32
    with torch.inference_mode():
        inferred = rows.to(torch.float16)
    for moved in (rows.float(), inferred):
        assert type(moved) is FrozenShard
        assert torch.equal(moved.data_rows.float(), rows.data_rows.float())
    assert rows.is_pinned() is False
    with pytest.raises(NotImplementedError, match=r"copy_.* needs the values of a frozen FP8"):
        rows.copy_(torch.ones(rows.shape))
    with pytest.raises(NotImplementedError, match=r"in 128x128 blocks, got blocks of \(1, 128\)"):
        chunks(BlockwiseFP8Tensor.from_values(randn(256, 256), (1, 128)), 2)


@on_ranks(2, gpus=())
def test_a_sharded_frozen_base_on_meta_gets_memory_for_rows_and_scales(
    mesh: DeviceMesh, device: str
) -> None:
    filled, single = adapters_on_a_frozen_base()
    empty = copy.deepcopy(filled).to("meta")
    rows = shard_base(empty, mesh)
    assert all(x.data_rows.is_meta and x.scale.is_meta for x in rows)
    shard_base(filled, mesh)
    empty.to_empty(device=device)
    with torch.no_grad():
        for p, q in zip(empty.parameters(), filled.parameters(), strict=True):
            p.copy_(q)
    x = batch(0, device)
    assert torch.equal(empty(x), single(x))


@on_ranks(1, 2, gpus=())
def test_frozen_rows_that_are_copied_bring_their_scales(mesh: DeviceMesh, device: str) -> None:
    model, _ = adapters_on_a_frozen_base()
    other, single = another_frozen_base(model)
    for each in (model, other):
        shard_base(each, mesh)
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.copy_(q)
    x = batch(0, device)
    assert torch.equal(model(x), single(x))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.scale)
@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(1, 2, gpus=())
def test_frozen_shards_that_are_assigned_bring_their_scales(
    mesh: DeviceMesh, device: str, has_run: bool, recipe: Recipe
) -> None:
    """And their recipe; also to weights that FSDP has gathered before, in memory used again."""
    model, _ = adapters_on_a_frozen_base(device)
    other, single = another_frozen_base(model, recipe, device)
    for each in (model, other):
        shard_base(each, mesh)
    x = batch(0, device)
    if has_run:
        model(x).sum().backward()
    model.load_state_dict(dict(other.state_dict()), assign=True)
    assert torch.equal(model(x), single(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(2)
def test_a_sharded_model_changes_its_dtype(
    mesh: DeviceMesh, device: str, dtype: torch.dtype
) -> None:
    model, single = adapters_on_a_frozen_base(device)
    shard_base(model, mesh)
    model.double().to(dtype), single.to(dtype)
    x = batch(0, device).to(dtype)
    assert torch.equal(model(x), single(x))


@on_ranks(2)
def test_adapters_train_and_the_base_stays(mesh: DeviceMesh, device: str) -> None:
    """It rests at a byte a parameter over all ranks; checkpoints hold the adapters alone."""
    model, single = adapters_on_a_frozen_base(device)
    before = {name: single.get_submodule(name).weight.rowwise() for name in ("up", "mid")}
    shards = shard_base(model, mesh)
    assert len(shards) == 3
    data = sum(shard.data_rows.nbytes for shard in shards)
    assert data == sum(x.numel() for x in shards) <= 150 * (K + 2 * HIDDEN)
    assert sum(shard.scale.nbytes for shard in shards) <= 0.01 * data

    with pytest.raises(NotImplementedError, match=r"gather.* needs the values of a frozen FP8"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(NotImplementedError, match="cannot save or load a frozen FP8 weight as one"):
        shards[0].__create_chunk_list__()
    adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(adapters) == ["down.1.weight"]

    assert_trains_as(single, model, device)
    model.unshard()
    model.up.unshard()
    for name, form in before.items():
        weight = model.get_submodule(name).weight
        assert not weight.requires_grad
        assert_same_cast(weight.rowwise(), form)


@on_ranks(2)
def test_a_whole_state_of_a_frozen_base(mesh: DeviceMesh, device: str) -> None:
    model, single = adapters_on_a_frozen_base(device)
    state, options = single.state_dict(), StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(state), options=options)
    shard_base(model, mesh)
    with pytest.raises(NotImplementedError, match=r"^set_model_state_dict cannot send parts of"):
        set_model_state_dict(model, state, options=options)


@pytest.mark.usefixtures("group")
def test_a_frozen_base_is_not_sent_to_ranks_that_expect_plain_tensors() -> None:
    model, single = adapters_on_a_frozen_base("cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(NotImplementedError, match=r"^set_model_state_dict cannot send parts of"):
        set_model_state_dict(model, single.state_dict(), options=options)


# What is gathered: the bytes of the whole cast, one for each parameter, and little else

COLUMNS = 240  # 2, 3 and 4 ranks share them evenly, in parts of blocks


class Pair(nn.Module):
    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(rows)
        self.a = nn.Linear(COLUMNS, rows, bias=False)
        self.b = nn.Linear(COLUMNS, rows, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.parametrize(
    ("rows", "recipe"),
    [
        *((rows, Recipe()) for rows in (1, 127, 128, 192, 1000, 10944)),
        (192, Recipe(scale="power_of_two")),
    ],
)
@on_ranks(2, 3, 4, gpus=(2,))
def test_bytes_of_the_whole_cast(mesh: DeviceMesh, device: str, rows: int, recipe: Recipe) -> None:
    for tied, dim in ((False, 0), (False, 1), *([(True, 0)] if rows <= 1000 else [])):
        model = Pair(rows, tied).to(device, torch.bfloat16)
        with torch.no_grad():
            model.a.weight[rows // 2, 5] = 300.0  # a block's maximum on one rank
        convert(model, recipe, skip_small=False)
        masters = [m.weight.master.clone() for m in (model.a, model.b)]
        place = None if dim == 0 else (lambda p: Shard(1))
        fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=False)
        with torch.no_grad():
            y = model(torch.ones(2, COLUMNS, device=device, dtype=torch.bfloat16))
        assert y.shape == (2, rows)
        for module, master in zip((model.a, model.b), masters, strict=True):
            assert isinstance(module.weight, BlockwiseFP8Tensor)
            assert module.weight.columnwise_data is None
            wanted = reference.quantize_rowwise(master, recipe.weight_format)
            assert_same_cast(module.weight.rowwise(), wanted)
        model.reshard()
        assert reductions(model) == 1


@on_ranks(2)
def test_a_byte_a_parameter_is_held_and_memory_does_not_grow(mesh: DeviceMesh, device: str) -> None:
    model = deep(4).to(device)
    convert(model, skip_small=False)
    for module in model:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held = []
    for number in range(200 if device == "cuda" else 5):
        loss = model(randn(64, 512, seed=number, device=device)).float().square().mean()
        for module in model:  # in forward, and here until backward is done with it
            weight = module.weight
            assert isinstance(weight, BlockwiseFP8Tensor) and weight.columnwise_data is None
            data, scale, _ = weight.rowwise()
            assert data.nbytes + scale.nbytes <= 1.01 * weight.numel()
        loss.backward()
        step(optimizer)
        held.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert max(held[3:]) == held[3]


@on_ranks(2, gpus=())
def test_half_the_bytes_and_one_small_reduction_a_step(mesh: DeviceMesh) -> None:
    plain, fp8 = deep(3), deep(3)
    convert(fp8, skip_small=False)
    steps: list[Wire] = []
    for model in (plain, fp8):
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            with Wire() as wire:
                model(randn(4, 512, seed=number)).float().sum().backward()
                step(optimizer)
            steps.append(wire)
    for was, found in zip(steps[:3], steps[3:], strict=True):
        assert {x.dtype for x in was.gathered} == {torch.bfloat16} and not was.reduced
        assert [x.dtype for x in found.gathered] == [torch.uint8] * len(was.gathered)
        assert [x.nbytes for x in found.reduced] == [3 * 16 * 4]  # 3 weights of 4 x 4 blocks
        assert nbytes(found.gathered) == nbytes(was.gathered) / 2


@on_ranks(4, gpus=())
def test_gathering_over_fewer_ranks_for_backward_is_refused(mesh: DeviceMesh, device: str) -> None:
    model = build(Recipe())
    shard(model, mesh, reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"^reshard_after_forward=2 with FP8 weights"):
        model(batch(0, device)).sum().backward()


def test_a_later_gather_changes_the_weight_in_place() -> None:
    """FSDP may gather into other memory, and frees what it has gathered, no more."""
    shape, made = torch.Size((200, 192)), None
    rows = FP8Shard(torch.ones(shape), Recipe())
    for seed, recipe in enumerate((Recipe(), Recipe(scale="power_of_two"))):
        cast = reference.quantize_rowwise(randn(*shape, seed=seed), recipe.weight_format)
        gathered = cast.data.view(torch.uint8).flatten()
        reduced = Reduced(cast.scale, cast.scale, cast.scale, seed, Reduction(cast.scale))
        sent = (shape, cast.scale, recipe, reduced)
        returned = rows.fsdp_post_all_gather((gathered,), sent, torch.bfloat16, out=made)
        made, _ = returned or (made, ())
        assert made.rowwise_data.data_ptr() == gathered.data_ptr()
        assert_same_cast(made.rowwise(), cast)
        assert made.recipe == recipe and made.columnwise() and made.columnwise_data is None
