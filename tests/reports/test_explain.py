"""Which backend runs each product, and why; and how one is forced."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import (
    BlockwiseFP8Weight,
    Recipe,
    convert,
    explain,
    functional,
    to_blockwise_fp8_weights,
)
from blocktensor.ops import reference
from blocktensor.ops.gemm.choose_backend import GemmProblem, choose_gemm, usable_gemm_backends
from blocktensor.reports import Explanation
from tests.support.conv1d import Conv1D
from tests.support.models import RECIPES, Model, Trace, complaint, linear, randn
from tests.support.reference_ops import replace_op

FORCE = "BLOCKTENSOR_GEMM"


@pytest.fixture(autouse=True)
def not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE, raising=False)


def narrow(explained: Explanation) -> str:
    """The table up to the reasons, which differ with the backends there are."""
    lines = str(explained).splitlines()
    return "\n".join(line[: lines[0].index("why")].rstrip() for line in lines)


def test_a_model() -> None:
    model = Model()
    model.blocks[1].up.requires_grad_(False)
    convert(model, skip_small=False)
    explained = explain(model, tokens=12)
    assert_expected_inline(
        narrow(explained),
        """\
layer              product  M x N x K      backend
-----------------  -------  -------------  ---------
blocks.*.up (2)    fprop    12 x 192 x 64  reference
blocks.*.up (2)    dgrad    12 x 64 x 192  reference
blocks.0.up        wgrad    192 x 64 x 12  reference
blocks.*.down (2)  fprop    12 x 64 x 192  reference
blocks.*.down (2)  dgrad    12 x 192 x 64  reference
blocks.*.down (2)  wgrad    64 x 192 x 12  reference""",
    )
    assert explained.backends == ("reference",)


def test_shapes() -> None:
    explained = explain([(4096, 2048, 1100), (1, 70, 130)], device="cpu")
    assert_expected_inline(
        narrow(explained),
        """\
layer           product  M x N x K           backend
--------------  -------  ------------------  ---------
4096x2048x1100  fprop    4096 x 2048 x 1100  reference
4096x2048x1100  dgrad    4096 x 1100 x 2048  reference
4096x2048x1100  wgrad    2048 x 1100 x 4096  reference
1x70x130        fprop    1 x 70 x 130        reference
1x70x130        dgrad    1 x 130 x 70        reference
1x70x130        wgrad    70 x 130 x 1        reference""",
    )


@pytest.mark.parametrize("experts", [False, True])
def test_what_weight_gradients_read(experts: bool) -> None:
    """Where it is not the default."""
    seen = {}
    for choice in ("1x128", "128x128", "high_precision"):
        recipe = Recipe(wgrad_input=choice)  # type: ignore[arg-type]
        if experts:
            model = nn.Module()
            model.w = nn.Parameter(BlockwiseFP8Weight(randn(3, 70, 130), recipe))
            *others, wgrad = explain(model, tokens=10).products
        else:
            *others, wgrad = explain([(10, 70, 130)], device="cpu", recipe=recipe).products
            of_model = explain(nn.Sequential(linear(70, 130, recipe=recipe)), tokens=10).products
            assert [(p.kind, p.backend, p.reason) for p in of_model] == [
                (p.kind, p.backend, p.reason) for p in (*others, wgrad)
            ]
        assert (wgrad.kind, wgrad.m, wgrad.n, wgrad.k) == ("wgrad", 70, 130, 10)
        assert all(p.reason.startswith("runs on any device") for p in others)
        seen[choice] = wgrad.backend, wgrad.reason.split("; ")[0]
    assert seen == {
        "1x128": ("reference", "runs on any device"),
        "128x128": ("reference", "x in 128x128 blocks"),
        "high_precision": ("torch", "bfloat16, by Recipe(wgrad_input='high_precision')"),
    }


def test_the_reason_says_why_faster_backends_were_passed_over() -> None:
    explained = explain([(4096, 2048, 1100)], device="cpu")
    for product in explained.products:
        assert product.reason in str(explained)
        for part in ("runs on any device", "cublas", "triton", "needs a CUDA device, got 'cpu'"):
            assert part in product.reason


def test_the_products_are_those_that_run() -> None:
    """Same sizes, in the same order, as the GEMMs of a forward and a backward."""

    class Shapes(Trace):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "blocktensor.gemm" in str(func):
                a, _, _, b, *_ = args
                self.ops.append((a.shape[0], b.shape[0], a.shape[1]))
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    module = linear(70, 130, bias=True)
    with Shapes() as trace:
        module(randn(2, 8, 130, grad=True)).sum().backward()
    ran = [op for op in trace.ops if isinstance(op, tuple)]
    assert [(p.m, p.n, p.k) for p in explain(nn.Sequential(module), tokens=16).products] == ran
    assert [p.kind for p in explain([(10, 70, 130)]).products] == ["fprop", "dgrad", "wgrad"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_the_problems_are_those_of_the_products(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GemmProblem] = []

    def choose(problem: GemmProblem) -> Any:
        asked.append(problem)
        return choose_gemm(problem)

    monkeypatch.setattr(sys.modules["blocktensor.reports.explain"], "choose_gemm", choose)
    cpu, act, weight = torch.device("cpu"), torch.bfloat16, torch.float32
    rows, squares = recipe.activation_format, recipe.weight_format
    model = nn.Sequential(
        linear(70, 130, recipe=recipe, dtype=weight, bias=True),
        linear(130, 70, recipe=recipe, dtype=weight, frozen=True),
    )
    explain(model, tokens=10)
    assert asked == [
        GemmProblem(10, 70, 130, rows, squares, act, cpu, bias=act),
        GemmProblem(10, 130, 70, rows, squares, act, cpu),
        GemmProblem(70, 130, 16, rows, rows, weight, cpu),  # tokens in whole vectors
        GemmProblem(10, 130, 70, rows, squares, act, cpu),
        GemmProblem(10, 70, 130, rows, squares, act, cpu),
    ]
    asked.clear()
    explain([(10, 70, 130)], dtype=torch.float16, device="cpu")
    rows, squares = Recipe().activation_format, Recipe().weight_format
    assert asked == [
        GemmProblem(10, 70, 130, rows, squares, torch.float16, cpu),
        GemmProblem(10, 130, 70, rows, squares, torch.float16, cpu),
        GemmProblem(70, 130, 16, rows, rows, torch.float16, cpu),
    ]


def test_layers_alike_are_one_line() -> None:
    with torch.device("meta"):
        layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": nn.ModuleDict(
                        {name: nn.Linear(2048, n) for name, n in (("q", 2048), ("k", 512))}
                    ),
                    "mlp": nn.ModuleDict({"gate": nn.Linear(2048, 2048), "up": Conv1D(2048, 2048)}),
                }
            )
            for _ in range(2)
        )
    layers.apply(to_blockwise_fp8_weights)
    assert_expected_inline(
        narrow(explain(nn.ModuleDict({"layers": layers}))),
        """\
