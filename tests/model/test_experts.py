"""Stacks of experts: how they are found, and what is said of those that are not converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    SmallKN,
    convert,
    explain,
    freeze,
    memory_report,
    to_blockwise_fp8_weights,
    unfreeze,
)
from tests.support.models import POWER_OF_TWO, complaint, plain, randn, reasons
from tests.support.moe_models import GroupedExperts, TitanMoE

E, N, K = 3, 256, 128
TITAN = ["w1_EFD", "w2_EDF", "w3_EFD"]


class Flagged(nn.Module):
    """As transformers' decorator leaves a class of experts."""

    def __init__(self, is_transposed: bool = False, n: int = N, k: int = K) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, True, is_transposed
        up, down = (E, 2 * n, k), (E, k, n)
        shapes = [(e, b, a) if is_transposed else (e, a, b) for e, a, b in (up, down)]
        self.gate_up_proj = nn.Parameter(torch.ones(shapes[0]))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * n))
        self.down_proj = nn.Parameter(torch.ones(shapes[1]))


class Unknown(nn.Module):
    """Stacks that nothing tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(E, N, K))
        self.down = nn.Parameter(torch.ones(E, K, N))
        self.table = nn.Parameter(torch.ones(E, K))


class Fused(GroupedExperts):
    """torchtitan's override: two projections in one parameter of four dimensions."""

    def __init__(self) -> None:
        super().__init__(E, K, N)
        self.w13_EF2D = nn.Parameter(torch.ones(E, N, 2, K))
        self.extra = nn.Parameter(torch.ones(E, N, K))
        del self.w1_EFD, self.w3_EFD


SMALL = SmallKN(expert_n=128, expert_k=128, expert_size=0)
"""Thresholds below the sizes of these tests' experts."""


def fp8_names(model: nn.Module) -> list[str]:
    kinds = (BlockwiseFP8Tensor, BlockwiseFP8Weight)
    return [name for name, p in model.named_parameters() if isinstance(p, kinds)]


