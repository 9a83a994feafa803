"""Gated MLPs of experts: the bits of grouped linears with torch's ops between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd import plan
from blocktensor.overrides import dynamo
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.gated import EAGER, assert_bits, results
from tests.support.groups import GROUPS, ends
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, complaint, plain, randn

K, HIDDEN, N = 192, 320, 136
SQUARES = Recipe(wgrad_input="128x128")
HIGH = Recipe(wgrad_input="high_precision")

dynamo.announce()


def unfused(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, offs: Tensor, activation: str = "silu"
) -> Tensor:
    """What ``functional.gated_experts`` is to equal, as torchtitan writes it."""
    h = EAGER[activation](torch._grouped_mm(x, gate.transpose(1, 2), offs))
    h = h * torch._grouped_mm(x, up.transpose(1, 2), offs)
    return torch._grouped_mm(h, down.transpose(1, 2), offs)


def stacks(
    experts: int,
    recipe: Recipe = FP32_SCALES,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    frozen: tuple[int, ...] = (),
    transposed: bool = False,
) -> list[Any]:
    """gate, up and down in FP8; ``transposed``: stacks that lie as ``[E, K, N]``."""
    made = []
    for i, (n, k) in enumerate(((HIDDEN, K), (HIDDEN, K), (N, HIDDEN))):
        w = randn(experts, n, k, seed=i, dtype=dtype, device=device) / 14
        w = w.mT.contiguous() if transposed else w
        made.append(nn.Parameter(BlockwiseFP8Weight(w, recipe), i not in frozen))
    return made


def rows(
    groups: str, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """x, with NaN in the rows of no group, and offs."""
    count, sizes = GROUPS[groups]
    x = randn(count, K, dtype=dtype, device=device)
    x[sum(sizes) :] = float("nan")
    return x.requires_grad_(), ends(*sizes, device=device)


def both(
    x: Tensor, offs: Tensor, operands: list[Any], again: bool = False, **options: Any
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The results of the fused experts, and those that they are to equal."""
    activation = {k: v for k, v in options.items() if k == "activation"}
    fused = functools.partial(functional.gated_experts, offs=offs, **options)
    apart = functools.partial(unfused, offs=offs, **activation)
    return results(fused, x, operands, again), results(apart, x, operands, again)


