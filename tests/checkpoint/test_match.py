"""Stacks of experts in checkpoints: whole, or a matrix for each expert, in the same bytes.

Matrices have scales of their own, or all those of the stack, as transformers 5.23 saves them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from blocktensor import BlockwiseFP8Weight, Recipe, load_fp8, save_fp8, unfreeze
from blocktensor.checkpoint.on_disk import tensor_digest
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import (
    DOWN,
    GATE_UP,
    MATRICES,
    SCALES,
    STACKS,
    E,
    K,
    Layer,
    Tensors,
    drop,
    each_scales,
    layer,
    on_meta,
    own_scales,
    read,
    rewrite,
    sharing,
    split_experts,
    split_stacks,
    stack_scales,
    to_bf16,
    written,
)
from tests.support.checkpoint_models import INDEX, assert_refused, assert_same, bits, blank, state

FP32, POW2 = Recipe(), Recipe(scale="power_of_two")


def squeeze(made: Tensors) -> None:
    """Scales without dimensions of one block, as transformers 5.17 writes those of experts."""
    for name in made:
        made[name] = made[name].squeeze() if "scale" in name else made[name]
    assert made["experts.0.down_proj.weight_scale_inv"].shape == (2,)


def cast_stack_scales(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(made: Tensors) -> None:
        stack_scales(made)
        assert (made[GATE_UP].shape, made[DOWN].shape) == ((E, 2, 2), (E, 2, 1))
        made |= {name: made[name].to(dtype) for name in (GATE_UP, DOWN)}

    return change


# What loads

FILES: list[Any] = [
    *(("separate", None, recipe) for recipe in (FP32, POW2)),
    *(("whole", None, recipe) for recipe in (FP32, POW2)),
    ("squeezed", squeeze, FP32),
    *((f"stack scales in {dtype}", cast_stack_scales(dtype), recipe) for dtype, recipe in (
        (torch.float32, FP32), (torch.bfloat16, POW2), (torch.float8_e8m0fnu, POW2))),
]  # fmt: skip


@pytest.mark.parametrize(("how", "change", "recipe"), FILES)
@pytest.mark.parametrize("target", ["plain", "frozen", "meta"])
def test_there_and_back(
    tmp_path: Path,
    target: str,
    how: str,
    change: Callable[[Tensors], None] | None,
    recipe: Recipe,
) -> None:
    source, folder = layer(frozen=True, recipe=recipe), tmp_path / "fp8"
    frozen = target == "frozen"
    model = on_meta() if target == "meta" else layer(5, convert=frozen, frozen=frozen)
    if change is None:
        save_fp8(source, folder, separate_experts=how == "separate")
    else:
        written(folder, change, recipe=recipe)
    stored = {name: x.clone() for name, x in read(folder).items()}
    report = load_fp8(model, folder, recipe=recipe)
    blank(folder)
    assert_same(state(model), state(source))
    assert (set(report.fp8), report.plain) == (STACKS, ("router",))
    assert (report.missing, report.unexpected) == ((), ())
    unfreeze(model)
    assert isinstance(model.experts.down_proj, BlockwiseFP8Weight)
    if change is None:
        again = read(save_fp8(model, tmp_path / "again", separate_experts=how == "separate"))
        assert again.keys() == stored.keys()
        assert all(torch.equal(bits(x), bits(stored[name])) for name, x in again.items())


def test_mixtrals_names_of_matrices(tmp_path: Path) -> None:
    spelled = dict(zip(MATRICES, ("w1", "w3", "w2"), strict=True))

    def rename(made: Tensors) -> None:
        for name in list(made):
            made[".".join(spelled.get(word, word) for word in name.split("."))] = made.pop(name)

    model = layer(1, convert=False)
    load_fp8(model, written(tmp_path / "fp8", rename))
    assert_same(state(model), state(layer(frozen=True)))


@each_scales
def test_torchtitans_experts(tmp_path: Path, scales: str) -> None:
    """Stacks of gate and of up take their rows of the scales of both."""
    model = nn.Module()
    model.experts, model.router = split_experts(1), nn.Parameter(layer().router.detach())
    load_fp8(model, written(tmp_path / "fp8", SCALES[scales]))
    assert_same(state(model.experts), state(split_experts(0)))
    folder = save_fp8(split_experts(0), tmp_path / "titan", separate_experts=True)
    assert {f"2.w{i}.weight" for i in (1, 2, 3)} <= set(read(folder))
    loaded = split_experts(1)
    load_fp8(loaded, folder)
    assert_same(state(loaded), state(split_experts(0)))


def test_masters_of_trainable_experts(tmp_path: Path) -> None:
    """Matrices in bf16 are written to them, as ``load_state_dict`` would."""
    source = layer(2, convert=False)
    plain, tensors = source.experts, {name: x.detach() for name, x in source.named_parameters()}
    split_stacks(tensors)
    tensors = {name: x.clone() for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for recipe in (Recipe(), Recipe(cache_weight="step")):
        model = layer(1, recipe=recipe)
        stack = model.experts.gate_up_proj
        assert isinstance(stack, BlockwiseFP8Weight)
        stack.rowwise()  # a cast that must not be used again
        before = stack.master.clone()
        half = stack.half()  # its values are read later
        report = load_fp8(model, tmp_path)
        assert report.fp8 == ()
        assert model.experts.gate_up_proj is stack
        assert torch.equal(stack.master, plain.gate_up_proj)
        assert torch.equal(model.experts.down_proj.master, plain.down_proj)
        data, scale, _ = reference.quantize_rowwise(plain.gate_up_proj.detach(), BLOCKS_128X128)
        assert torch.equal(bits(stack.rowwise().data), bits(data))
        assert torch.equal(stack.rowwise().scale, scale)
        assert torch.equal(half.master, before.half())
    model = on_meta()
    load_fp8(model, tmp_path)
    assert torch.equal(model.experts.gate_up_proj, plain.gate_up_proj)


def test_experts_that_one_of_them_does_not_have(tmp_path: Path) -> None:
    model = nn.Module()
    model.router = nn.Parameter(torch.zeros(E, K))
    folder = written(tmp_path / "fp8", stack_scales)
    report = load_fp8(model, folder, strict=False)
    assert report.plain == ("router",)
    assert set(report.unexpected) == read(folder).keys() - {"router"}
    rewrite(folder, drop("experts."))
    message = r"2 missing \(experts.gate_up_proj, experts.down_pr"
    assert_refused(folder, layer(1, convert=False), message)
    assert set(load_fp8(layer(1, convert=False), folder, strict=False).missing) == STACKS


def test_scales_that_no_matrix_needs(tmp_path: Path) -> None:
    """So transformers 5.23 leaves what is no whole blocks: in bf16, its scales without meaning."""

    def change(made: Tensors) -> None:
        stack_scales(made)
        for e in range(E):
            to_bf16(f"experts.{e}.down_proj")(made)

    folder, model = written(tmp_path / "fp8", change), layer(1, convert=False)
    assert_refused(folder, model, rf"0 missing, 1 unexpected \({DOWN}\)")
    report = load_fp8(model, folder, strict=False)
    assert (report.fp8, report.unexpected) == (("experts.gate_up_proj",), (DOWN,))
    for e, x in enumerate(model.experts.down_proj):
        assert torch.equal(x, read(folder)[f"experts.{e}.down_proj.weight"])


@pytest.mark.parametrize(("count", "rest"), [(5, ""), (6, ", …")])
def test_a_message_lists_five_names(tmp_path: Path, count: int, rest: str) -> None:
    more = {f"x{i}": torch.ones(1) for i in range(count)}
    folder = written(tmp_path / "fp8", lambda made: made.update(more))
    message = rf"0 missing, {count} unexpected \(x0, x1, x2, x3, x4{rest}\)"
    assert_refused(folder, layer(1, convert=False), message)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacks_that_cannot_be_split(tmp_path: Path, is_transposed: bool) -> None:
    """Of 144 rows of gate and of up the second block has 112 of gate's and 16 of up's."""
    kind: dict[str, Any] = {"is_transposed": True} if is_transposed else {"n": 144}
    model = layer(frozen=True, **kind)
    with pytest.raises(ValueError, match=r"gate_up_proj \[3, .* cannot be stored as matrices of s"):
        save_fp8(model, tmp_path / "fp8", separate_experts=True)
    save_fp8(model, tmp_path / "fp8")
    folders = [tmp_path / "fp8", *([] if is_transposed else [sharing(tmp_path / "matrices")])]
    for folder in folders:
        loaded = layer(1, convert=False, **kind)
        load_fp8(loaded, folder)
        assert_same(state(loaded), state(model))
    if is_transposed:  # matrices [K, N] would fit by their shape
        square = Layer(n=100, is_transposed=True)
        report = load_fp8(square, written(tmp_path / "other", own_scales), strict=False)
        assert set(report.missing) == STACKS


# What does not


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda made: made.update({name: change(made[name])})


def set_to(value: float, *at: int) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        scale[at] = value
        return scale

    return change


def with_ones(*names: str, rows: int = 2, cols: int = 1) -> Callable[[Tensors], object]:
    """Further scales."""
    return lambda made: made.update({name: torch.ones(rows, cols) for name in names})


FAULTS: list[tuple[str, str, Callable[[Tensors], object], str]] = [
    ("a missing expert", "either", drop("experts.1."),
     r"'experts.gate_up_proj' is a stack of 3 experts: of their 6 matrices 2 are missing "
     r"\(experts.1.gate_proj.weight, experts.1.up_proj.weight\)"),
    ("more experts than the model has", "own", lambda made: made.update({
        name.replace("experts.0", "experts.3"): made[name] for name in list(made)}),
     r"stack of 3 experts: the checkpoint has more \(experts.3.gate_proj.weight, experts.3.up_p"),
    ("a missing matrix", "either", drop("experts.2.up_proj"),
     r"of their 6 matrices 1 are missing \(experts.2.up_proj.weight\)"),
    ("a matrix in bf16", "either", to_bf16("experts.1.up_proj"),
     r"'experts.1.up_proj.weight' is BF16, 'experts.0.gate_proj.weight' of the same stack is "
     r"F8_E4M3: expected all in FP8 or none"),
    ("another shape", "either",
     changed("experts.1.up_proj.weight", lambda x: x[:, :190]),
     r"'experts.1.up_proj.weight' has shape \[128, 190\], the model's has \[128, 200\] for an "
     r"expert of 'experts.gate_up_proj' \[3, 256, 200\]"),
    ("missing scales", "own", drop("experts.2.up_proj.weight_scale_inv"),
     r"'experts.2.up_proj.weight' is FP8 and has 0 scales"),
    ("an infinite scale", "own",
     changed("experts.2.down_proj.weight_scale_inv", set_to(torch.inf, 1, 0)),
     r"'experts.2.down_proj.weight_scale_inv': the scale of block \[1, 0\] is inf"),
    ("no scales", "stack", drop(GATE_UP),
     r"'experts.0.gate_proj.weight' is FP8 and has 0 scales: expected one of "
     r"experts.0.gate_proj.weight_scale_inv or experts.gate_up_proj_scale_inv; rename "),
    ("scales of an expert less", "stack", changed(GATE_UP, lambda x: x[1:]),
     r"'experts.gate_up_proj_scale_inv' is F32 \[2, 2, 2\]: expected F32 or .*, \[3, 2, 2\]: a "
     r"scale for each 128x128 block of \[3, 256, 200\]"),
    ("scales of an expert more", "stack", changed(DOWN, lambda x: torch.cat([x, x[:1]])),
     r"'experts.down_proj_scale_inv' is F32 \[4, 2, 1\]: expected F32 or .*, \[3, 2, 1\]: a"),
    ("scales of gate alone", "stack", changed(GATE_UP, lambda x: x[:, :1]),
     r"'experts.gate_up_proj_scale_inv' is F32 \[3, 1, 2\]: expected F32 or .*, \[3, 2, 2\]: a"),
    ("another dtype", "stack", changed(DOWN, lambda x: x.view(torch.int32)),
     r"'experts.down_proj_scale_inv' is I32 \[3, 2, 1\]: expected F32 or BF16 or F16 or F8_E8M0"),
    ("a scale of 0", "stack", changed(GATE_UP, set_to(0.0, 2, 1)),
     r"'experts.gate_up_proj_scale_inv': the scale of block \[2, 1, 0\] is 0.0: expected a fin"),
    ("one matrix has its own, too", "stack",
     with_ones("experts.1.up_proj.weight_scale_inv", rows=1, cols=2),
     r"'experts.1.up_proj.weight' is FP8 and has 2 scales: expected either "
     r"experts.1.up_proj.weight_scale_inv, and so for each matrix of 'experts.gate_up_proj', or "
     r"experts.gate_up_proj_scale_inv$"),
    ("all matrices have their own, too", "stack",
     with_ones(*(f"experts.{e}.down_proj.weight_scale_inv" for e in range(E))),
     r"'experts.0.down_proj.weight' is FP8 and has 2 scales: expected either"),
    ("the first matrix has not", "stack",
     lambda made: (with_ones(*(f"experts.{e}.down_proj.weight_scale_inv" for e in (1, 2)))(made)
                   or made.pop(DOWN)),
     r"'experts.0.down_proj.weight' is FP8 and has 0 scales"),
]  # fmt: skip
CASES = [
    pytest.param(scales, change, message, id=f"{fault}, {scales}")
    for fault, which, change, message in FAULTS
    for scales in (SCALES if which == "either" else (which,))
]


@pytest.mark.parametrize(("scales", "change", "message"), CASES)
def test_what_does_not_fit(
    tmp_path: Path, scales: str, change: Callable[[Tensors], object], message: str
) -> None:
    folder = written(tmp_path / "fp8", lambda made: (SCALES[scales](made), change(made)))
    assert_refused(folder, layer(1, convert=False), message, strict=False)


@each_scales
def test_fp8_over_trainable_experts(tmp_path: Path, scales: str) -> None:
    folder = written(tmp_path / "fp8", SCALES[scales])
    assert_refused(folder, layer(1), "trainable and would lose its high-precision values")
    message = r"_scale_inv': the scale of block \[0, 0.* is .*: expected a power of two"
    assert_refused(folder, layer(1, convert=False), message, recipe=POW2)


def test_blocks_of_matrices_of_another_library(tmp_path: Path) -> None:
    """Each matrix of 144 rows begins a block, which in the stack has rows of both."""

    def split(made: Tensors) -> None:
        for name in [name for name in made if "gate" in name or "up" in name]:
            made[name] = torch.cat([made[name], made[name]])[: 2 if "scale" in name else 144]

    folder = written(tmp_path / "fp8", split)
    model = layer(1, n=144, convert=False)
    model.experts.down_proj = nn.Parameter(torch.zeros(E, K, 128, dtype=torch.bfloat16))
    message = r"'experts.0.gate_proj.weight' has 144 rows, no multiple of 128.*'experts.gate_up_pr"
    assert_refused(folder, model, message)


def test_shared_blocks_have_no_place_in_stacks_of_gate_and_of_up(tmp_path: Path) -> None:
    model = nn.Module()
    model.router, model.experts = nn.Parameter(torch.zeros(E, K)), nn.Module()
    for name, shape in {"w1": (144, K), "w3": (144, K), "w2": (K, 144)}.items():
        model.experts.register_parameter(name, nn.Parameter(torch.zeros(E, *shape)))
    message = (
        r"'experts.gate_up_proj_scale_inv' has the scales of \[3, 288, 200\], in which "
        r"'experts.0.gate_proj.weight' shares blocks with another matrix: the model's 'experts.w1'"
    )
    assert_refused(sharing(tmp_path / "fp8"), model, message)


MATRIX = "experts.2.up_proj.weight"
OF_EITHER = [("own", MATRIX), ("own", f"{MATRIX}_scale_inv"), ("stack", MATRIX), ("stack", GATE_UP)]


@pytest.mark.parametrize(("scales", "name"), OF_EITHER)
def test_digests(tmp_path: Path, scales: str, name: str) -> None:
    """Of scales that lie in another file than their weights, too."""
    folder = written(tmp_path / "fp8", SCALES[scales])
    made = read(folder)
    (folder / "model.safetensors").unlink()
    places = {x: "scales.safetensors" if "scale" in x else "a.safetensors" for x in made}
    digests = {x: tensor_digest(value) for x, value in made.items()}
    index = {"weight_map": places, "metadata": {"tensor_sha256": digests}}
    (folder / INDEX).write_text(json.dumps(index))

    def write() -> None:
        for file in set(places.values()):
            save_file({x: made[x] for x in made if places[x] == file}, folder / file)

    write()
    load_fp8(layer(1, convert=False), folder)
    made[name].view(torch.uint8)[-1] ^= 1
    write()
    message = f"corrupted: tensor '{name}' is not the one"
    assert_refused(folder, layer(1, convert=False), message)
