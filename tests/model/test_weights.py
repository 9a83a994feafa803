"""Which parameters products read: linears of every class, Conv1D, and stacks of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    MinSizes,
    Recipe,
    convert,
    explain,
    freeze,
    to_blockwise_fp8_weights,
    unfreeze,
)
from blocktensor.model.weights import is_conv1d, is_linear, is_transposed
from tests.support.matrices import Flagged, Fused, K, Unknown, every_stack, fp8_names
from tests.support.models import (
    DIM,
    FP8_TYPES,
    POWER_OF_TWO,
    RECIPES,
    Conv1D,
    converted_names,
    plain,
    randn,
    reasons,
)
from tests.support.moe_models import TitanMoE
from tests.support.steps import assert_bits, assert_trace, step

ROWS, COLUMNS = 200, 300


def twins(
    recipe: Recipe, dtype: torch.dtype = torch.bfloat16, frozen: bool = False
) -> tuple[nn.Module, nn.Linear]:
    conv, linear = Conv1D(ROWS, COLUMNS).to(dtype), nn.Linear(COLUMNS, ROWS, dtype=dtype)
    with torch.no_grad():
        conv.bias.copy_(randn(ROWS, seed=3))
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    for module in (conv, linear):
        module.weight.requires_grad_(not frozen)
        to_blockwise_fp8_weights(module, recipe)
    return conv, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_a_conv1d_computes_the_bits_of_the_transposed_linear(
    recipe: Recipe, frozen: bool, dtype: torch.dtype
) -> None:
    conv, linear = twins(recipe, dtype, frozen)
    x = randn(2, 5, COLUMNS, dtype=dtype)
    y, dx, dw, db = step(conv, x)
    assert_bits([y, dx, dw if dw is None else dw.t(), db], step(linear, x))
    assert (dw is None) == frozen
    for module in (conv, linear):
        forward = {"blocktensor.gemm 1x128": 1, "mm": 1, **({"transpose": 0} if frozen else {})}
        backward = {"blocktensor.gemm 1x128": 2 - frozen, "mm": 2 - frozen}
        assert_trace(module, x, forward=forward, backward=backward)


@pytest.mark.parametrize(
    ("thresholds", "why"),
    [
        (MinSizes(n=ROWS, k=COLUMNS, size=0), "trainable (Conv1D)"),
        (MinSizes(n=ROWS + 1, k=0, size=0), "small: N=200 < 201 (skip_small)"),
        (MinSizes(n=0, k=COLUMNS + 1, size=0), "small: K=300 < 301 (skip_small)"),
    ],
)
def test_a_conv1d_is_small_by_the_sizes_of_its_linear(thresholds: MinSizes, why: str) -> None:
    model = nn.ModuleDict({"conv": Conv1D(ROWS, COLUMNS), "linear": nn.Linear(400, 400)})
    assert convert(model, skip_small=thresholds).entries[0].reason == why
    sizes = [(p.m, p.n, p.k) for p in explain(twins(POWER_OF_TWO)[0]).matmuls]
    assert sizes == [(4096, ROWS, COLUMNS), (4096, COLUMNS, ROWS), (ROWS, COLUMNS, 4096)]


def test_the_conv1d_of_transformers() -> None:
    real = pytest.importorskip("transformers.pytorch_utils").Conv1D
    mine, theirs = Conv1D(ROWS, COLUMNS), real(ROWS, COLUMNS)
    with torch.no_grad():
        theirs.weight.copy_(mine.weight)
    assert is_conv1d(theirs)
    for module in (mine, theirs):
        to_blockwise_fp8_weights(module)
    x = randn(5, COLUMNS, dtype=torch.float32)
    assert torch.equal(mine(x), theirs(x))
    assert isinstance(theirs.weight, BlockwiseFP8Weight)


def test_what_else_is_called_conv1d_is_left_alone() -> None:
    sub, other = type("Sub", (Conv1D,), {})(3, 4), type("Conv1D", (nn.Module,), {"nf": 3})()
    without = Conv1D(3, 4)
    del without.nf
    assert is_linear(sub) and is_conv1d(sub)
    assert not any(map(is_linear, (other, without, nn.Conv1d(3, 4, 1))))


class Theirs(nn.Parameter):
    pass


def test_weights_of_other_libraries_are_left_alone() -> None:
    theirs = type("Float8Linear", (nn.Linear,), {"__module__": "torchao.float8.float8_linear"})
    kinds = (nn.Linear, nn.Linear, nn.Linear, theirs, type("Sub", (theirs,), {}))
    model = nn.Sequential(*(kind(DIM, DIM) for kind in kinds))
    model[0].weight = Theirs(randn(DIM, DIM, dtype=torch.float32))
    model[1].weight = nn.Parameter(torch.zeros(DIM * DIM // 2, 1, 1))
    model[3].table, late = nn.Parameter(torch.zeros(3, 4)), nn.UninitializedParameter
    experts = model.append(Flagged())[5]
    experts.down_proj, experts.gate_up_proj = Theirs(torch.zeros(3, 128, 128)), late()
    experts.table, experts.late = nn.Parameter(torch.zeros(3, 4)), late()
    report = convert(model, skip_small=False)
    assert converted_names(model) == ["2"]
    casts = "a Float8Linear of torchao.float8.float8_linear, which casts its weight itself"
    assert reasons(report) == {
        "0": "its weight is a Theirs, a type of another library",
        "1": "its weight has 3 dimensions",
        **{"3": casts, "3.table": casts, "4": casts},
        "5.gate_up_proj": "experts without a shape yet",
        "5.down_proj": "experts in a Theirs, a type of another library",
        "5.gate_up_proj_bias": "bias of experts",
        **dict.fromkeys(["5.table", "5.late"], "not the weight of a linear layer: in Flagged"),
    }


TITAN = ["w1_EFD", "w2_EDF", "w3_EFD"]
SMALL = MinSizes(expert_n=128, expert_k=128, expert_size=0)
"""Thresholds below the sizes of these tests' experts."""


