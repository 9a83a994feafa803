"""What load_fp8 makes of a checkpoint: the same bits, or a clear error and an unchanged model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from expecttest import assert_expected_inline
from safetensors.torch import save_file

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    CheckpointError,
    Recipe,
    convert,
    freeze,
    load_fp8,
    save_fp8,
    unfreeze,
)
from blocktensor.checkpoint import files as reading
from blocktensor.recipe import DEFAULT_RECIPE
from blocktensor.reports import LoadReport
from tests.support.checkpoint_experts import Tensors, read, rewrite
from tests.support.checkpoint_models import (
    OLD,
    TARGETS,
    VOCABULARY,
    K,
    Model,
    N,
    assert_refused,
    assert_same,
    bits,
    blank,
    filled,
    folder,
    on_meta,
    state,
    unchanged,
)

__all__ = ["folder"]

TOKENS = torch.arange(VOCABULARY)[None]
E4M3, NAN, INF = torch.float8_e4m3fn, float("nan"), float("inf")
BAD_SCALES = {
    torch.float32: (0.0, -0.0, -1.0, NAN, INF, -INF),
    torch.bfloat16: (0.0, -1.0, NAN, INF),
    torch.float16: (0.0, -1.0, NAN, INF),
    torch.float8_e8m0fnu: (NAN,),
}
"""By the dtypes that stored scales may have."""


def plain_with(folder: Path, **tensors: Tensor) -> Tensors:
    """Write a model in high precision, of which up may be FP8; return its tensors.

    The head is the embedding.
    """
    stored = dict(filled(2, convert=False).state_dict())
    del stored["head.weight"]
    stored |= {f"up.{name}": x for name, x in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return stored


def on_meta_in(recipe: Recipe = DEFAULT_RECIPE, frozen: bool = False) -> Model:
    """A converted model on meta."""
    model = on_meta().requires_grad_(not frozen)
    convert(model, recipe, skip_small=False)
    return model


@pytest.mark.parametrize("target", [*TARGETS, "converted on meta"])
def test_there_and_back(tmp_path: Path, target: str) -> None:
    source, model = filled(frozen=True), TARGETS.get(target, on_meta_in)()
    save_fp8(source, tmp_path / "fp8")
    report = load_fp8(model, tmp_path / "fp8")
    blank(tmp_path / "fp8")
    assert_same(state(model), state(source))
    assert set(report.fp8) == {"up.weight", "down.weight"}
    assert (report.missing, report.unexpected) == ((), ())
    assert "steps" in report.plain
    assert model.head.weight is model.embed.weight
    assert not model.up.weight.requires_grad
    assert model.norm.weight.requires_grad
    if "meta" not in target:  # buffers that are not saved
        assert torch.equal(model(TOKENS), source(TOKENS))


def test_a_model_loaded_in_inference_mode_has_gradients(folder: Path) -> None:
    model, expected = TARGETS["plain"](), TARGETS["plain"]()
    load_fp8(expected, folder)
    with torch.inference_mode():
        load_fp8(model, folder)
    for each in (model, expected):
        each(TOKENS).float().square().mean().backward()
    for (name, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert got.requires_grad == want.requires_grad, name
        if want.grad is not None:
            assert torch.equal(got.grad, want.grad), name
    assert model.embed.weight.grad.any()


@pytest.mark.parametrize("trainable", [False, True])
def test_files_are_read_with_any_default_device(folder: Path, trainable: bool) -> None:
    """Safetensors reads slices onto the default device."""
    models = [filled(1, convert=trainable) for _ in range(2)]
    for model, device in zip(models, ("cpu", "meta"), strict=True):
        with torch.device(device):
            load_fp8(model, folder, trainable=trainable)
    assert_same(*map(state, models))


def test_a_shared_module_may_have_any_of_its_names(tmp_path: Path) -> None:
    source, model = filled(frozen=True), filled(5, convert=False)
    source.again = model.again = None
    source.again, source.up = source.up, None
    model.again = model.up
    save_fp8(source, tmp_path / "fp8")
    assert "again.weight" in load_fp8(model, tmp_path / "fp8").fp8
    assert model.again is model.up
    assert_same(state(model.up), state(source.again))


NAMES_OF_SCALES = {
    "compressed-tensors": ("weight_scale", torch.bfloat16, lambda scale: scale),
    "ModelOpt": ("weight_scale", torch.float32, lambda scale: scale[:, None, :, None]),
    "DeepSeek-V4": ("scale", torch.float8_e8m0fnu, lambda scale: scale),
    "Mistral Large 4": ("qscale_weight", torch.float32, lambda scale: scale),
}


@pytest.mark.parametrize("writer", NAMES_OF_SCALES)
def test_names_of_scales(writer: str, tmp_path: Path) -> None:
    """Whoever wrote them, they are the scales of 128x128 blocks."""
    name, dtype, shaped = NAMES_OF_SCALES[writer]
    source = filled(recipe=Recipe(scale="power_of_two"), frozen=True)

    def rename(stored: Tensors) -> None:
        for old in [x for x in stored if x.endswith("weight_scale_inv")]:
            new = old.replace("weight_scale_inv", name)
            stored[new] = shaped(stored.pop(old)).to(dtype)

    rewrite(save_fp8(source, tmp_path / "fp8"), rename)
    model = TARGETS["plain"]()
    assert load_fp8(model, tmp_path / "fp8").fp8 == ("up.weight", "down.weight")
    assert_same(state(model), state(source))


def test_what_is_frozen_stays_frozen_and_keeps_its_dtype(folder: Path) -> None:
    for model in (TARGETS["plain"]().float(), on_meta(torch.float32)):
        model.norm.requires_grad_(False)
        load_fp8(model, folder)
        assert not (model.norm.weight.requires_grad or model.norm.bias.requires_grad)
        assert model.up.bias.requires_grad
        assert model.norm.weight.dtype == model.up.weight.dtype == torch.float32
        assert torch.equal(model.norm.weight, unchanged(OLD).norm.weight.float())


@pytest.mark.parametrize("dtype", BAD_SCALES)
def test_a_checkpoint_as_transformers_writes_it(tmp_path: Path, dtype: torch.dtype) -> None:
    """One file, no index; scales that are no plain cast's."""
    data = torch.randn(N, K).to(E4M3)
    wanted = torch.tensor([[1.0, 2**-14, 2.0**9], [0.5, 2**-3, 4.0]])
    if dtype == torch.float32:
        wanted += torch.rand(2, 3)
    tensors = plain_with(tmp_path, weight=data, weight_scale_inv=wanted.to(dtype))
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    model = on_meta()
    assert load_fp8(model, tmp_path).fp8 == ("up.weight",)
    held, scale, _ = model.up.weight.rowwise()
    assert torch.equal(bits(held), bits(data))
    assert scale.dtype == torch.float32
    assert torch.equal(scale, wanted)
    wide = wanted.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    assert torch.equal(model.up.weight.dequantize(), (data.float() * wide).bfloat16())
    assert torch.equal(model.down.weight, tensors["down.weight"])
    x = torch.randn(4, K, dtype=torch.bfloat16, requires_grad=True)
    model.up(x).sum().backward()
    assert x.grad is not None