@pytest.fixture(params=["large", "small"])
def way_of_casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Treat all gradients as large, or none."""
    if request.param == "large":
        monkeypatch.setattr(plan, "LARGE_BYTES", 0)
    monkeypatch.setattr("blocktensor.autograd.plan._PLANS._table", {})
    made: str = request.param
    return made


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", [FP32_SCALES, POWER_OF_TWO, SQUARES, HIGH])
@pytest.mark.parametrize("groups", GROUPS)
def test_bits(
    groups: str, recipe: Recipe, recompute: bool, device: torch.device, way_of_casts: str
) -> None:
    x, offs = rows(groups, device=device)
    got, want = both(x, offs, stacks(len(offs), recipe, device=device), recompute=recompute)
    assert_bits(got, want)
    used = sum(GROUPS[groups][1])
    assert got[0] is not None and got[1] is not None
    assert not got[0][used:].any() and not got[1][used:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", EAGER)
def test_activations_and_dtypes(activation: Any, dtype: torch.dtype, device: torch.device) -> None:
    x, offs = rows("ragged", dtype, device)
    operands = stacks(len(offs), dtype=dtype, device=device)
    assert_bits(*both(x, offs, operands, activation=activation))
    assert_bits(*both(x, offs, operands, again=True, activation=activation))


def test_stacks_that_lie_transposed() -> None:
    """As ``w.transpose(1, 2)`` of a parameter, whose gradient is computed as it lies."""
    x, offs = rows("ragged")
    operands = stacks(len(offs), transposed=True)

    def turned(run: Callable[..., Tensor], x: Tensor, *ws: Tensor) -> Tensor:
        return run(x, *(w.transpose(1, 2) for w in ws), offs=offs)

    got, want = (
        results(functools.partial(turned, run), x, operands)
        for run in (functional.gated_experts, unfused)
    )
    assert_bits(got, want)


def test_plain_stacks() -> None:
    x, offs = rows("ragged")
    operands = stacks(len(offs), Recipe())
    want = results(functools.partial(unfused, offs=offs), x, operands)
    leaves = [plain(w).requires_grad_() for w in operands]
    assert_bits(results(functools.partial(functional.gated_experts, offs=offs), x, leaves), want)


def test_rows_that_are_fp8_already() -> None:
    """As ``all_to_all_fp8`` returns them: rowwise alone."""
    x, offs = rows("whole blocks")
    operands = stacks(len(offs))
    fp8 = quantize(x.detach(), FP32_SCALES)
    alone = BlockwiseFP8Tensor(fp8.rowwise(), shape=x.shape, dtype=x.dtype, recipe=FP32_SCALES)
    got, want = (run(alone, *operands, offs=offs) for run in (functional.gated_experts, unfused))
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.float().sum(), operands) for y in (got, want)]
    assert_bits(*([*each] for each in grads))


def test_no_experts() -> None:
    x, offs = randn(9, K, grad=True), torch.empty(0, dtype=torch.int32)
    assert_bits(*both(x, offs, stacks(0)))


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved_and_cast(recompute: bool) -> None:
    x, offs = rows("ragged")
    operands, saved = stacks(len(offs)), []
    run = functools.partial(functional.gated_experts, offs=offs, recompute=recompute)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        Trace() as trace,
    ):
        y = run(x, *operands)
    high = [t.shape for t in saved if t.dtype == torch.bfloat16 and t.ndim == 2]
    assert high == [(270, HIDDEN)] * 2  # gate and up
    assert sum(t.dtype == torch.float8_e4m3fn for t in saved) == (1 if recompute else 2)
    assert trace.count("quantize_grouped") == trace.count("gated ") == 1
    with Trace() as trace:
        y.sum().backward()
    assert trace.count("quantize_grouped") == 1  # of the output's gradient
    assert trace.count("gated ") == (2 if recompute else 0)


@pytest.mark.parametrize("least", [2 * 270 * HIDDEN, 2 * 270 * HIDDEN + 1])
def test_large_gradients_are_made_one_after_the_other(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, offs = rows("ragged")
    y = functional.gated_experts(x, *stacks(len(offs)), offs)
    monkeypatch.setattr(plan, "LARGE_BYTES", least)
    with Trace() as trace:
        y.backward(randn(*y.shape))
    large = least == 2 * 270 * HIDDEN
    assert trace.ops.count("blocktensor.gated silu 1x128 1x128") == large
    assert trace.ops.count("blocktensor.gated_backward silu 1x128 1x128") == 1


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled(recompute: bool) -> None:
    x, offs = rows("ragged")
    operands = stacks(len(offs))
    want = results(functools.partial(unfused, offs=offs), x, operands)
    fused = functools.partial(functional.gated_experts, recompute=recompute)
    run = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_bits(results(functools.partial(run, offs=offs), x, operands), want)
    assert graphs() == 1


def test_bad_input() -> None:
    x, offs = rows("ragged")
    gate, up, down = stacks(len(offs))
    wide = nn.Parameter(BlockwiseFP8Weight(randn(len(offs), 64, K), FP32_SCALES))
    mixed = nn.Parameter(BlockwiseFP8Weight(plain(up), POWER_OF_TWO))
    run = functional.gated_experts
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: run(x, gate, wide, down, offs)),
        (ValueError, lambda: run(x, gate, up, down, offs[:2])),
        (ValueError, lambda: run(x[0], gate, up, down, offs)),
        (TypeError, lambda: run(x, gate, up, down, offs.long())),
        (ValueError, lambda: run(x, gate, up, down, offs, activation="tanh")),  # type: ignore
        (ValueError, lambda: run(x, gate, mixed, down, offs)),
        (TypeError, lambda: run(x.float(), gate, up, down, offs)),
        (ValueError, lambda: run(x, gate[0], up[0], down[0], offs)),
    ]
    messages = [complaint(kind, call) for kind, call in calls]
    assert_expected_inline(
        "\n\n".join(messages),
        """\
gate has 320 features and up 64: expected the same number

offs ends 2 groups, and the weight [5, 320, 192] is a stack of 5 experts: expected
one end for each

the input of a grouped FP8 linear has 1 dimensions, shape [192]: expected 2; flatten
tokens to [T, K]

offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)

activation 'tanh': expected one of silu, gelu, gelu_tanh, relu2

mixed recipes: weights of one gated MLP have scale='fp32' and 'power_of_two': give
them one recipe, or call functional.linear for each

the input is torch.float32 and the weight torch.bfloat16: convert one of them, or
run under torch.autocast

the weight of a grouped FP8 linear has 2 dimensions, shape [320, 192]: expected 3;
stacks of experts are [E, N, K]; a matrix needs functional.linear""",
    )
    assert x.grad is None and gate.grad is None
