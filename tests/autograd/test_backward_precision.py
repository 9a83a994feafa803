"""``Recipe(backward=...)``: a forward in FP8, and gradients in high precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Weight,
    Recipe,
    audit_step,
    convert,
    explain,
    freeze,
    functional,
    fuse,
    quantize,
)
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from tests.support.models import randn
from tests.support.outliers import KINDS
from tests.support.sqnr import rows_on_the_page, sqnr

MASTERS = Recipe(backward="high_precision")
VALUES = Recipe(backward="dequantized")
every_recipe = pytest.mark.parametrize("recipe", [MASTERS, VALUES], ids=lambda r: r.backward)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def read(x: Tensor, recipe: Recipe, is_weight: bool = False) -> Tensor:
    """The values that backward reads of an operand."""
    if recipe.backward == "high_precision":
        return x.detach()
    format = BLOCKS_128X128 if is_weight else BLOCKS_1X128
    return reference.dequantize(reference.quantize_rowwise(x.detach(), format), x.dtype)


def gradients(y: Tensor, *operands: Any) -> list[Tensor]:
    return list(torch.autograd.grad(y, operands, randn(*y.shape, dtype=y.dtype, seed=9)))


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of sums in the rounded outputs."""
    scale = float(b.abs().max()) if b.numel() else 0.0
    steps = 16 if b.dtype == torch.float32 else 1
    return torch.allclose(a, b, rtol=0, atol=scale * steps * torch.finfo(b.dtype).eps)


@every_recipe
@every_dtype
@pytest.mark.parametrize("shape", [(5, 200, 160), (129, 127, 576), (1, 1, 1), (0, 64, 32)], ids=str)
def test_gradients_are_those_of_the_operands_that_it_reads(
    shape: tuple[int, int, int], dtype: torch.dtype, recipe: Recipe
) -> None:
    m, n, k = shape
    x, w = randn(m, k, dtype=dtype, grad=True), randn(n, k, dtype=dtype, seed=1)
    weight = nn.Parameter(BlockwiseFP8Weight(w.clone(), recipe))
    bias = randn(n, dtype=dtype, seed=2, grad=True)
    y = F.linear(x, weight, bias)
    assert torch.equal(y, functional.linear(x, w, bias, recipe=Recipe()))
    dx, dw, db = gradients(y, x, weight, bias)
    x_plain, w_plain = (read(t, recipe, i == 1).requires_grad_() for i, t in enumerate((x, w)))
    b_plain = bias.detach().requires_grad_()
    want = gradients(F.linear(x_plain, w_plain, b_plain), x_plain, w_plain, b_plain)
    for got, wanted in zip((dx, dw), want[:2], strict=True):
        assert got.dtype == dtype and close(got, wanted)
    assert torch.allclose(db.float(), want[2].float(), rtol=2e-2, atol=1e-2)
    plain = w.clone().requires_grad_()
    of_plain = gradients(functional.linear(x, plain, bias, recipe=recipe), x, plain)
    assert torch.equal(of_plain[0], dx) and torch.equal(of_plain[1], dw)


@every_recipe
@pytest.mark.parametrize("is_kn", [False, True])
def test_experts(recipe: Recipe, is_kn: bool) -> None:
    """Groups of 0 and of any sizes; rows of no group, with NaN, change nothing."""
    dtype, ends = torch.float32, [3, 3, 40, 41]
    x, w = randn(50, 136, dtype=dtype), randn(4, 72, 136, dtype=dtype, seed=1)
    offs = torch.tensor(ends, dtype=torch.int32)
    stored = w.mT.contiguous() if is_kn else w.clone()
    weight = nn.Parameter(BlockwiseFP8Weight(stored, recipe))
    x[ends[-1] :] = torch.nan
    x.requires_grad_()
    y = functional.grouped_linear(x, weight.mT if is_kn else weight, offs)
    grad = randn(*y.shape, dtype=dtype, seed=9)
    grad[ends[-1] :] = torch.nan
    dx, dw = torch.autograd.grad(y, (x, weight), grad)
    dw = dw.mT if is_kn else dw
    assert not dx[ends[-1] :].any()
    begin = 0
    for e, end in enumerate(ends):
        rows = slice(begin, end)
        assert close(dx[rows], grad[rows] @ read(w[e], recipe, True))
        assert close(dw[e], grad[rows].t() @ read(x[rows], recipe))
        begin = end


