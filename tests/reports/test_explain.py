"""Which backend runs each matmul, and why; and how one is forced."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import (
    BlockwiseFP8Weight,
    Recipe,
    audit_step,
    convert,
    explain,
    functional,
    to_blockwise_fp8_weights,
)
from blocktensor.ops import reference
from blocktensor.ops.gemm.choose_backend import GemmProblem, choose_gemm
from tests.support.backends import replace_op
from tests.support.models import RECIPES, Conv1D, Model, complaint, linear, randn

FORCE = "BLOCKTENSOR_GEMM"


@pytest.fixture(autouse=True)
def not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE, raising=False)


def test_shapes_and_why_faster_backends_were_passed_over() -> None:
    explained = explain([(4096, 2048, 1100), (1, 70, 130)], device="cpu")
    assert [(p.layer, p.kind, p.m, p.n, p.k) for p in explained.matmuls] == [
        ("4096x2048x1100", "fprop", 4096, 2048, 1100),
        ("4096x2048x1100", "dgrad", 4096, 1100, 2048),
        ("4096x2048x1100", "wgrad", 2048, 1100, 4096),
        ("1x70x130", "fprop", 1, 70, 130),
        ("1x70x130", "dgrad", 1, 130, 70),
        ("1x70x130", "wgrad", 70, 130, 1),
    ]
    for matmul in explained.matmuls:
        assert matmul.reason in str(explained)
        for part in ("runs on any device", "cublas", "triton", "needs a CUDA device, got 'cpu'"):
            assert part in matmul.reason


@pytest.mark.parametrize(
    ("choice", "backend", "reason"),
    [
        ("1x128", "reference", "x in 1x128 blocks"),
        ("128x128", "reference", "runs on any device"),
        ("high_precision", "torch", "bfloat16, by Recipe(wgrad_input='high_precision')"),
    ],
)
def test_what_weight_gradients_read(choice: Any, backend: str, reason: str) -> None:
    recipe, stack = Recipe(wgrad_input=choice), nn.Module()
    stack.w = nn.Parameter(BlockwiseFP8Weight(randn(3, 70, 130), recipe))
    of_shapes = explain([(10, 70, 130)], device="cpu", recipe=recipe)
    of_model = explain(nn.Sequential(linear(70, 130, recipe=recipe)), tokens=10)
    for explained in (of_shapes, of_model, explain(stack, tokens=10)):
        *others, wgrad = explained.matmuls
        assert (wgrad.kind, wgrad.m, wgrad.n, wgrad.k) == ("wgrad", 70, 130, 10)
        assert all(p.reason.startswith("runs on any device") for p in others)
        assert (wgrad.backend, wgrad.reason.split("; ")[0]) == (backend, reason)
    told = [[(p.kind, p.backend, p.reason) for p in e.matmuls] for e in (of_shapes, of_model)]
    assert told[0] == told[1]


def test_the_matmuls_are_those_that_run() -> None:
    """Same sizes, in the same order, as the GEMMs of a forward and a backward."""
    module = nn.Sequential(linear(70, 130, bias=True))
    x = randn(2, 8, 130, grad=True)
    ran = audit_step(module, lambda: module(x).sum().backward()).entries
    explained = explain(module, tokens=16).matmuls
    assert [(p.kind, p.m, p.n, p.k) for p in explained] == [(e.kind, e.m, e.n, e.k) for e in ran]
    assert [p.kind for p in explained] == ["fprop", "dgrad", "wgrad"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_the_problems_are_those_of_the_matmuls(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GemmProblem] = []

    def choose(problem: GemmProblem) -> Any:
        asked.append(problem)
        return choose_gemm(problem)

    monkeypatch.setattr(sys.modules["blocktensor.reports.explain"], "choose_gemm", choose)
    cpu, act, weight = torch.device("cpu"), torch.bfloat16, torch.float32
    rows, squares, of_grad = recipe.activation_format, recipe.weight_format, recipe.gradient_format
    squares_of_x = recipe.wgrad_input_format
    model = nn.Sequential(
        linear(70, 130, recipe=recipe, dtype=weight, bias=True),
        linear(130, 70, recipe=recipe, dtype=weight, frozen=True),
    )
    explain(model, tokens=10)
    explain([(10, 70, 130)], dtype=torch.float16, device="cpu", recipe=recipe)
    assert asked == [
        GemmProblem(10, 70, 130, rows, squares, act, cpu, bias=act),
        GemmProblem(10, 130, 70, of_grad, squares, act, cpu),
        GemmProblem(70, 130, 64, of_grad, squares_of_x, weight, cpu),  # tokens in a step of 64
        GemmProblem(10, 130, 70, rows, squares, act, cpu),
        GemmProblem(10, 70, 130, of_grad, squares, act, cpu),
        GemmProblem(10, 70, 130, rows, squares, torch.float16, cpu),
        GemmProblem(10, 130, 70, of_grad, squares, torch.float16, cpu),
        GemmProblem(70, 130, 64, of_grad, squares_of_x, torch.float16, cpu),
    ]


def test_layers_alike_are_one_line() -> None:
    def layer() -> nn.ModuleDict:
        attention = {"q": nn.Linear(2048, 2048), "k": nn.Linear(2048, 512)}
        mlp = {"gate": nn.Linear(2048, 2048), "up": Conv1D(2048, 2048)}
        return nn.ModuleDict({"attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)})

    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(2))})
    explained = explain(model.apply(to_blockwise_fp8_weights))
    table = str(explained).splitlines()[2:]
    assert table[0].split("  ")[0] == "layers.*.{attn.q, mlp.{gate, up}} (6)"
    assert [line.split("  ")[0] for line in table[3:]] == ["layers.*.attn.k (2)"] * 3
    assert explained.backends == ("reference",)  # as for its device


def test_only_fp8_linears_have_matmuls() -> None:
    model = Model(tied=True).apply(to_blockwise_fp8_weights)
    assert isinstance(model.embed.weight, BlockwiseFP8Weight)
    assert "embed" not in {p.layer for p in explain(model).matmuls}
    assert "(model)" in str(explain(linear(70, 130)))
    explained = explain(Model())
    wanted = "no FP8 layers: convert the model first with blocktensor.convert(model)"
    assert str(explained) == wanted
    assert explained.matmuls == explain([]).matmuls == ()


def test_forcing_the_reference_shows_and_holds(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv(FORCE, "reference")
    explained = explain([(128, 256, 384)], device=device)
    assert {(p.backend, p.reason) for p in explained.matmuls} == {
        ("reference", "forced by BLOCKTENSOR_GEMM")
    }
    calls: list[int] = []
    original = reference.gemm
    replace_op(monkeypatch, "gemm", lambda *args: calls.append(1) or original(*args))
    functional.linear(randn(4, 256, device=device), randn(128, 256, device=device))
    assert calls == [1]


@pytest.mark.parametrize(
    "run",
    [
        lambda: explain([(128, 256, 384)], device="cpu"),
        lambda: explain(nn.Sequential(linear(256, 384)), tokens=128),
        lambda: functional.linear(randn(128, 384), randn(256, 384)),
        lambda: linear(256, 384)(randn(128, 384)),
    ],
)
def test_an_unusable_backend_is_an_error_wherever_it_is_chosen(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, "nonsense")
    text = complaint(ValueError, run)
    assert text.startswith("BLOCKTENSOR_GEMM=nonsense: ")
    assert "reference" in text


def test_bad_shapes() -> None:
    for shape in ((128, 256), 128.0, (-1, 128, 128), (128, 1.5, 128), (128, 128, True), "128"):
        with pytest.raises(
            ValueError, match=re.escape(f"shape {shape!r}: expected (M tokens, N out")
        ):
            explain([shape])
    with pytest.raises(TypeError, match=r"a list of shapes \(M, N, K\): got a str"):
        explain("128x128x128")


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "8", None])
def test_bad_numbers_of_tokens(tokens: Any) -> None:
    model = nn.Sequential(linear(128, 128))
    with pytest.raises((TypeError, ValueError), match=f"^tokens={tokens!r}.*: expected"):
        explain(model, tokens=tokens)
    assert explain(model, tokens=0).matmuls[0].m == 0
    assert explain(model, tokens=np.int64(8)).matmuls[0].m == 8


def test_a_plan_without_a_gpu() -> None:
    sizes = {"q": (2048, 2048), "up": (8192, 2048), "down": (2048, 8192)}
    with torch.device("meta"):
        layers = [
            nn.ModuleDict({name: nn.Linear(k, n) for name, (n, k) in sizes.items()})
            for _ in range(2)
        ]
        layers[1]["experts"] = Experts(4, 512, 256)
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)}).bfloat16()
    convert(model, skip_small=False, stacks={"*.experts": ["w1"]})
    model["layers"][1]["q"].requires_grad_(False)
    assert_expected_inline(
        str(explain(model, tokens=4096, device="H100")),
        """\