def test_the_report_of_every_kind_of_experts() -> None:
    model = every_stack()
    frozen = model["titan"].w2_EDF.requires_grad_(False)
    report = convert(model, stacks={"named": ["up", "down"]}, skip_small=SMALL)
    assert isinstance(frozen, BlockwiseFP8Tensor)
    assert_expected_inline(
        str(report),
        """\
parameter                     shape        dtype    share  runs in  why
----------------------------  -----------  -------  -----  -------  ---------------------------------------------------------------------------
titan.w*_EFD (2)              3x256x128    float32  12.0%  fp8      trainable (experts, E x N x K: E=3, N=256, K=128)
titan.w2_EDF                  3x128x256    float32  6.0%   fp8      frozen: high-precision copy dropped (experts, E x N x K: E=3, N=128, K=256)
flags.gate_up_proj            3x512x128    float32  12.0%  fp8      trainable (experts, E x N x K: E=3, N=512, K=128)
flags.gate_up_proj_bias       3x512        float32  0.1%   -        bias of experts
flags.down_proj               3x128x256    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=128, K=256)
transposed.gate_up_proj       3x128x256    float32  6.0%   fp8      trainable (experts, E x K x N: E=3, N=256, K=128)
transposed.gate_up_proj_bias  3x256        float32  <0.1%  -        bias of experts
transposed.down_proj          3x128x128    float32  3.0%   fp8      trainable (experts, E x K x N: E=3, N=128, K=128)
small.gate_up_proj            3x256x100    float32  4.7%   -        small: K=100 < 128 (skip_small)
small.gate_up_proj_bias       3x256        float32  <0.1%  -        bias of experts
small.down_proj               3x100x128    float32  2.3%   -        small: N=100 < 128 (skip_small)
fused.w2_EDF                  3x128x256    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=128, K=256)
fused.w13_EF2D                3x256x2x128  float32  12.0%  -        experts with 4 dimensions, which several fused projections share
fused.extra                   3x256x128    float32  6.0%   -        stack of matrices: in Fused; stacks={...} would name it
unknown.up                    3x256x128    float32  6.0%   -        stack of matrices: in Unknown; stacks={...} would name it
unknown.down                  3x128x256    float32  6.0%   -        stack of matrices: in Unknown; stacks={...} would name it
unknown.table                 3x128        float32  <0.1%  -        not the weight of a linear layer: in Unknown
named.up                      3x256x128    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=256, K=128)
named.down                    3x128x256    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=128, K=256)
named.table                   3x128        float32  <0.1%  -        not the weight of a linear layer: in Unknown
10 converted, 11 skipped; 62.8% of 1,642,752 parameters in FP8; 6.3 MiB before, 6.9 MiB with FP8 forms""",  # noqa: E501
    )
    assert set(fp8_names(model)) == {entry.name for entry in report.converted}