def test_a_part_of_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    tensor = reading._box
    monkeypatch.setattr(reading, "_box", lambda x, *at: read.append(x.name) or tensor(x, *at))
    model = nn.ModuleDict({"up": nn.Linear(K, N), "other": nn.Linear(2, 3)}).bfloat16()
    with pytest.raises(CheckpointError, match=r"2 missing \(other.weight, other.bias\), 5 unexp"):
        load_fp8(model, folder)
    assert read == []
    report = load_fp8(model, folder, strict=False)
    assert sorted(read) == ["up.bias", "up.weight", "up.weight_scale_inv"]
    assert report.missing == ("other.weight", "other.bias")
    left = {"embed.weight", "down.weight", "norm.weight", "norm.bias", "steps"}
    assert set(report.unexpected) == left
    assert isinstance(model["up"].weight, BlockwiseFP8Tensor)


def test_trainable_weights_are_loaded_from_high_precision_only(folder: Path) -> None:
    message = r"is an FP8 weight, the model's is .* torch.float64"
    assert_refused(folder, TARGETS["plain"]().double(), message)
    assert_refused(folder, filled(5), r"'\w+\.weight' is stored in FP8, .* is trainable")
    model, tensors = filled(5), plain_with(folder.parent)
    load_fp8(model, folder.parent)
    assert isinstance(model.up.weight, BlockwiseFP8Weight)
    assert torch.equal(model.up.weight.master, tensors["up.weight"])