@pytest.mark.parametrize(
    "recipe", [MASTERS, VALUES, Recipe(wgrad_input="dequantized")], ids=lambda r: r.backward
)
def test_compiled_checkpointed_and_retained_have_the_bits_of_eager(recipe: Recipe) -> None:
    from torch.utils.checkpoint import checkpoint

    weight = nn.Parameter(BlockwiseFP8Weight(randn(200, 160), recipe))
    stack = nn.Parameter(BlockwiseFP8Weight(randn(2, 200, 160), recipe))
    offs = torch.tensor([3, 9], dtype=torch.int32)

    # an input for each: compilers add the second gradient before the first is rounded
    def step(x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, weight).float() + functional.grouped_linear(other, stack, offs).float()

    def inputs() -> tuple[Tensor, Tensor]:
        return randn(9, 160, grad=True), randn(9, 160, grad=True)

    def made(run: Any) -> list[Tensor]:
        given = inputs()
        return gradients(run(*given), *given, weight, stack)

    wanted = made(step)
    checkpointed = made(lambda *given: checkpoint(step, *given, use_reentrant=False))
    compiled = made(torch.compile(step, backend="aot_eager", fullgraph=True))
    for others in (checkpointed, compiled):
        for a, b in zip(others, wanted, strict=True):
            assert torch.equal(a, b)
    given = inputs()
    y = step(*given)
    for _ in range(2):
        grad = randn(*y.shape, dtype=y.dtype, seed=9)
        again = torch.autograd.grad(y, (*given, weight, stack), grad, retain_graph=True)
        for a, b in zip(again, wanted, strict=True):
            assert torch.equal(a, b)


def test_wgrad_of_dequantized_inputs_alone() -> None:
    """Data gradients have the bits of the default."""
    x, w = randn(130, 160, grad=True), randn(72, 160, seed=1)
    made = [
        gradients(F.linear(x, weight), x, weight)
        for recipe in (Recipe(), Recipe(wgrad_input="dequantized"), VALUES)
        for weight in [nn.Parameter(BlockwiseFP8Weight(w.clone(), recipe))]
    ]
    assert torch.equal(made[0][0], made[1][0]) and not torch.equal(made[0][0], made[2][0])
    assert torch.equal(made[1][1], made[2][1]) and not torch.equal(made[0][1], made[1][1])


@every_recipe
def test_saved_bytes(recipe: Recipe) -> None:
    x = randn(512, 256, grad=True)
    weight = nn.Parameter(BlockwiseFP8Weight(randn(128, 256), recipe))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear(x, weight)
    of_x = [t for t in saved if type(t) is Tensor]
    size = sum(t.nbytes for t in of_x) / x.numel()
    assert size == (2 if recipe is MASTERS else pytest.approx(1 + 4 / 128))


@every_recipe
def test_fp8_inputs_and_frozen_weights(recipe: Recipe) -> None:
    x, w = randn(9, 160, grad=True), randn(72, 160, seed=1)
    weight = nn.Parameter(BlockwiseFP8Weight(w.clone(), recipe))
    wanted = gradients(F.linear(x, weight), x, weight)
    cast = quantize(x, recipe)
    assert (cast.source is None) == (recipe is VALUES)
    made = gradients(F.linear(cast, weight), x, weight)
    for a, b in zip(made, wanted, strict=True):
        assert torch.equal(a, b)
    model = nn.Sequential(nn.Linear(160, 72, bias=False, dtype=torch.bfloat16))
    model[0].weight.data.copy_(w)
    convert(model, recipe, skip_small=False)
    freeze(model)
    (dx,) = gradients(model(x), x)
    (of_values,) = gradients(F.linear(x, read(w, VALUES, True)), x)
    assert torch.equal(dx, of_values)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (in_graph,) = gradients(compiled(x), x)
    assert torch.equal(in_graph, dx)


