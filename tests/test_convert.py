"""Converting models in place: what is converted, what is not and why, and what must survive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import blocktensor
from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    ConversionReport,
    SmallKN,
    convert,
    functional,
    to_blockwise_fp8_weights,
)
from tests.models import DIM, FP8_TYPES, POWER_OF_TWO, TOKENS, Model, complaint, plain, randn

LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


def converted_names(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), FP8_TYPES)
    ]


def reasons(report: ConversionReport) -> dict[str, str]:
    return {entry.name: entry.reason for entry in report.skipped}


# apply


def test_apply_converts_every_linear_whatever_its_size_or_name() -> None:
    model = Model()
    assert model.apply(to_blockwise_fp8_weights) is model
    assert converted_names(model) == [*LINEARS, "lm_head"]
    assert all(type(p.data) is Tensor for n, p in model.named_parameters() if "bias" in n)


def test_apply_preserves_all_that_hangs_on_the_model() -> None:
    model = Model().eval()
    seen: list[str] = []
    up = model.blocks[0].up
    up.register_forward_hook(lambda *_: seen.append("forward"))
    up.register_forward_pre_hook(lambda *_: seen.append("pre"))
    up.weight.register_hook(lambda g: seen.append("grad"))
    up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    up.weight.grad = torch.ones_like(up.weight)
    before = {
        "ids": [id(p) for p in model.parameters()],
        "names": [n for n, _ in model.named_parameters()],
        "classes": [type(m) for m in model.modules()],
        "values": [p.detach().clone() for p in model.parameters()],
    }
    model.apply(to_blockwise_fp8_weights)
    assert [id(p) for p in model.parameters()] == before["ids"]
    assert [n for n, _ in model.named_parameters()] == before["names"]
    assert [type(m) for m in model.modules()] == before["classes"]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    for p, values in zip(model.parameters(), before["values"], strict=True):
        assert torch.equal(plain(p), values)
    assert not model.training
    assert torch.equal(up.weight.grad, torch.ones_like(up.weight.grad))
    model(TOKENS).sum().backward()
    assert seen == ["pre", "forward", "grad", "accumulated"]
    assert up.weight.grad.max() > 1.0001  # and accumulates


def test_attributes_of_a_parameter_survive() -> None:
    module = nn.Linear(DIM, DIM)
    module.weight.tensor_model_parallel = True
    to_blockwise_fp8_weights(module)
    assert module.weight.tensor_model_parallel


def test_apply_twice_changes_nothing() -> None:
    model = Model().apply(lambda m: to_blockwise_fp8_weights(m, POWER_OF_TWO))
    inside = [p.master for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
    model.apply(to_blockwise_fp8_weights)
    again = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
    assert all(a.master is b for a, b in zip(again, inside, strict=True))
    assert {p.recipe for p in again} == {POWER_OF_TWO}


def test_an_optimizer_made_before_conversion_keeps_working() -> None:
    models = Model(), Model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for module in (models[1], *models):  # one optimizer has state already
        module(TOKENS).sum().backward()
    models[0].apply(to_blockwise_fp8_weights)
    for model, optimizer in zip(models, optimizers, strict=True):
        for i, p in enumerate(model.parameters()):
            p.grad = randn(*p.shape, seed=i, dtype=p.dtype)
        optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain(a), plain(b))
    assert set(optimizers[0].param_groups[0]["params"]) == set(models[0].parameters())


@pytest.mark.parametrize("use", ["apply", "convert"])
def test_tied_linears_stay_tied(use: str) -> None:
    a, b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    if use == "apply":
        model.apply(to_blockwise_fp8_weights)
    else:
        report = convert(model, auto_filter_small_kn=False)
        assert [e.reason for e in report.converted] == ["trainable", "tied to '0'"]
        assert report.bytes_before == 4 * DIM * DIM
    assert a.weight is b.weight
    assert isinstance(a.weight, BlockwiseFP8Weight)
    assert len(list(model.parameters())) == 3


def test_apply_to_a_head_tied_to_an_embedding() -> None:
    model = Model(tied=True).apply(to_blockwise_fp8_weights)
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.embed.weight, BlockwiseFP8Weight)
    rows = model.embed(TOKENS)
    assert torch.equal(rows, nn.functional.embedding(TOKENS, plain(model.embed.weight)))
    x = randn(3, DIM, dtype=torch.float32)
    assert torch.equal(model.lm_head(x), functional.linear(x, plain(model.embed.weight)))
    model(TOKENS).sum().backward()
    assert torch.isfinite(model.embed.weight.grad).all()


def test_a_parametrized_linear_is_left_alone_and_said_so() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)))
    report = convert(model, auto_filter_small_kn=False)
    assert report.converted == ()
    assert "parametri" in reasons(report)["0"]


def test_a_linear_subclass_is_converted_and_other_modules_are_not() -> None:
    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "mine": Mine(DIM, DIM),
            "conv": nn.Conv1d(DIM, DIM, 1),
            "bilinear": nn.Bilinear(DIM, DIM, DIM),
            "norm": nn.LayerNorm(DIM),
            "attention": nn.MultiheadAttention(DIM, 2),
        }
    ).apply(to_blockwise_fp8_weights)
    assert converted_names(model) == ["mine"]
    x = randn(3, 1, DIM, dtype=torch.float32)
    assert model["attention"](x, x, x)[0].shape == x.shape


# Frozen, meta, other dtypes


def test_a_frozen_weight_drops_its_high_precision_copy(device: torch.device) -> None:
    module = nn.Linear(DIM, 3 * DIM, device=device).requires_grad_(False)
    wanted = plain(module.weight)
    x = randn(5, DIM, dtype=torch.float32, device=device, grad=True)
    to_blockwise_fp8_weights(module, POWER_OF_TWO)
    assert type(module.weight) is BlockwiseFP8Tensor
    assert isinstance(module.weight, nn.Parameter)
    assert not module.weight.requires_grad
    assert torch.equal(module(x), functional.linear(x, wanted, module.bias, recipe=POWER_OF_TWO))
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


@pytest.mark.parametrize("trainable", [True, False])
def test_meta_modules_are_initialised_later(trainable: bool, device: torch.device) -> None:
    with torch.device("meta"):
        model = Model().requires_grad_(trainable)
    report = convert(model, auto_filter_small_kn=False)
    assert {e.reason for e in report.converted} == {
        "trainable" if trainable else "initialised later"
    }
    assert converted_names(model) == LINEARS
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    up = model.blocks[0].up
    assert isinstance(up.weight, BlockwiseFP8Weight)
    assert up.weight.master.device.type == device.type
    x = randn(5, DIM, dtype=torch.float32, device=device)
    assert torch.equal(up(x), functional.linear(x, plain(up.weight), up.bias))


def test_a_meta_module_can_run_for_its_shapes() -> None:
    with torch.device("meta"):
        model = Model().apply(to_blockwise_fp8_weights)
        y = model(TOKENS.to("meta"))
    assert (y.shape, y.device.type) == ((2, 6, 50), "meta")
    y.sum().backward()
    assert model.blocks[0].up.weight.grad.shape == (3 * DIM, DIM)


def test_a_model_in_float64() -> None:
    model = Model().double()
    report = convert(copy.deepcopy(model), auto_filter_small_kn=False)
    assert reasons(report)["blocks.0.up"] == "dtype torch.float64"
    assert report.converted == ()
    text = complaint(TypeError, lambda: model.apply(to_blockwise_fp8_weights))
    assert_expected_inline(
        text,
        """\