def test_the_report_of_every_kind_of_experts() -> None:
    model = nn.ModuleDict(
        {
            "titan": GroupedExperts(E, K, N),
            "flags": Flagged(),
            "transposed": Flagged(is_transposed=True, n=K),
            "small": Flagged(n=K, k=100),
            "fused": Fused(),
            "unknown": Unknown(),
            "named": Unknown(),
        }
    )
    frozen = model["titan"].w2_EDF.requires_grad_(False)
    report = convert(model, experts={"named": ["up", "down"]}, auto_filter_small_kn=SMALL)
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
small.gate_up_proj            3x256x100    float32  4.7%   -        small: K=100 < 128 (auto_filter_small_kn)
small.gate_up_proj_bias       3x256        float32  <0.1%  -        bias of experts
small.down_proj               3x100x128    float32  2.3%   -        small: N=100 < 128 (auto_filter_small_kn)
fused.w2_EDF                  3x128x256    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=128, K=256)
fused.w13_EF2D                3x256x2x128  float32  12.0%  -        experts with 4 dimensions, which several fused projections share
fused.extra                   3x256x128    float32  6.0%   -        stack of matrices: in Fused; experts={...} would name it
unknown.up                    3x256x128    float32  6.0%   -        stack of matrices: in Unknown; experts={...} would name it
unknown.down                  3x128x256    float32  6.0%   -        stack of matrices: in Unknown; experts={...} would name it
unknown.table                 3x128        float32  <0.1%  -        not the weight of a linear: in Unknown
named.up                      3x256x128    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=256, K=128)
named.down                    3x128x256    float32  6.0%   fp8      trainable (experts, E x N x K: E=3, N=128, K=256)
named.table                   3x128        float32  <0.1%  -        not the weight of a linear: in Unknown
10 converted, 11 skipped; 62.8% of 1,642,752 parameters in FP8; 6.3 MiB before, 6.9 MiB after""",  # noqa: E501
    )
    converted = {entry.name for entry in report.converted}
    assert set(fp8_names(model)) == converted


def test_apply_converts_the_same_stacks() -> None:
    model = nn.ModuleDict({"titan": TitanMoE(), "flags": Flagged(n=1, k=1), "unknown": Unknown()})
    model["fused"] = Fused()
    model.apply(to_blockwise_fp8_weights)
    titan = ["titan.gate.weight", *(f"titan.experts.{name}" for name in TITAN)]
    flags = ["flags.gate_up_proj", "flags.down_proj"]
    assert fp8_names(model) == [*titan, *flags, "fused.w2_EDF"]
    model.apply(lambda m: to_blockwise_fp8_weights(m, POWER_OF_TWO))
    assert {model.get_parameter(name).recipe for name in fp8_names(model)} == {POWER_OF_TWO}


@pytest.mark.parametrize("flag", ["has_gate", "has_bias", "is_transposed"])
def test_flags_must_all_be_there(flag: str) -> None:
    for change in (lambda m: delattr(m, flag), lambda m: setattr(m, flag, None)):
        module = Flagged()
        change(module)
        module.apply(to_blockwise_fp8_weights)
        assert fp8_names(module) == []


def test_a_parameter_keeps_its_identity_and_its_values() -> None:
    module = Flagged(is_transposed=True)
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    convert(module, Recipe(scale="power_of_two"), auto_filter_small_kn=False)
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    state = module.state_dict()
    assert {type(x) for x in state.values()} == {Tensor}
    twin = Flagged(is_transposed=True)
    twin.load_state_dict(state)
    module.load_state_dict({k: v + 1 for k, v in state.items()}, assign=True)
    assert isinstance(module.down_proj, BlockwiseFP8Weight)
    assert module.down_proj.recipe == POWER_OF_TWO
    assert torch.equal(module.down_proj, plain(twin.down_proj) + 1)


def test_thresholds_skips_and_filters() -> None:
    def why(**options: Any) -> dict[str, str]:
        with pytest.warns(UserWarning, match="no weight of this"):
            return reasons(convert(nn.ModuleDict({"experts": Flagged()}), **options))

    up, down = "experts.gate_up_proj", "experts.down_proj"
    small = why()
    assert small[up] == "small: K=128 < 256 and N K=65536 < 1048576 (auto_filter_small_kn)"
    assert small[down] == "small: N=128 < 256 and N K=32768 < 1048576 (auto_filter_small_kn)"
    large = why(auto_filter_small_kn=SmallKN(expert_n=1000, expert_k=1000, expert_size=0))
    assert large[up] == "small: N=512 < 1000 and K=128 < 1000 (auto_filter_small_kn)"
    assert why(skip=["experts"])[up] == "skip pattern 'experts'"
    both = why(skip=["*.down_proj", "*.gate_up_proj"])
    assert both[down] == "skip pattern '*.down_proj'"
    asked: list[str] = []
    assert why(filter=lambda m, name: bool(asked.append(name)))[up] == "filter"  # type: ignore[func-returns-value]
    assert asked == [up, down]
    model = nn.ModuleDict({"experts": Flagged()})
    convert(model, skip=["*.down_proj"], auto_filter_small_kn=False)
    assert fp8_names(model) == [up]
    with pytest.raises(ValueError, match="skip pattern 'expert' matches no module"):
        convert(model, skip=["expert"])


def test_what_may_be_named() -> None:
    model = nn.ModuleDict({"a": Unknown(), "b": nn.ModuleDict({"c": Unknown()})})
    convert(model, experts={"*.c": ("up",), "b.?": ["up", "down"]}, auto_filter_small_kn=SMALL)
    assert fp8_names(model) == ["b.c.up", "b.c.down"]
    again = convert(model)
    assert {entry.reason for entry in again.converted} == {"already converted"}
    assert reasons(again)["a.up"] == "stack of matrices: in Unknown; experts={...} would name it"
    whole = Unknown()
    convert(whole, experts={"": ["down"]}, skip=[], auto_filter_small_kn=SMALL)
    assert fp8_names(whole) == ["down"]
    skipped = convert(
        Unknown(), experts={"": ["down", "up"]}, skip=["down"], auto_filter_small_kn=SMALL
    )
    assert reasons(skipped)["down"] == "skip pattern 'down'"


BAD_NAMES: dict[str, Any] = {
    "a list": [("*.a", ["up"])],
    "a name that is no list": {"a": "up"},
    "names that are no strings": {"a": [1]},
    "no such module": {"expert": ["up"]},
    "no such parameter": {"a": ["w1"]},
    "a matrix": {"a": ["table"]},
    "four dimensions": {"f": ["w13_EF2D"]},
}


def test_the_texts_of_bad_names() -> None:
    def text(name: str) -> str:
        model = nn.ModuleDict({"a": Unknown(), "experts": Unknown(), "f": Fused()})
        bad = {"a": ["up"], **BAD_NAMES[name]} if name == "no such module" else BAD_NAMES[name]
        kind = TypeError if "list" in name or "strings" in name else ValueError
        found = complaint(kind, lambda: convert(model, experts=bad))
        assert fp8_names(model) == []
        return f"{name}:\n{found}"

    assert_expected_inline(
        "\n\n".join(map(text, BAD_NAMES)),
        """\
a list:
experts=[('*.a', ['up'])] is a list: expected patterns of module names with the
names of their stacks, e.g. {'*.experts': ['w1', 'w2']}

a name that is no list:
experts has 'a': 'up': expected a pattern with a list of the names of stacks, e.g.
{'*.experts': ['w1', 'w2']}

names that are no strings:
experts has 'a': [1]: expected a pattern with a list of the names of stacks, e.g.
{'*.experts': ['w1', 'w2']}

no such module:
experts pattern 'expert' matches no module of this ModuleDict: expected a pattern of
the names of modules that hold stacks; near it: 'experts'

no such parameter:
experts names 'w1' of 'a', which has no such parameter: its parameters are up, down,
table

a matrix:
experts names 'table' of 'a', experts with 2 dimensions: expected 3: expected a
parameter [E, N, K] or [E, K, N]