def test_apply_converts_the_same_stacks() -> None:
    parts = {"titan": TitanMoE(), "flags": Flagged(n=1, k=1), "unknown": Unknown()}
    model = nn.ModuleDict({**parts, "fused": Fused()})
    model.apply(to_blockwise_fp8_weights)
    names = ["titan.gate.weight", *(f"titan.experts.{name}" for name in TITAN)]
    names += ["flags.gate_up_proj", "flags.down_proj", "fused.w2_EDF"]
    assert fp8_names(model) == names
    model.apply(lambda m: to_blockwise_fp8_weights(m, POWER_OF_TWO))
    assert {model.get_parameter(name).recipe for name in names} == {POWER_OF_TWO}


@pytest.mark.parametrize("flag", ["has_gate", "has_bias", "is_transposed"])
def test_flags_must_all_be_there(flag: str) -> None:
    for change in (lambda m: delattr(m, flag), lambda m: setattr(m, flag, None)):
        module = Flagged()
        change(module)
        module.apply(to_blockwise_fp8_weights)
        assert fp8_names(module) == []


def test_a_stack_keeps_its_identity_and_its_values() -> None:
    module, twin = Flagged(is_transposed=True), Flagged(is_transposed=True)
    before = {name: (p, plain(p)) for name, p in module.named_parameters()}
    convert(module, POWER_OF_TWO, skip_small=False)
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    state = module.state_dict()
    assert {type(x) for x in state.values()} == {Tensor}
    twin.load_state_dict(state)
    module.load_state_dict({k: v + 1 for k, v in state.items()}, assign=True)
    assert isinstance(module.down_proj, BlockwiseFP8Weight)
    assert module.down_proj.recipe == POWER_OF_TWO
    assert torch.equal(module.down_proj, plain(twin.down_proj) + 1)


UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
LARGE = MinSizes(expert_n=1000, expert_k=1000, expert_size=0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {},
            {
                UP: "small: K=128 < 256 and N K=65536 < 1572864 (skip_small)",
                DOWN: "small: N=128 < 256 and N K=32768 < 1572864 (skip_small)",
            },
        ),
        ({"skip_small": LARGE}, {UP: "small: N=512 < 1000 and K=128 < 1000 (skip_small)"}),
        ({"skip": ["experts"]}, {UP: "skip pattern 'experts'"}),
        ({"skip": ["*.down_proj", "*.gate_up_proj"]}, {DOWN: "skip pattern '*.down_proj'"}),
        ({"filter": lambda m, name: name not in (UP, DOWN)}, {UP: "filter", DOWN: "filter"}),
    ],
)
def test_thresholds_skips_and_filters(options: dict[str, Any], why: dict[str, str]) -> None:
    with pytest.warns(UserWarning, match="no weight of this"):
        found = reasons(convert(nn.ModuleDict({"experts": Flagged()}), **options))
    assert found == {**found, **why}