the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )


@pytest.mark.parametrize("x_grad", [False, True])
def test_converting_between_forward_and_backward_is_an_error(x_grad: bool) -> None:
    module = nn.Linear(DIM, DIM)
    loss = module(randn(3, DIM, dtype=torch.float32, grad=x_grad)).sum()

    def convert_then_backward() -> None:
        to_blockwise_fp8_weights(module)
        loss.backward()

    text = complaint(RuntimeError, convert_then_backward).replace("\n", " ")
    assert "between" in text
    assert "forward and" in text
    assert module.weight.grad is None


# convert


def test_the_report_of_a_small_model() -> None:
    model = Model()
    report = convert(model, skip=["blocks.1.*"], auto_filter_small_kn=SmallKN(n=DIM, k=100, size=0))
    assert converted_names(model) == ["blocks.0.down"]
    assert_expected_inline(
        str(report),
        """\
module         weight  dtype    runs in  why
-------------  ------  -------  -------  ----------------------------------------
embed          50x64   float32  -        embedding
blocks.0.up    192x64  float32  -        small: K=64 < 100 (auto_filter_small_kn)
blocks.0.down  64x192  float32  fp8      trainable
blocks.1.up    192x64  float32  -        skip pattern 'blocks.1.*'
blocks.1.down  64x192  float32  -        skip pattern 'blocks.1.*'
lm_head        50x64   float32  -        lm head by name
1 converted, 5 skipped; parameters 217.0 KiB before, 229.0 KiB after""",
    )


def test_the_report_of_frozen_and_tied_weights() -> None:
    model = Model(tied=True)
    model.blocks[0].requires_grad_(False)
    report = convert(model, auto_filter_small_kn=False)
    assert_expected_inline(
        str(report),
        """\
module         weight  dtype    runs in  why
-------------  ------  -------  -------  -----------------------------------
embed          50x64   float32  -        embedding
blocks.0.up    192x64  float32  fp8      frozen: high-precision copy dropped
blocks.0.down  64x192  float32  fp8      frozen: high-precision copy dropped
blocks.1.up    192x64  float32  fp8      trainable
blocks.1.down  64x192  float32  fp8      trainable
lm_head        50x64   float32  -        tied to embedding 'embed'
4 converted, 2 skipped; parameters 204.5 KiB before, 156.5 KiB after""",
    )
    again = convert(model, auto_filter_small_kn=False)
    assert {e.reason for e in again.converted} == {"already converted"}
    assert again.bytes_before == again.bytes_after == report.bytes_after


