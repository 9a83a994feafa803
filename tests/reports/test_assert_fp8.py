"""The check that tests of a model make: it passes only if matmuls with weights ran in FP8."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, audit, audit_step, convert, freeze
from blocktensor.reports import AuditReport
from tests.support.models import TOKENS, Model, randn

X = randn(8, 64, dtype=torch.float32, grad=True)


def complaint(report: AuditReport, *except_for: str) -> str:
    with pytest.raises(AssertionError) as error:
        report.assert_fp8(except_for)
    return str(error.value)


def test_a_converted_model_passes() -> None:
    model = Model()
    convert(model, skip_small=False)
    report = audit(model, TOKENS)
    report.assert_fp8(["lm_head"])
    report.assert_fp8(("*_head", "blocks"))
    first, *_, last = complaint(report).splitlines()
    assert first.endswith("except_for=[...] names modules that may run so:")
    assert last.split(maxsplit=2)[0] == "lm_head"
    convert(model, skip_small=False, convert_head=True)  # as the message says
    assert "convert_head=True" in complaint(report)
    audit(model, TOKENS).assert_fp8()


@pytest.mark.filterwarnings("ignore:no weight of this")
@pytest.mark.parametrize("convert_first", [False, True])
def test_a_model_of_which_nothing_is_in_fp8_fails(convert_first: bool) -> None:
    model = Model()
    if convert_first:
        convert(model)  # leaves all alone, since all is small
    report = audit(model, TOKENS)
    assert not report.marked
    said = complaint(report, "lm_head")
    assert "no matmul ran in FP8" in said
    assert "blocks.*.up (2)" in said and "convert(model, skip_small=False)" in said
    # also where every module may run in high precision
    assert complaint(report, "*") == "matmuls that did not run in FP8:\nno matmul ran in FP8"
    convert(model, skip_small=False)
    audit(model, TOKENS).assert_fp8(["lm_head"])


def test_weights_that_skip_leaves_fail() -> None:
    model = Model()
    convert(model, skip=["*.up"], skip_small=False)
    report = audit(model, TOKENS)
    assert report.fp8_share > 0.4
    *_, row = complaint(report, "lm_head").splitlines()
    assert row.startswith("blocks.*.up (2)")
    remedy = "convert(model, skip_small=False)"
    assert row.endswith(f"  not converted: {remedy} would convert it")  # not: small
    report.assert_fp8(["lm_head", "*.up"])
    convert(model, skip_small=False)  # as the message says
    audit(model, TOKENS).assert_fp8(["lm_head"])


def test_no_matmul_fails() -> None:
    assert "no matmul ran in FP8" in complaint(audit(nn.ReLU(), X))


class Experts(nn.Module):
    """Experts of one's own, in no form that convert knows."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 64, 128) / 8)
        self.down = nn.Parameter(torch.randn(4, 128, 64) / 8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Layers(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"moe": Experts(use), "out": nn.Linear(64, 64)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["out"](layer["moe"](x))
        return x


def by_bmm(m: Any, x: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x.expand(4, -1, -1), m.up).relu(), m.down).sum(0)


def one_by_one(m: Any, x: Tensor) -> Tensor:
    return sum(((x @ m.up[i]).relu() @ m.down[i] for i in range(4)), torch.zeros(()))


def stacked(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("etf,efd->td", torch.einsum("td,edf->etf", x, m.up).relu(), m.down)


def gathered(m: Any, x: Tensor) -> Tensor:
    ids = torch.tensor([2, 0])
    return torch.bmm(torch.bmm(x.expand(2, -1, -1), m.up[ids]).relu(), m.down[ids]).sum(0)


def cast_and_scaled(m: Any, x: Tensor) -> Tensor:
    up, down = (w.bfloat16() * 0.5 + w.mean() for w in (m.up, m.down))
    return torch.bmm(torch.bmm(x.bfloat16().expand(4, -1, -1), up).relu(), down).sum(0).float()


@pytest.mark.parametrize("use", [by_bmm, one_by_one, stacked, gathered, cast_and_scaled])
def test_experts_that_nobody_has_named_fail(use: Callable[[Any, Tensor], Tensor]) -> None:
    model = Layers(use)
    convert(model, skip_small=False)
    report = audit(model, X)
    assert report.fp8_share > 0 and not report.marked
    experts = [e for e in report.entries if e.module.endswith(".moe")]
    assert experts and not any(e.attention for e in experts)
    assert {e.weight.rpartition(".")[2] for e in experts} == {"up", "down"}
    said = complaint(report)
    assert "layers.*.moe (2)" in said
    assert str(report).endswith("\n" + said.partition("\n")[2])
    report.assert_fp8(["*.moe"])

    found = re.search(r"stacks=(\{.*\})", said)
    assert found is not None
    stacks = ast.literal_eval(found[1])
    assert stacks == {"layers.*.moe": ["up", "down"]}
    if use in (by_bmm, one_by_one):  # the other ways raise with FP8 weights, with a remedy
        convert(model, skip_small=False, stacks=stacks)
        audit(model, X).assert_fp8()


def test_experts_in_numbered_modules_are_named_one_by_one() -> None:
    """A pattern for them would match modules below, which have no stacks."""
    experts = nn.Sequential(*(Experts(by_bmm) for _ in range(2)))
    for module in experts:
        module.add_module("router", nn.Linear(64, 4))
    model = nn.Sequential(experts, nn.Linear(64, 64))
    convert(model, skip_small=False)
    found = re.search(r"stacks=(\{.*\})", complaint(audit(model, X)))
    assert found is not None
    convert(model, skip_small=False, stacks=ast.literal_eval(found[1]))
    audit(model, X).assert_fp8()


@pytest.mark.usefixtures("group")
def test_gathered_experts_of_ones_own_fail() -> None:
    """FSDP2 gathers them into other memory than that of their parameters."""
    model = Layers(by_bmm)
    convert(model, skip_small=False)
    for layer in model.layers:
        fully_shard([layer["moe"], layer["out"]])
    fully_shard(model)
    report = audit(model, X)
    assert {e.weight for e in report.entries if e.precision != "FP8"} == {
        f"layers.{i}.moe.{key}" for i in range(2) for key in ("up", "down")
    }
    assert "stacks={'layers.*.moe': ['up', 'down']}" in complaint(report)


class Other(nn.Module):
    """A linear layer in FP8, and ``use(module, x)``."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(64, 64, bias=False)
        self.use = use
        self.register_buffer("table", torch.randn(64, 64))
        self.register_buffer("frequencies", torch.randn(1, 16))
        convert(self, skip_small=False, **options)
        self.plain = nn.Linear(64, 64)
        self.queries = nn.Parameter(torch.randn(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.use(self, x)


FAILS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a linear that came later": (lambda m, x: m.plain(x), "plain "),
    "the same in checkpointing": (
        lambda m, x: checkpoint(m.plain, x, use_reentrant=False),
        "plain ",
    ),
    "a parameter": (lambda m, x: x @ m.queries.mT @ m.queries, "hold it in an nn.Linear"),
    "a buffer": (lambda m, x: x @ m.table, "reads the buffer table"),
    "no parameter": (lambda m, x: x @ torch.ones(64, 64), "reads no parameter"),
    "a master": (lambda m, x: F.linear(x, m.lin.weight.master), "reads the master of lin.weight"),
    "made of a weight": (lambda m, x: x @ m.lin.weight.repeat(2, 1)[:64], "of lin.weight"),
}


@pytest.mark.parametrize("case", FAILS)
def test_what_fails(case: str) -> None:
    use, text = FAILS[case]
    report = audit(Other(use), X)
    assert text in complaint(report)
    report.assert_fp8(["plain" if text == "plain " else "(model)"])


def attention(m: Any, x: Tensor) -> Tensor:
    q = x.view(1, 4, 2, 64)
    y = F.scaled_dot_product_attention(q, q, q) + (q @ q.mT) @ q
    return y.view(8, 64)


def positions(m: Any, x: Tensor) -> Tensor:
    return x + (torch.arange(8.0)[:, None] @ m.frequencies).repeat(1, 4).cos()


PASSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attention": attention,
    "positions by frequencies": positions,
    "learned queries": lambda m, x: x + m.lin(F.layer_norm(m.queries, (64,))),
    "an embedding of weights": lambda m, x: x + F.embedding(torch.arange(8), m.lin.weight.master),
}


@pytest.mark.parametrize("case", PASSES)
def test_what_passes(case: str) -> None:
    report = audit(Other(PASSES[case]), X)
    report.assert_fp8()
    assert not any(e.reason or e.remedy for e in report.entries)


def test_weight_gradients_in_high_precision_pass_by_recipe_alone() -> None:
    def projected(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.lin(x)
        y.register_hook(lambda grad: grad @ torch.eye(64))
        return y

    report = audit(Other(projected), X)
    assert "is a gradient of a matmul in FP8" in complaint(report)
    assert not any(e.note for e in report.entries)
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model, Recipe.accurate(), skip_small=False)
    report = audit(model, X)
    report.assert_fp8()
    assert [e.note for e in report.entries] == ["", "", "in high precision by recipe"]


def test_a_frozen_model_passes_with_a_forward_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model, skip_small=False)
    freeze(model)
    with torch.no_grad():
        audit(model, X).assert_fp8()


def test_ops_that_hide_matmuls_of_weights_fail() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))
    convert(model, skip_small=False)
    with torch.no_grad():
        report = audit(model, X)
    assert "mkldnn_rnn_layer.default in 1, reads 1.weight_hh_l0" in complaint(report)
    report.assert_fp8(["1"])
    activations = torch.randn(4, 8, 8)

    def step() -> None:
        model[0](X)
        torch.cond(X.sum() > 0, lambda x: x @ x.mT, torch.bmm, (activations,))

    audit_step(model, step).assert_fp8()


class Float8Linear(nn.Linear):
    """As torchao's: casts its weight with one scale."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 448 / self.weight.abs().max()
        w = (self.weight * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return F.linear(x, w, self.bias)


Float8Linear.__module__ = "torchao.float8.float8_linear"


def test_linears_that_another_library_took_over_fail() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert(model, skip_small=False)
    model[0].__class__ = Float8Linear
    report = audit(model, X)
    text = "is of a Float8Linear of torchao.float8.float8_linear, which casts its weight itself"
    assert {e.reason.partition(":")[0] for e in report.marked} == {text}
    assert [e.kind for e in report.marked] == ["forward", "backward", "backward"]
    assert text in complaint(report)
    first = convert(model, skip_small=False, dry_run=True).entries[0]
    assert not first.converted and "which casts its weight itself" in first.reason


def test_a_share_of_flops_may_be_enough() -> None:
    model = Model()
    convert(model, skip=["*.up"], skip_small=False)
    report = audit(model, TOKENS)
    share = report.fp8_share
    report.assert_fp8(fp8_share=share)
    with pytest.raises(AssertionError) as error:
        report.assert_fp8(fp8_share=share + 0.01)
    said = str(error.value)
    assert "blocks.*.up (2)" in said and "lm_head" in said and "convert_head=True" in said
    assert f"FP8 has {share:.1%} of FLOPs, and fp8_share asks for {share + 0.01:.1%}" in said
    # modules that may run in high precision do not count
    report.assert_fp8(["lm_head"], fp8_share=share + 0.01)
    report.assert_fp8(["lm_head", "*.up"], fp8_share=0.9)


def test_attention_counts_in_the_share() -> None:
    report = audit(Other(attention), X)
    report.assert_fp8()
    with pytest.raises(AssertionError, match=r"asks for 99\.0%.*attention scores"):
        report.assert_fp8(fp8_share=0.99)


@pytest.mark.parametrize("case", FAILS)
def test_marked_matmuls_fail_whatever_share_is_asked_for(case: str) -> None:
    use, text = FAILS[case]
    report = audit(Other(use), X)
    if report.marked:
        with pytest.raises(AssertionError, match=text):
            report.assert_fp8(fp8_share=0.01)
    else:
        report.assert_fp8(fp8_share=0.01)


class Adapted(nn.Module):
    """A linear layer with an adapter, all of whose matmuls carry the name of the layer."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size)
        convert(self, skip_small=False)
        self.lora_A = nn.Linear(size, rank, bias=False)
        self.lora_B = nn.Linear(rank, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + F.linear(F.linear(x, self.lora_A.weight), self.lora_B.weight)


def test_matmuls_as_thin_as_an_adapter_may_run_in_high_precision() -> None:
    x = randn(8, 256, dtype=torch.float32, grad=True)
    report = audit(Adapted(256, 127), x)
    assert {e.module for e in report.entries if e.precision != "FP8"} == {"(model)"}
    assert str(report).count("as thin as an adapter: leave it") == 2  # still shown
    report.assert_fp8()
    # they count in the share, and then explain it
    assert report.fp8_share == 256 / (256 + 2 * 127)
    report.assert_fp8(fp8_share=0.5)
    with pytest.raises(AssertionError, match=r"as thin as an adapter(?s:.)*asks for 51\.0%"):
        report.assert_fp8(fp8_share=0.51)


def test_wide_adapters_and_small_layers_fail() -> None:
    wide = audit(Adapted(256, 128), randn(8, 256, dtype=torch.float32, grad=True))
    assert "as thin as" not in complaint(wide)
    short = audit(Adapted(255, 8), randn(8, 255, dtype=torch.float32, grad=True))
    assert "convert(model, skip_small=False)" in complaint(short)


@pytest.mark.filterwarnings("ignore:no weight of this")
def test_a_share_needs_matmuls_in_fp8() -> None:
    report = audit(Model(), TOKENS)
    with pytest.raises(AssertionError, match="no matmul ran in FP8"):
        report.assert_fp8(fp8_share=0.01)
    with pytest.raises(AssertionError, match="no matmul ran in FP8"):
        report.assert_fp8(["*"], fp8_share=0.01)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (90, ValueError),
        (0, ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        ("0.9", TypeError),
    ],
)
def test_a_share_is_a_number_up_to_1(wrong: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^fp8_share=.*e\.g\. 0\.9"):
        audit(nn.ReLU(), X).assert_fp8(fp8_share=wrong)


def test_patterns_must_match_a_module_of_the_report() -> None:
    report = audit(Other(lambda m, x: x @ m.table), X)
    for names in (["lin", "palin"], ["palin"]):
        with pytest.raises(ValueError, match=r"^except_for pattern") as error:
            report.assert_fp8(names)
        assert str(error.value) == (
            "except_for pattern 'palin' matches no module that ran a matmul: expected a pattern of "
            "the names in this report or of modules above them; these names end in lin, (model)"
        )
    with pytest.raises(ValueError, match=r"whole names: '\*in\*' matches 1 of 2$"):
        report.assert_fp8(["in"])
    report.assert_fp8(["(model)"])  # a name that the message lists


def test_modules_of_hidden_matmuls_are_in_the_report() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))
    convert(model, skip_small=False)
    with torch.no_grad():
        report = audit(model, X)
    assert {e.module for e in report.entries} == {"0"}
    with pytest.raises(ValueError, match=r"names end in 0, 1$"):
        report.assert_fp8(["2"])


@pytest.mark.parametrize("wrong", ["lm_head", 3, [nn.Linear(2, 2)]])
def test_names_must_be_a_list(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^except_for.*e\.g\. \['lm_head'\]"):
        audit(nn.ReLU(), X).assert_fp8(wrong)


def test_adapters_of_peft_may_run_in_high_precision() -> None:
    """Whatever their rank, and in an order in which convert has seen them."""
    peft = pytest.importorskip("peft")
    model = Model(256).bfloat16()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=200, target_modules=["up"]))
    convert(adapted, skip_small=False)
    report = audit(adapted, TOKENS)
    assert sum(entry.remedy == "adapter of peft: leave it" for entry in report.entries) > 0
    report.assert_fp8(["*.lm_head"])