def test_freeze_keeps_the_bytes_of_the_forward_and_unfreeze_undoes_it() -> None:
    model = nn.ModuleDict({"a": Flagged(is_transposed=True), "b": Unknown(), "c": nn.Linear(K, K)})
    model["a"].conv = Conv1D(2 * K, K)
    for p in model.parameters():
        p.data = randn(*p.shape, dtype=torch.float32)
    convert(model, stacks={"b": ["up", "down"]}, skip_small=False)
    names = ["a.gate_up_proj", "a.down_proj", "a.conv", "b.up", "b.down", "c"]
    weights = [f"{name}.weight" if name in ("a.conv", "c") else name for name in names]
    trained = {name: model.get_parameter(name)._quantized() for name in weights}
    assert freeze(model) == names
    for name, before in trained.items():
        frozen = model.get_parameter(name)
        assert isinstance(frozen, BlockwiseFP8Tensor)
        assert not frozen.requires_grad
        assert (frozen.shape, frozen.stride()) == (before.shape, before.stride())
        assert torch.equal(frozen.dequantize(), before.dequantize())
        assert (frozen.rowwise_data is None) == name.startswith("a.")
    assert unfreeze(model) == names
    for name, before in trained.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, BlockwiseFP8Weight)
        assert torch.equal(weight, before.dequantize())
        assert weight.is_contiguous()


@pytest.mark.parametrize("needs_values", [False, True])
def test_a_frozen_stack_that_another_module_holds(needs_values: bool) -> None:
    module, holder = Flagged(), nn.Module() if needs_values else Flagged()
    holder.down_proj = module.down_proj.requires_grad_(False)
    report = convert(nn.ModuleDict({"a": module, "b": holder}), skip_small=False)
    why = {entry.name: entry.reason for entry in report.entries}["a.down_proj"]
    dropped, kept = "frozen: high-precision copy dropped", "frozen, and another module"
    assert why.startswith(kept if needs_values else dropped)
    assert isinstance(module.down_proj, FP8_TYPES) != needs_values


def test_a_failed_call_changes_nothing() -> None:
    module = Flagged()
    module.down_proj.data = module.down_proj.data.double()
    for call in (to_blockwise_fp8_weights, lambda m: m.apply(to_blockwise_fp8_weights)):
        with pytest.raises(TypeError, match=r"the stack 'down_proj' .*float64"):
            call(module)
        assert fp8_names(module) == []
    assert reasons(convert(module, skip_small=False))["down_proj"] == "dtype torch.float64"


def test_explain_lists_the_products_of_stacks() -> None:
    model = nn.ModuleDict({"a": Flagged(is_transposed=True), "b": Flagged()})
    model["a"].config = type("Config", (), {"num_experts_per_tok": 2})()
    model["b"].config = type("Config", (), {"top_k": 0})()  # says nothing
    model["b"].down_proj.requires_grad_(False)
    convert(model, skip_small=False)
    found = explain(model, tokens=100).matmuls
    assert_expected_inline(
        "\n".join(f"{p.layer} {p.kind} {p.sizes}" for p in found),
        """\
a.gate_up_proj fprop 200 x 512 x 128 in 3 groups
a.gate_up_proj dgrad 200 x 128 x 512 in 3 groups
a.gate_up_proj wgrad 512 x 128 x 200 in 3 groups
a.down_proj fprop 200 x 128 x 256 in 3 groups
a.down_proj dgrad 200 x 256 x 128 in 3 groups
a.down_proj wgrad 128 x 256 x 200 in 3 groups
b.gate_up_proj fprop 100 x 512 x 128 in 3 groups
b.gate_up_proj dgrad 100 x 128 x 512 in 3 groups
b.gate_up_proj wgrad 512 x 128 x 100 in 3 groups
b.down_proj fprop 100 x 128 x 256 in 3 groups
b.down_proj dgrad 100 x 256 x 128 in 3 groups""",
    )
    why = "runs on any device; gluon, triton: needs a CUDA device, got 'cpu'"
    for p in found:
        of_x = "x in 1x128 blocks; " if (p.layer[0], p.kind) == ("a", "wgrad") else ""  # [E, K, N]
        assert (p.backend, p.reason) == ("reference", of_x + why)
    model["b"].top_k = 3
    assert explain(model, tokens=100).matmuls[-1].m == 300


def test_the_flag_of_transposed_stacks_is_of_the_known_names_alone() -> None:
    module = Flagged(is_transposed=True)
    module.own = nn.Parameter(torch.randn(2, 128, 256))
    assert is_transposed(module, "gate_up_proj")
    assert not is_transposed(module, "own")