@pytest.mark.parametrize("head", ["lm_head", "output", "head", "embed_out", "logits"])
def test_the_usual_heads_are_left_alone(head: str) -> None:
    model = Model(head=head)
    report = convert(model, auto_filter_small_kn=False)
    assert reasons(report) == {"embed": "embedding", head: "lm head by name"}
    assert converted_names(model) == LINEARS


def test_a_tied_head_of_any_name_is_left_alone() -> None:
    model = Model(tied=True, head="anything")
    report = convert(model, auto_filter_small_kn=False)
    assert reasons(report) == {"embed": "embedding", "anything": "tied to embedding 'embed'"}
    assert model.anything.weight is model.embed.weight
    assert type(model.embed.weight.data) is Tensor


def test_the_output_projection_of_attention_is_left_alone() -> None:
    model = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)
    report = convert(model, auto_filter_small_kn=False)
    assert [e.name for e in report.converted] == ["linear1", "linear2"]
    assert "MultiheadAttention" in reasons(report)["self_attn.out_proj"]
    x = randn(2, 5, DIM, dtype=torch.float32, grad=True)
    model(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert model.eval()(x).shape == x.shape


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, []),
        ({"auto_filter_small_kn": False}, LINEARS),
        ({"auto_filter_small_kn": SmallKN(n=DIM, k=DIM, size=0)}, LINEARS),
        ({"auto_filter_small_kn": SmallKN(n=DIM + 1, k=0, size=0)}, ["blocks.0.up", "blocks.1.up"]),
        (
            {"auto_filter_small_kn": SmallKN(n=0, k=DIM + 1, size=0)},
            ["blocks.0.down", "blocks.1.down"],
        ),
        ({"auto_filter_small_kn": False, "skip": ["*.up"]}, ["blocks.0.down", "blocks.1.down"]),
        ({"auto_filter_small_kn": False, "skip": ("blocks.0.*", "*.1.up")}, ["blocks.1.down"]),
        (
            {"auto_filter_small_kn": False, "filter": lambda m, name: m.bias is None},
            ["blocks.0.down", "blocks.1.down"],
        ),
    ],
)
def test_what_convert_leaves_out(options: dict[str, Any], left: list[str]) -> None:
    model = Model()
    report = convert(model, **options)
    assert converted_names(model) == left == [e.name for e in report.converted]
    assert len(report.entries) == 6
    assert all(entry.reason for entry in report.entries)


def test_the_default_thresholds_keep_large_layers() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "large": nn.Linear(2048, 2048),
                "wide": nn.Linear(1024, 4096),
                "flat": nn.Linear(4096, 1024),
                "narrow": nn.Linear(1023, 8192),
                "small": nn.Linear(2047, 2048),
            }
        )
    report = convert(model)
    assert [e.name for e in report.converted] == ["large", "wide", "flat"]
    assert reasons(report)["narrow"] == "small: K=1023 < 1024 (auto_filter_small_kn)"
    assert reasons(report)["small"] == "small: N K=4192256 < 4194304 (auto_filter_small_kn)"


def test_the_filter_sees_only_linears_that_could_be_converted() -> None:
    seen: list[tuple[type, str]] = []
    convert(Model(), filter=lambda m, n: seen.append((type(m), n)), auto_filter_small_kn=False)
    assert seen == [(nn.Linear, name) for name in LINEARS]


def test_bad_patterns() -> None:
    model = Model()
    assert_expected_inline(
        complaint(TypeError, lambda: convert(model, skip="lm_head")),
        """skip='lm_head' is a str: expected a list of patterns, e.g. ['lm_head']""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: convert(model, skip=["heads"])),
        """skip pattern 'heads' matches no module of the model""",
    )
    assert converted_names(model) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_bytes_are_those_of_the_tensors(cache: bool, frozen: bool, dtype: torch.dtype) -> None:
    module = nn.Linear(300, 200, dtype=dtype).requires_grad_(not frozen)
    before = module.weight.nbytes
    recipe = blocktensor.Recipe(cache_weight=cache)
    report = convert(nn.Sequential(module), recipe, auto_filter_small_kn=False)
    fp8 = 200 * 300 + 4 * 2 * 3
    assert report.bytes_before == before
    wanted = fp8 if frozen else before + (fp8 if cache else 0)
    assert report.bytes_after == wanted


def test_biases_stay_and_training_goes_on(device: torch.device) -> None:
    model, reference = Model(), Model()
    for m in (model, reference):
        m.to(device)
    convert(model, auto_filter_small_kn=False)
    losses = []
    for m in (model, reference):
        loss = m(TOKENS.to(device)).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = (p.grad - q.grad).norm() / q.grad.norm()
        assert error < 0.2, name
