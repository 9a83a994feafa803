"""Stacks of experts in checkpoints: whole, or a matrix for each expert, in the same bytes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from blocktensor import BlockwiseFP8Weight, Recipe, load_fp8, save_fp8, unfreeze
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import (
    MATRICES,
    STACKS,
    E,
    K,
    Layer,
    Tensors,
    join_matrices,
    layer,
    on_meta,
    read,
    rewrite,
)
from tests.support.checkpoint_models import INDEX, assert_refused, assert_same, bits, blank, state

FP32, POW2 = Recipe(), Recipe(scale="power_of_two")

SCALE = re.compile(r"(.*experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight_scale_inv")


def written(
    folder: Path, change: Callable[[Tensors], object] = lambda made: None, **kwargs: Any
) -> Path:
    """A checkpoint in matrices of experts, without index, after a change to its tensors."""
    rewrite(save_fp8(layer(frozen=True, **kwargs), folder, separate_experts=True), change)
    return folder


def split_experts(seed: int) -> nn.Module:
    """The frozen experts of a layer as torchtitan has them: stacks of gate and of up."""
    experts, split = layer(seed, frozen=True).experts, nn.Module()
    split.w1_EFD, split.w3_EFD = (nn.Parameter(x, False) for x in experts.gate_up_proj.chunk(2, 1))
    split.w2_EDF = experts.down_proj
    return split


def split_stacks(made: Tensors) -> None:
    """Store the matrices of experts one by one, and leave the scales of their stacks."""
    for stack, parts in (("gate_up_proj", MATRICES[:2]), ("down_proj", MATRICES[2:])):
        for e, expert in enumerate(made.pop(f"experts.{stack}")):
            for part, x in zip(parts, expert.chunk(len(parts)), strict=True):
                made[f"experts.{e}.{part}.weight"] = x


def stack_scales(tensors: Tensors) -> None:
    """Replace the scales of matrices of experts by those of stacks, as transformers 5.23 does."""
    found: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=lambda name: "up_proj" in name):
        match = SCALE.fullmatch(name)
        if match is not None:
            home, expert, matrix = match.groups()
            stack = "down_proj" if matrix == "down_proj" else "gate_up_proj"
            shape = BLOCKS_128X128.scale_shape(tensors[name.removesuffix("_scale_inv")].shape)
            found[f"{home}{stack}_scale_inv"][int(expert)].append(tensors.pop(name).view(shape))
    for name, experts in found.items():
        tensors[name] = torch.stack([torch.cat(experts[e]) for e in range(len(experts))])


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda made: [made.pop(key) for key in list(made) if key.startswith(name)]


def squeeze(made: Tensors) -> None:
    """Scales without dimensions of one block, as transformers 5.17 writes those of experts."""
    for name in made:
        made[name] = made[name].squeeze() if "scale" in name else made[name]
    assert made["experts.0.down_proj.weight_scale_inv"].shape == (2,)


@pytest.mark.parametrize("recipe", [FP32, POW2], ids=["fp32", "pow2"])
@pytest.mark.parametrize("how", ["separate", "whole", "squeezed"])
@pytest.mark.parametrize("target", ["plain", "frozen", "meta"])
def test_there_and_back(tmp_path: Path, target: str, how: str, recipe: Recipe) -> None:
    source, folder = layer(frozen=True, recipe=recipe), tmp_path / "fp8"
    frozen = target == "frozen"
    model = on_meta() if target == "meta" else layer(5, convert=frozen, frozen=frozen)
    save_fp8(source, folder, separate_experts=how != "whole")
    stored = {name: x.clone() for name, x in read(folder).items()}
    if how == "squeezed":
        rewrite(folder, squeeze)
    report = load_fp8(model, folder, recipe=recipe)
    blank(folder)
    assert_same(state(model), state(source))
    assert (set(report.fp8), report.plain) == (STACKS, ("router",))
    assert (report.missing, report.unexpected) == ((), ())
    unfreeze(model)
    assert isinstance(model.experts.down_proj, BlockwiseFP8Weight)
    again = read(save_fp8(model, tmp_path / "again", separate_experts=how != "whole"))
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


def test_torchtitans_experts(tmp_path: Path) -> None:
    model = nn.Module()
    model.experts, model.router = split_experts(1), nn.Parameter(layer().router.detach())
    load_fp8(model, written(tmp_path / "fp8"))
    assert_same(state(model.experts), state(split_experts(0)))
    folder = save_fp8(split_experts(0), tmp_path / "titan", separate_experts=True)
    assert {f"2.w{i}.weight" for i in (1, 2, 3)} <= set(read(folder))
    loaded = split_experts(1)
    load_fp8(loaded, folder)
    assert_same(state(loaded), state(split_experts(0)))


def test_masters_of_trainable_experts(tmp_path: Path) -> None:
    source = layer(2, convert=False)
    plain, tensors = source.experts, {name: x.detach() for name, x in source.named_parameters()}
    split_stacks(tensors)
    save_file({name: x.clone() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    model = layer(1)
    stack = model.experts.gate_up_proj
    assert isinstance(stack, BlockwiseFP8Weight)
    before = stack.master.clone()
    half = stack.half()  # its values are read later
    assert load_fp8(model, tmp_path).fp8 == ()
    assert model.experts.gate_up_proj is stack
    assert torch.equal(stack.master, plain.gate_up_proj)
    assert torch.equal(model.experts.down_proj.master, plain.down_proj)
    data, scale, _ = reference.quantize_rowwise(plain.gate_up_proj.detach(), BLOCKS_128X128)
    assert torch.equal(bits(stack.rowwise().data), bits(data))
    assert torch.equal(stack.rowwise().scale, scale)
    assert torch.equal(half.master, before.half())
    assert_refused(tmp_path, layer(1, frozen=True), "BF16, the model's is frozen in FP8")
    model = on_meta()
    with pytest.warns(UserWarning, match="no weight of this Layer is in FP8: of .* 3 tensors are"):
        load_fp8(model, tmp_path)
    assert torch.equal(model.experts.gate_up_proj, plain.gate_up_proj)


def test_experts_that_one_of_them_does_not_have(tmp_path: Path) -> None:
    model = nn.Module()
    model.router = nn.Parameter(torch.zeros(E, K))
    folder = written(tmp_path / "fp8")
    with pytest.warns(UserWarning, match="no weight of this Module is in FP8"):
        report = load_fp8(model, folder, strict=False)
    assert report.plain == ("router",)
    assert set(report.unexpected) == {x for x in read(folder) if x.endswith(".weight")}
    rewrite(folder, drop("experts."))
    message = r"2 missing \(experts.gate_up_proj, experts.down_pr"
    assert_refused(folder, layer(1, convert=False), message)
    with pytest.warns(UserWarning, match=r"no weight of this Layer .*, 2 of the model's are miss"):
        assert set(load_fp8(layer(1, convert=False), folder, strict=False).missing) == STACKS


@pytest.mark.parametrize("n", [128, 144])
def test_matrices_beside_scales_of_stacks(tmp_path: Path, n: int) -> None:
    """The remedy for files of transformers 5.23: stacks, also where gate and up share blocks."""
    folder, model = tmp_path / "fp8", layer(1, n=n, convert=False)
    if n == 128:
        written(folder, stack_scales)
    else:  # the second block of the stack has rows of gate and of up
        rewrite(save_fp8(layer(n=n, frozen=True), folder), split_stacks)
    message = r"'experts.0.gate_proj.weight' is FP8 and has no .*, store the stack instead of its"
    assert_refused(folder, model, message)
    rewrite(folder, join_matrices)
    load_fp8(model, folder)
    assert_same(state(model), state(layer(n=n, frozen=True)))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacks_that_cannot_be_split(tmp_path: Path, is_transposed: bool) -> None:
    """Of 144 rows of gate and of up the second block has 112 of gate's and 16 of up's."""
    kind: dict[str, Any] = {"is_transposed": True} if is_transposed else {"n": 144}
    model = layer(frozen=True, **kind)
    with pytest.raises(ValueError, match=r"gate_up_proj \[3, .* cannot be stored as matrices of s"):
        save_fp8(model, tmp_path / "fp8", separate_experts=True)
    save_fp8(model, tmp_path / "fp8")
    loaded = layer(1, convert=False, **kind)
    load_fp8(loaded, tmp_path / "fp8")
    assert_same(state(loaded), state(model))
    if is_transposed:  # matrices [K, N] would fit by their shape
        square = Layer(n=100, is_transposed=True)
        with pytest.warns(UserWarning, match="no weight of this Layer is in FP8"):
            report = load_fp8(square, written(tmp_path / "other"), strict=False)
        assert set(report.missing) == STACKS


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda made: made.update({name: change(made[name])})


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a missing expert": (drop("experts.1."),
     r"'experts.gate_up_proj' is a stack of 3 experts: of their 6 matrices 2 are missing "
     r"\(experts.1.gate_proj.weight, experts.1.up_proj.weight\)"),
    "more experts than the model has": (lambda made: made.update({
        name.replace("experts.0", "experts.3"): made[name] for name in list(made)}),
     r"stack of 3 experts: the checkpoint has more \(experts.3.gate_proj.weight, experts.3.up_p"),
    "a missing matrix": (drop("experts.2.up_proj"),
     r"of their 6 matrices 1 are missing \(experts.2.up_proj.weight\)"),
    "a matrix in bf16": (changed("experts.1.up_proj.weight", Tensor.bfloat16),
     r"'experts.1.up_proj.weight' is BF16, 'experts.0.gate_proj.weight' of the same stack is "
     r"F8_E4M3: expected all in FP8 or none"),
    "another shape": (changed("experts.1.up_proj.weight", lambda x: x[:, :190]),
     r"'experts.1.up_proj.weight' has shape \[128, 190\], the model's has \[128, 200\] for an "
     r"expert of 'experts.gate_up_proj' \[3, 256, 200\]"),
    "missing scales": (drop("experts.2.up_proj.weight_scale_inv"),
     r"'experts.2.up_proj.weight' is FP8 and has no scales"),
    "another dtype": (changed("router", lambda x: x.to(torch.float8_e5m2)), "has dtype F8_E5M2"),
    "an infinite scale": (
     changed("experts.2.down_proj.weight_scale_inv", lambda x: x + tensor([[0], [torch.inf]])),
     r"'experts.2.down_proj.weight_scale_inv': the scale of block \[1, 0\] is inf"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit(tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    folder = written(tmp_path / "fp8", change)
    assert_refused(folder, layer(1, convert=False), message, strict=False)


def test_fp8_over_trainable_experts(tmp_path: Path) -> None:
    folder = written(tmp_path / "fp8")
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
    message = (
        r"'experts.0.gate_proj.weight' \[144, 200\] is in FP8, and its 128x128 blocks are not "
        r".*'experts.gate_up_proj' \[3, 288, 200\], of which it is \[0:1, 0:144, 0:200\]"
    )
    assert_refused(folder, model, message)


def test_scales_in_another_file_than_their_weights(tmp_path: Path) -> None:
    folder = written(tmp_path / "fp8")
    wanted = layer(1, convert=False)
    load_fp8(wanted, folder)
    made = read(folder)
    (folder / "model.safetensors").unlink()
    places = {x: "scales.safetensors" if "scale" in x else "a.safetensors" for x in made}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    for file in set(places.values()):
        save_file({x: made[x] for x in made if places[x] == file}, folder / file)
    model = layer(1, convert=False)
    load_fp8(model, folder)
    assert_same(state(model), state(wanted))