@every_recipe
def test_under_autocast(recipe: Recipe) -> None:
    """fp32 masters; matmuls and gradients of activations in bf16, as torch's own."""
    x = randn(9, 160, dtype=torch.float32, grad=True)
    w = randn(72, 160, dtype=torch.float32, seed=1)
    weight = nn.Parameter(BlockwiseFP8Weight(w.clone(), recipe))
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight)
        dx, dw = gradients(y, x, weight)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    values = read(w, recipe, True).bfloat16()
    grad = randn(*y.shape, dtype=y.dtype, seed=9)
    assert torch.equal(dx, (grad @ values).float())


@every_recipe
def test_a_changed_weight_raises(recipe: Recipe) -> None:
    weight = nn.Parameter(BlockwiseFP8Weight(randn(72, 160), recipe))
    x = randn(9, 160, grad=True)
    y = F.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in"):
        y.sum().backward()
    y = F.linear(x, weight)
    wanted = gradients(F.linear(x, weight), x)
    weight.data = weight.data * 2  # not counted: backward reads the old values
    assert torch.equal(gradients(y, x)[0], wanted[0])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, n, k in (("gate_proj", 256, 128), ("up_proj", 256, 128), ("down_proj", 128, 256)):
            setattr(self, name, nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@every_recipe
def test_gated_mlps_run_one_by_one(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp())
    convert(model, recipe, skip_small=False)
    x = randn(9, 128, grad=True)
    params = list(model.parameters())
    wanted = gradients(model(x), x, *params)
    mlp: Any = model[0]
    y = functional.gated_mlp(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    for a, b in zip(gradients(y, x, *params), wanted, strict=True):
        assert torch.equal(a, b)
    report = fuse(model)
    assert f"backward={recipe.backward!r}" in str(report)
    for a, b in zip(gradients(model(x), x, *params), wanted, strict=True):
        assert torch.equal(a, b)


@every_recipe
def test_the_loss_of_logits_is_refused(recipe: Recipe) -> None:
    weight = nn.Parameter(BlockwiseFP8Weight(randn(72, 160), recipe))
    target = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"compute F\.cross_entropy\(F\.linear"):
        functional.linear_cross_entropy(randn(9, 160, grad=True), weight, target)


@every_recipe
def test_reports(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(256, 128, bias=False, dtype=torch.bfloat16))
    convert(model, recipe, skip_small=False)
    x = randn(64, 256, grad=True)
    report = audit_step(model, lambda: model(x).sum().backward())
    assert [(e.kind, e.precision) for e in report.entries] == [
        ("fprop", "FP8"),
        ("dgrad", "bf16"),
        ("wgrad", "bf16"),
    ]
    assert not report.marked
    matmuls = explain([(64, 128, 256)], recipe=recipe, device="H200").matmuls
    for each in matmuls[1:]:
        assert each.backend == "torch"
        assert each.reason == f"bfloat16, by Recipe(backward={recipe.backward!r})"


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_on_the_page(kind: str, device: torch.device) -> None:
    made = [sqnr(kind, recipe, device) for recipe in (Recipe(), VALUES, MASTERS)]
    shown = rows_on_the_page("| operands | dx | dw |")
    assert shown.keys() == KINDS.keys()
    for wanted, name in zip(shown[kind], ("dx", "dw"), strict=True):
        assert wanted == pytest.approx([each[name] for each in made], abs=0.1)


def test_recipes() -> None:
    assert Recipe(backward="high_precision", wgrad_input="high_precision") == MASTERS
    assert VALUES.wgrad_input == "dequantized"
    with pytest.raises(ValueError, match="leave wgrad_input out"):
        Recipe(backward="dequantized", wgrad_input="1x128")
    with pytest.raises(ValueError, match="expected one of 'fp8', 'high_precision', 'dequantized'"):
        Recipe(backward="bf16")  # type: ignore[arg-type]