POWERS = Recipe(scale="power_of_two")


def test_a_converted_model_keeps_its_recipe(tmp_path: Path) -> None:
    tensors = plain_with(tmp_path)
    model = on_meta_in(POWERS, frozen=False)
    load_fp8(model, tmp_path)
    assert isinstance(model.up.weight, BlockwiseFP8Weight)
    assert model.up.weight.recipe == POWERS
    assert torch.equal(model.up.weight.master, tensors["up.weight"])

    folder = save_fp8(filled(frozen=True, recipe=POWERS), tmp_path / "fp8")
    for frozen, given, wanted in (
        (True, None, POWERS),
        (True, Recipe(), Recipe()),
        (False, None, POWERS),
    ):
        model = on_meta_in(POWERS, frozen)
        load_fp8(model, folder, recipe=given)
        assert isinstance(model.up.weight, BlockwiseFP8Tensor)
        assert model.up.weight.recipe == wanted
        assert model.up.weight.format is wanted.weight_format
    plain = filled(convert=False)
    load_fp8(plain, folder)
    assert plain.up.weight.recipe == Recipe()


def test_scales_that_do_not_fit_the_recipe_are_refused(folder: Path) -> None:
    """They would be saved as powers of two, which transformers rounds them to."""
    message = "expected a power of two, as Recipe"
    assert_refused(folder, on_meta_in(POWERS, frozen=True), message)
    assert_refused(folder, TARGETS["plain"](), message, recipe=POWERS)
    model = on_meta_in(POWERS, frozen=True)
    load_fp8(model, folder, recipe=Recipe())
    assert model.up.weight.recipe == Recipe()
    model = TARGETS["plain"]()  # as the message says
    load_fp8(model, folder)
    unfreeze(model)
    convert(model, POWERS, skip_small=False)
    freeze(model)
    assert isinstance(model.up.weight, BlockwiseFP8Tensor) and model.up.weight.recipe == POWERS


class WithState(nn.Linear):
    seen: Any = None
    refuses = False

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise ValueError("refused")
        self.seen = state


def test_extra_states_that_are_tensors(tmp_path: Path) -> None:
    source, model = (nn.Sequential(*(WithState(K, N) for _ in "ab")).bfloat16() for _ in "ab")
    convert(source, skip_small=False)
    source[0].seen = source[1].seen = torch.arange(3)
    folder, before = save_fp8(source, tmp_path / "fp8"), {**vars(model[0])["_parameters"]}
    model[1].refuses = True
    with pytest.raises(ValueError, match="refused"):
        load_fp8(model, folder)
    assert model[0].seen is None and all(model[0]._parameters[k] is x for k, x in before.items())
    model[1].refuses = False
    assert load_fp8(model, folder).plain == ("0.bias", "1.bias", "0._extra_state", "1._extra_state")
    with pytest.raises(CheckpointError, match="2 unexpected"):  # as torch, without the method
        load_fp8(nn.Sequential(nn.Linear(K, N), nn.Linear(K, N)), folder)
    source[0].seen = {}
    assert "0._extra_state" not in read(save_fp8(source, tmp_path / "other"))
    blank(folder)
    assert all(torch.equal(x.seen, torch.arange(3)) for x in model)


class WithNorm(WithState):
    """Its state is a tensor, and it computes another one from its weight."""

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        weight = self.weight
        values = weight.dequantize() if isinstance(weight, BlockwiseFP8Tensor) else weight
        self.norm = values.detach().float().norm()


def test_an_extra_state_sees_the_loaded_weights(tmp_path: Path) -> None:
    source, model = (WithNorm(K, N).bfloat16() for _ in "ab")
    source.seen = torch.arange(3)
    convert(source, skip_small=False)
    load_fp8(model, save_fp8(source, tmp_path / "fp8"))
    assert isinstance(model.weight, BlockwiseFP8Tensor)
    assert torch.equal(model.norm, model.weight.dequantize().float().norm())


def test_scales_do_not_lie_in_the_file(tmp_path: Path) -> None:
    """Also those whose rows need no padding, which no op copies."""
    source, model = nn.Linear(512, 8, bias=False).bfloat16(), nn.Linear(512, 8, bias=False)
    convert(source, skip_small=False)
    load_fp8(model.bfloat16(), save_fp8(source, tmp_path / "fp8"))
    before = state(model)
    blank(tmp_path / "fp8")
    assert_same(state(model), before)