layer                                         product  M x N x K           backend
--------------------------------------------  -------  ------------------  ---------
layers.*.attn.q, layers.*.mlp.{gate, up} (6)  fprop    4096 x 2048 x 2048  reference
layers.*.attn.q, layers.*.mlp.{gate, up} (6)  dgrad    4096 x 2048 x 2048  reference
layers.*.attn.q, layers.*.mlp.{gate, up} (6)  wgrad    2048 x 2048 x 4096  reference
layers.*.attn.k (2)                           fprop    4096 x 512 x 2048   reference
layers.*.attn.k (2)                           dgrad    4096 x 2048 x 512   reference
layers.*.attn.k (2)                           wgrad    512 x 2048 x 4096   reference""",
    )


def test_only_linears_have_products() -> None:
    model = Model(tied=True).apply(to_blockwise_fp8_weights)
    assert isinstance(model.embed.weight, BlockwiseFP8Weight)
    assert "embed" not in {p.layer for p in explain(model).products}
    assert "(model)" in str(explain(linear(70, 130)))


def test_a_model_without_fp8_layers() -> None:
    assert_expected_inline(
        str(explain(Model())),
        """no FP8 layers: convert the model first with blocktensor.convert(model)""",
    )
    assert explain(Model()).products == explain([]).products == ()


def test_forcing_the_reference_shows_and_holds(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv(FORCE, "reference")
    explained = explain([(128, 256, 384)], device=device)
    assert {(p.backend, p.reason) for p in explained.products} == {
        ("reference", "forced by BLOCKTENSOR_GEMM")
    }
    calls: list[int] = []
    original = reference.gemm
    replace_op(monkeypatch, "gemm", lambda *args: calls.append(1) or original(*args))
    functional.linear(randn(4, 256, device=device), randn(128, 256, device=device))
    assert calls == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cublas"])
def test_forcing_a_gpu_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in usable_gemm_backends(torch.device("cuda", 0)):
        pytest.skip(f"{name} does not run here")
    x, w = randn(128, 256, device="cuda"), randn(384, 256, seed=1, device="cuda")
    chosen = functional.linear(x, w)
    monkeypatch.setenv(FORCE, name)
    assert explain([(128, 384, 256)], device="cuda").backends == (name,)
    error = (functional.linear(x, w).double() - chosen.double()).norm()
    assert error <= 4e-3 * chosen.double().norm()


@pytest.mark.parametrize(
    "run",
    [
        lambda: explain([(128, 256, 384)], device="cpu"),
        lambda: explain(nn.Sequential(linear(256, 384)), tokens=128),
        lambda: functional.linear(randn(128, 384), randn(256, 384)),
        lambda: linear(256, 384)(randn(128, 384)),
    ],
)
def test_an_unusable_backend_is_an_error_that_lists_the_usable(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, "nonsense")
    text = complaint(ValueError, run)
    assert text.startswith("BLOCKTENSOR_GEMM=nonsense: ")
    assert "reference" in text


def test_the_text_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(name: str) -> str:
        monkeypatch.setenv(FORCE, name)
        return complaint(ValueError, lambda: explain([(128, 256, 384)], device="cpu"))

    assert_expected_inline(
        text("nonsense"),
        """\
BLOCKTENSOR_GEMM=nonsense: no backend of this name. Usable here for M=128, N=256,
K=384: reference. Unset BLOCKTENSOR_GEMM to let blocktensor choose.""",
    )
    assert_expected_inline(
        text("triton"),
        """\
BLOCKTENSOR_GEMM=triton: needs a CUDA device, got 'cpu'. Usable here for M=128,
N=256, K=384: reference. Unset BLOCKTENSOR_GEMM to let blocktensor choose.""",
    )


def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, "")
    assert explain([(128, 256, 384)], device="cpu").backends == ("reference",)


def test_bad_shapes() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: explain([(128, 256)])),
        """shape (128, 256): expected (M tokens, N out, K in)""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: explain([128.0, 256.0])),
        """shape 128.0: expected (M tokens, N out, K in)""",
    )


def test_a_meta_model_is_explained_for_its_device() -> None:
    with torch.device("meta"):
        model = Model().apply(to_blockwise_fp8_weights)
    assert explain(model).backends == ("reference",)