layer                matmul  M x N x K                     backend  why
-------------------  ------  ----------------------------  -------  -------------------------------
layers.*.q (2)       fprop   4096 x 2048 x 2048            gluon    256x128 tiles, predicted 30 us
layers.*.q (2)       dgrad   4096 x 2048 x 2048            gluon    256x128 tiles, predicted 30 us
layers.0.q           wgrad   2048 x 2048 x 4096            gluon    256x128 tiles, predicted 24 us
layers.*.up (2)      fprop   4096 x 8192 x 2048            gluon    256x128 tiles, predicted 120 us
layers.*.up (2)      dgrad   4096 x 2048 x 8192            gluon    256x128 tiles, predicted 108 us
layers.*.up (2)      wgrad   8192 x 2048 x 4096            gluon    256x128 tiles, predicted 112 us
layers.*.down (2)    fprop   4096 x 2048 x 8192            gluon    256x128 tiles, predicted 108 us
layers.*.down (2)    dgrad   4096 x 8192 x 2048            gluon    256x128 tiles, predicted 120 us
layers.*.down (2)    wgrad   2048 x 8192 x 4096            gluon    256x128 tiles, predicted 112 us
layers.1.experts.w1  fprop   4096 x 512 x 256 in 4 groups  gluon    64x128 tiles
layers.1.experts.w1  dgrad   4096 x 256 x 512 in 4 groups  gluon    128x128 tiles
layers.1.experts.w1  wgrad   512 x 256 x 4096 in 4 groups  gluon    128x128 tiles