def with_(**tensors: Tensor) -> Callable[[Tensors], object]:
    """Replaces tensors; ``__`` stands for a dot."""
    return lambda stored: stored.update({k.replace("__", "."): x for k, x in tensors.items()})


MISFITS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("up.weight_scale_inv"),
     r"'up.weight' is FP8 and has no scales: expected one of weight_scale_inv, weight_scale, s"),
    (with_(up__weight_scale_inv=torch.ones(())),
     r"'up.weight_scale_inv' is F32 \[\], one for the whole tensor: expected .*; dequantize"),
    (with_(up__weight_scale_inv=torch.ones(200, 1)),
     r"'up.weight_scale_inv' is F32 \[200, 1\], one for each row: expected .*; dequantize"),
    (with_(up__weight_scale_inv=torch.ones(2, 2)),
     r"'up.weight_scale_inv' is F32 \[2, 2\]: expected .*, \[2, 3\]: a scale for each 128x128"),
    (with_(up__weight_scale_inv=torch.ones(3, 2)),
     r"'up.weight_scale_inv' is F32 \[3, 2\]: expected .*, \[2, 3\]: a scale for each 128x128"),
    (with_(up__weight_scale_inv=torch.ones(2, 3, dtype=torch.uint8)),
     r"'up.weight_scale_inv' is U8 \[2, 3\]: expected F32 or BF16 or F16 or F8_E8M0, \[2, 3\]"),
    (with_(norm__bias=torch.ones(K + 1)),
     rf"'norm.bias' has shape \[{K + 1}\], the model's has \[{K}\]"),
    (with_(norm__bias=torch.ones(K, dtype=torch.int32)),
     "'norm.bias' is I32, the model's is torch.bfloat16"),
    *((with_(more=torch.ones(shape).to(E4M3), more_scale_inv=torch.ones([1] * len(shape))),
       r"'more_scale_inv' is F32 .*: expected F32 .*None: a scale for each")
      for shape in ((), (128,), (1, 1, 128, 128))),
    *((with_(up__weight_scale_inv=torch.tensor([[1, 2, 4], [1, value, 2]]).to(dtype)),
       rf"tensor 'up.weight_scale_inv': the scale of block \[1, 1\] is {value}: expected")
      for dtype, values in BAD_SCALES.items() for value in values),
    *((with_(**{f"x{i}": torch.ones(1) for i in range(count)}),
       rf"0 missing, {count} unexpected \(x0, x1, x2, x3, x4{rest}\)")
      for count, rest in ((5, ""), (6, ", …"))),
    (lambda t: t.pop("norm.bias"), r"1 missing \(norm.bias\)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=range(len(MISFITS)))
def test_what_does_not_fit_says_what_and_where(
    folder: Path, change: Callable[[Tensors], object], message: str
) -> None:
    rewrite(folder, change)
    assert_refused(folder, TARGETS["plain"](), message)


def test_a_file_that_breaks_while_it_is_read_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, read = reading._box, []

    def breaks(entry: Any, *at: Any) -> Tensor:
        read.append(entry.name)
        if len(read) == 6:
            raise CheckpointError(f"{entry} cannot be read (I/O error)")
        return tensor(entry, *at)

    monkeypatch.setattr(reading, "_box", breaks)
    assert_refused(folder, TARGETS["plain"](), "cannot be read")


def test_the_table_of_a_report() -> None:
    report = LoadReport(
        fp8=tuple(f"layers.{i}.{name}.weight" for i in range(12) for name in ("up", "down")),
        plain=("embed.weight", *(f"layers.{i}.norm.weight" for i in range(12))),
        missing=("head.weight",),
        unexpected=("layers.61.extra.weight", "layers.61.extra.bias"),
    )
    assert_expected_inline(
        str(report),
        """\
tensor                     outcome    as
-------------------------  ---------  ---------------------
layers.*.up.weight (12)    loaded     FP8, frozen
layers.*.down.weight (12)  loaded     FP8, frozen
embed.weight               loaded     the model's dtype
layers.*.norm.weight (12)  loaded     the model's dtype
head.weight                unchanged  not in the checkpoint
layers.61.extra.weight     not read   not in the model
layers.61.extra.bias       not read   not in the model
24 loaded in FP8, 13 in the model's dtype; 1 missing, 2 unexpected""",
    )