four dimensions:
experts names 'w13_EF2D' of 'f', experts with 4 dimensions, which several fused
projections share: expected a parameter [E, N, K] or [E, K, N]""",
    )


def test_freeze_keeps_the_bytes_of_the_forward_and_unfreeze_undoes_it() -> None:
    model = nn.ModuleDict({"a": Flagged(is_transposed=True), "b": Unknown(), "c": nn.Linear(K, K)})
    for p in model.parameters():
        p.data = randn(*p.shape, dtype=torch.float32)
    convert(model, experts={"b": ["up", "down"]}, auto_filter_small_kn=False)
    names = ["a.gate_up_proj", "a.down_proj", "b.up", "b.down", "c"]
    trained = {n: model.get_parameter(n)._quantized() for n in names[:-1]}
    assert freeze(model) == names
    for name, before in trained.items():
        frozen = model.get_parameter(name)
        assert isinstance(frozen, BlockwiseFP8Tensor)
        assert not frozen.requires_grad
        assert (frozen.shape, frozen.stride()) == (before.shape, before.stride())
        assert torch.equal(frozen.dequantize(), before.dequantize())
        assert (frozen.rowwise_data is None) == name.startswith("a.")
    assert memory_report(model).frozen.high_precision == 0
    assert unfreeze(model) == names
    for name, before in trained.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, BlockwiseFP8Weight)
        assert torch.equal(weight, before.dequantize())
        assert weight.is_contiguous()


def test_a_frozen_stack_that_another_module_holds() -> None:
    for holder, text in ((Flagged(), None), (nn.Module(), "Module")):
        module = Flagged()
        module.down_proj.requires_grad_(False)
        holder.down_proj = module.down_proj
        report = convert(nn.ModuleDict({"a": module, "b": holder}), auto_filter_small_kn=False)
        assert isinstance(module.down_proj, BlockwiseFP8Tensor) == (text is None)
        why = {entry.name: entry.reason for entry in report.entries}["a.down_proj"]
        assert why.startswith(
            "frozen: high-precision copy dropped" if text is None else "frozen, and another module"
        )
        with pytest.warns(UserWarning, match=r"holds it too \(Module\)") if text else _nothing():
            alone = Flagged()
            alone.down_proj.requires_grad_(False)
            other = type(holder)()
            other.down_proj = alone.down_proj
            to_blockwise_fp8_weights(alone)
        assert isinstance(alone.gate_up_proj, BlockwiseFP8Weight)
        assert isinstance(alone.down_proj, BlockwiseFP8Tensor) == (text is None)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_a_failed_call_changes_nothing() -> None:
    module = Flagged()
    module.down_proj.data = module.down_proj.data.double()
    calls: list[Callable[[], Any]] = [
        lambda: to_blockwise_fp8_weights(module),
        lambda: nn.Sequential(module).apply(to_blockwise_fp8_weights),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"the stack 'down_proj' .*float64"):
            call()
        assert fp8_names(module) == []
    report = convert(module, auto_filter_small_kn=False)
    assert reasons(report)["down_proj"] == "dtype torch.float64"


def test_explain_lists_the_products_of_stacks() -> None:
    model = nn.ModuleDict({"a": Flagged(is_transposed=True), "b": Flagged()})
    model["a"].config = type("Config", (), {"num_experts_per_tok": 2})()
    model["b"].down_proj.requires_grad_(False)
    convert(model, auto_filter_small_kn=False)
    assert_expected_inline(
        str(explain(model, tokens=100)),
        """\
layer           product  M x N x K                    backend    why
--------------  -------  ---------------------------  ---------  -----------------------------------------------------------------
a.gate_up_proj  fprop    200 x 512 x 128 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
a.gate_up_proj  dgrad    200 x 128 x 512 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
a.gate_up_proj  wgrad    512 x 128 x 200 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
a.down_proj     fprop    200 x 128 x 256 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
a.down_proj     dgrad    200 x 256 x 128 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
a.down_proj     wgrad    128 x 256 x 200 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
b.gate_up_proj  fprop    100 x 512 x 128 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
b.gate_up_proj  dgrad    100 x 128 x 512 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
b.gate_up_proj  wgrad    512 x 128 x 100 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
b.down_proj     fprop    100 x 128 x 256 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'
b.down_proj     dgrad    100 x 256 x 128 in 3 groups  reference  runs on any device; gluon, triton: needs a CUDA device, got 'cpu'""",  # noqa: E501
    )


def test_memory_counts_the_forms_of_the_matrices_of_a_stack() -> None:
    module = Unknown()
    convert(module, experts={"": ["up"]}, auto_filter_small_kn=SMALL)
    before = memory_report(module).trainable
    assert (before.high_precision, before.fp8) == (4 * E * N * K, 0)
    x = randn(5, K, dtype=torch.float32, grad=True)
    y = nn.functional.linear(x, module.up[1])
    held = memory_report(module).trainable
    assert (held.data, held.scales, held.elements) == (0, 0, E * N * K)
    assert held.columnwise == N * K + 2 * 4  # dgrad reads that form
    y.sum().backward()
    assert memory_report(module).trainable.fp8 == 0