predicted, forward + backward  bf16, us  FP8, us  in CUDA graphs  eager
-----------------------------  --------  -------  --------------  -----
layers.0.q                     148       128      1.16x           0.88x
layers.*.{up, down} (4)        584       443      1.32x           1.32x
layers.1.q                     99        85       1.17x           0.88x
linear layers alone            2582      1983     1.30x           1.30x
whole steps, with attention, the loss and the optimizer: blocktensor.plan
fast path: as on an H100 that has it""",
    )
    assert explain(model, tokens=4096).layers == ()
    stacks = {"*.experts": ["w1"]}
    convert(model, Recipe(wgrad_input="high_precision"), skip_small=False, stacks=stacks)
    wgrads = [p for p in explain(model, device="H100").matmuls if p.kind == "wgrad"]
    assert [p.us and round(p.us) for p in wgrads] == [49, 195, 195, 195, 195, None]


class Experts(nn.Module):
    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, n, k))


def test_unknown_devices() -> None:
    wanted = "device='B200': expected a device of torch, or 'H100' or 'H200'"
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        explain([(128, 128, 128)], device="B200")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64, torch.float8_e4m3fn, None])
def test_a_dtype_of_activations(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtype=.*: expected one of torch\.bfloat16"):
        explain([(64, 256, 256)], dtype=dtype)
