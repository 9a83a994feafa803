"""Matmuls of an audit: shapes and FLOPs of every op, tables, notes on weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from blocktensor import BlockwiseFP8Weight, Recipe, audit, audit_step, convert, functional
from blocktensor.reports import AuditReport
from blocktensor.reports.audit_matmuls import Matmul, hides_matmuls, matmul_of
from blocktensor.reports.audit_report import AuditedMatmul
from tests.support.models import randn

aten = torch.ops.aten
A, B, V = torch.ones(3, 5), torch.ones(5, 7), torch.ones(5)
BATCH, BATCHED = torch.ones(2, 3, 5), torch.ones(2, 5, 7)
ROWS, STACK = torch.ones(32, 16).bfloat16(), torch.ones(2, 16, 8).bfloat16()
OFFS = torch.tensor([8, 32], dtype=torch.int32)


class Found(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.matmuls: list[Matmul] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        matmul = matmul_of(func, args, kwargs or {}, out)
        self.matmuls += [matmul] if matmul else []
        return out


def found(run: Callable[[], Any]) -> list[tuple[int, ...]]:
    """Batch, M, N, K of each matmul of ``run()``, whose FLOPs are 2 for each of them."""
    with Found() as mode:
        run()
    for p in mode.matmuls:
        assert p.is_attention or p.flops == 2 * p.batch * p.m * p.n * p.k
    return [p[:4] for p in mode.matmuls]


MATRICES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mm": (lambda: torch.mm(A, B), (1, 3, 7, 5)),
    "mm out": (lambda: torch.mm(A, B, out=torch.empty(3, 7)), (1, 3, 7, 5)),
    "addmm": (lambda: torch.addmm(torch.ones(7), A, B), (1, 3, 7, 5)),
    "addmm_": (lambda: torch.ones(3, 7).addmm_(A, B), (1, 3, 7, 5)),
    "bmm": (lambda: torch.bmm(BATCH, BATCHED), (2, 3, 7, 5)),
    "baddbmm": (lambda: torch.baddbmm(torch.ones(2, 3, 7), BATCH, BATCHED), (2, 3, 7, 5)),
    "addbmm": (lambda: torch.addbmm(torch.ones(3, 7), BATCH, BATCHED), (2, 3, 7, 5)),
    "mv": (lambda: torch.mv(A, V), (1, 3, 1, 5)),
    "addmv": (lambda: torch.addmv(torch.ones(3), A, V), (1, 3, 1, 5)),
    "dot": (lambda: torch.dot(V, V), (1, 1, 1, 5)),
    "empty": (lambda: torch.mm(torch.ones(0, 5), B), (1, 0, 7, 5)),
    "conv": (lambda: F.conv1d(torch.ones(2, 4, 9), torch.ones(8, 4, 3)), (1, 14, 8, 12)),
    "fp8": (lambda: functional.linear(randn(3, 5), randn(7, 5)), (1, 3, 7, 5)),
    # rows, contractions or columns are cut into groups; their lengths do not matter
    "rows of groups": (lambda: F.grouped_mm(ROWS, STACK, offs=OFFS), (1, 32, 8, 16)),
    "contractions": (lambda: F.grouped_mm(ROWS.t(), ROWS[:, :8], offs=OFFS), (1, 16, 8, 32)),
    "columns": (lambda: F.grouped_mm(STACK.mT, ROWS.t(), offs=OFFS), (1, 8, 32, 16)),
}


@pytest.mark.parametrize("op", MATRICES)
def test_matrices(op: str) -> None:
    run, shape = MATRICES[op]
    assert found(run) == [shape]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_backward_of_a_convolution(groups: int, transposed: bool) -> None:
    """Each gradient takes the FLOPs of the forward, also of a depthwise convolution."""
    conv = F.conv_transpose1d if transposed else F.conv1d
    x, w = torch.ones(2, 8, 9, requires_grad=True), torch.ones(8, 8 // groups, 3).requires_grad_()
    with Found() as mode:
        out = conv(x, w, groups=groups)
        for needed in ([x, w], [x], [w]):
            torch.autograd.grad(out.sum(), needed, retain_graph=True)
    forward, *backwards = (matmul.flops for matmul in mode.matmuls)
    assert forward == 2 * 2 * (9 if transposed else 7) * w.numel()
    assert backwards == [2 * forward, forward, forward]


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(BlockwiseFP8Weight(randn(3, 256, 128)))
        self.down = nn.Parameter(BlockwiseFP8Weight(randn(3, 128, 256)))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        h = F.silu(F.grouped_mm(x, self.up.mT, offs=offs))
        return F.grouped_mm(h, self.down.mT, offs=offs)


def test_grouped_matmuls_in_fp8() -> None:
    """The contraction of wgrad is that of tokens, not of the blocks that they are cast in."""
    model, offs = MoE(), torch.tensor([3, 3, 50], dtype=torch.int32)
    sizes = [
        ("fprop", 50, 256, 128),
        ("fprop", 50, 128, 256),
        ("dgrad", 50, 256, 128),
        ("wgrad", 128, 256, 50),
        ("dgrad", 50, 128, 256),
        ("wgrad", 256, 128, 50),
    ]
    report = audit(model, randn(50, 128, grad=True), offs)
    assert [(e.kind, e.m, e.n, e.k) for e in report.entries] == sizes
    assert report.fp8_share == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype) -> None:
    q = torch.ones(2, 4, 6, 16, dtype=dtype, requires_grad=True)
    k, v = (torch.ones(2, 4, 10, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    with Found() as mode:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    forward, backward = mode.matmuls
    assert forward[:4] == backward[:4] == (8, 6, 10, 16)
    assert forward.is_attention and backward.is_attention
    assert forward.flops == 2 * 2 * 8 * 6 * 10 * 16  # scores, and scores by values
    assert backward.flops == 5 * forward.flops / 2  # two matmuls for each of them, scores again


def test_attention_whose_values_have_another_size() -> None:
    q, k, v, out = (torch.ones(2, 4, *sizes) for sizes in ((6, 16), (10, 16), (10, 32), (6, 32)))
    forward = aten._scaled_dot_product_efficient_attention.default
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    flex = torch.ops.higher_order.flex_attention_backward  # takes the output's gradient later
    # scores and scores by values; scores again, and the gradients of q and k, of v and the scores
    for op, args, sizes in (
        (forward, (q, k, v), 16 + 32),
        (backward, (out, q, k, v), 3 * 16 + 2 * 32),
        (flex, (q, k, v, out), 3 * 16 + 2 * 32),
    ):
        if op is flex and flex not in flop_registry:
            continue  # torch 2.11
        matmul = matmul_of(op, args, {}, out)
        assert matmul is not None and matmul[:4] == (8, 6, 10, 16)
        assert matmul.flops == 2 * 8 * 6 * 10 * sizes


def test_layouts_of_attention() -> None:
    q, k = torch.ones(2, 6, 4, 16), torch.ones(2, 10, 4, 16)  # heads after lengths
    efficient = aten._efficient_attention_forward.default
    args: tuple[Any, ...] = (q, k, k, None, None, None, None, None, 0.0, 0)
    matmul = matmul_of(efficient, args, {}, (q,))
    assert matmul is not None and matmul[:4] == (8, 6, 10, 16)
    assert matmul.flops == 2 * 2 * 8 * 6 * 10 * 16
    # [total, heads, size] of sequences of several lengths: attention stays within each
    q, offsets = torch.ones(6, 4, 16), torch.tensor([0, 2, 6])
    args = (q, q, q, offsets, offsets, 4, 4, 0.0, True, False)
    matmul = matmul_of(aten._flash_attention_forward.default, args, {}, (q,))
    assert matmul is not None and matmul.flops == 2 * 2 * 4 * (2 * 2 + 4 * 4) * 16


def test_an_op_that_has_registered_its_flops() -> None:
    a, one = torch.ones(16, 32, dtype=torch.float8_e4m3fn), torch.ones(())
    matmul = matmul_of(aten._scaled_mm.default, (a, a.t(), one, one), {}, torch.ones(16, 16))
    assert matmul is not None
    assert (matmul[:4], matmul.precision) == ((1, 16, 16, 32), "float8_e4m3fn")


@pytest.mark.parametrize("op", ["relu", "sum", "t"])
def test_other_ops(op: str) -> None:
    assert found(lambda: getattr(A, op)()) == []


def test_flops_of_a_network_are_those_of_torchs_counter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5))
    x = torch.ones(2, 3, 8, 8)
    report = audit_step(model, lambda: model(x).square().sum().backward())
    with FlopCounterMode(display=False) as counter:
        model(x).square().sum().backward()
    assert report.flops == counter.get_total_flops()
    assert [(e.module, e.kind, e.m, e.n, e.k) for e in report.entries] == [
        ("0", "forward", 18, 8, 27),
        ("3", "forward", 2, 5, 72),
        ("3", "backward", 2, 72, 5),
        ("3", "backward", 5, 72, 2),
        ("0", "backward", 18, 8, 27),
    ]
    assert "\nFP8: 0.0% of FLOPs; fp32: * 100.0%\n" in str(report)


def test_ops_that_hide_their_matmuls_are_named() -> None:
    model, x, hidden = nn.Sequential(nn.LSTM(8, 8)), torch.ones(3, 2, 8), "may run matmuls that"
    report = audit_step(model, lambda: torch.cond(x.sum() > 0, lambda x: x @ x.mT, torch.bmm, (x,)))
    assert report.notes == (f"{hidden} are not shown: cond in (model)",)
    with torch.no_grad():
        report = audit_step(model, lambda: (model(x), torch.mm(A, B)))
    assert [e.module for e in report.entries] == ["(model)"]
    assert report.notes == (f"{hidden} are not shown: aten.mkldnn_rnn_layer.default in 0",)


HIDING = {
    "aten": ("_cudnn_rnn", "_trilinear", "_native_multi_head_attention"),
    "symm_mem": ("fused_all_gather_matmul", "fused_scaled_matmul_reduce_scatter"),
    "quantized": ("linear",),
}
PLAIN = {
    "aten": ("relu", "convolution", "mm"),
    "prims": ("add",),
    "blocktensor": ("quantize_both",),
    "c10d": ("allreduce_",),
    "_c10d_functional": ("all_reduce",),
    "_c10d_functional_autograd": ("all_to_all_single",),
    "_dtensor": ("shard_dim_alltoall",),
    "fsdp": ("split_with_sizes_copy",),
    "inductor": ("accumulate_grad_",),
    "profiler": ("_record_function_enter_new",),
    "symm_mem": ("one_shot_all_reduce",),
}


@pytest.mark.parametrize("hides", [True, False])
def test_which_ops_hide_matmuls(hides: bool) -> None:
    import_module("torch.distributed._symmetric_memory")
    for namespace, names in (HIDING if hides else PLAIN).items():
        for name in names:
            packet = getattr(getattr(torch.ops, namespace), name)
            assert hides_matmuls(packet.default) == hides, packet


class Rotary(nn.Module):
    """There are as many frequencies as positions; a buffer and a parameter hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.ones(5))
        self.learned = nn.Parameter(torch.ones(1, 5))


OUTER: dict[str, tuple[Callable[[Rotary], Any], str]] = {
    "of activations": (lambda m: V[:, None] @ V[None], "outer product"),
    "by a buffer": (lambda m: V[:, None] @ m.fixed[None], "outer product"),
    "of a buffer": (lambda m: m.fixed[:, None] @ V[None], "outer product"),
    "by a parameter": (lambda m: V[:, None] @ m.learned, ""),
    "of two columns": (lambda m: A[:, :2] @ B[:2], ""),
    "by two columns of a buffer": (lambda m: A[:, :1].expand(3, 5) @ m.fixed[:, None], ""),
    "in FP8": (lambda m: functional.linear(V[:, None], V[:, None]), ""),
    "of a batch": (lambda m: BATCH[..., :1] @ BATCHED[:, :1], ""),
}


@pytest.mark.parametrize("name", OUTER)
def test_outer_products_without_a_parameter_are_explained(name: str) -> None:
    run, note = OUTER[name]
    model = Rotary()
    (matmul,) = audit_step(model, lambda: run(model)).entries
    assert (matmul.k == 1) == ("columns" not in name)
    assert matmul.note == note
    assert matmul.attention == (name == "of a batch")
    assert matmul.weight == ("fixed" if "buffer" in name else "learned" * ("parameter" in name))


def entry(module: str, flops: int, precision: str = "bf16", **others: object) -> AuditedMatmul:
    return AuditedMatmul(module, "forward", 1, 2, 3, 4, precision, flops, **others)  # type: ignore[arg-type]


def test_totals_name_the_largest_groups() -> None:
    modules = [entry(f"{letter}.{i}", 10 * n) for n, letter in enumerate("abcdefg") for i in (0, 1)]
    others = [entry(letter, 6, "fp32") for letter in "hijkl"]
    report = AuditReport((*modules, *others, entry("h", 560, "FP8")), ("a note",))
    assert_expected_inline(
        "\n".join(str(report).replace("; ", "\n").splitlines()[-4:]),
        """\
FP8: 55.4% of FLOPs
bf16: g.* 11.9%, f.* 9.9%, e.* 7.9%, d.* 5.9%, 3 others
fp32: h 0.6%, i 0.6%, j 0.6%, k 0.6%, l 0.6%
a note""",
    )
    assert list(report.by_precision()) == ["FP8", "bf16", "fp32"]
    assert sum(report.by_precision().values()) == pytest.approx(1)


def test_layers_alike_are_one_line_with_the_share_of_all() -> None:
    report = AuditReport(
        (
            entry("blocks.0.up", 10),
            entry("blocks.1.up", 10),
            entry("blocks.1.up", 10, recomputed=True),
            entry("blocks.0.attn", 20, attention=True),
            entry("blocks.1.attn", 20, attention=True),
            entry("a", 0),
            entry("blocks.0.up", 30, reason="reads a view of blocks.0.w", weight="blocks.0.w"),
        )
    )
    assert_expected_inline(
        str(report),
        """\
module             matmul               M x N x K  precision  FLOPs  should be FP8
-----------------  -------------------  ---------  ---------  -----  --------------------------
blocks.*.up (2)    forward              2 x 3 x 4  bf16       20.0%
blocks.1.up        forward, recomputed  2 x 3 x 4  bf16       10.0%
blocks.0.up        forward              2 x 3 x 4  bf16       30.0%  reads a view of blocks.*.w
blocks.*.attn (2)  attention forward    2 x 3 x 4  bf16       40.0%
a                  forward              2 x 3 x 4  bf16       0.0%
FP8: 0.0% of FLOPs; bf16: blocks.*.up 60.0%, attention scores 40.0%, a 0.0%
should have been FP8 and was not: 30.0% of FLOPs""",
    )
    assert report.marked == report.entries[-1:]
    assert "FP8: 0.0% of FLOPs; bf16: a 0.0%" in str(AuditReport((entry("a", 0),)))


def squarish(wgrad_input: Any) -> nn.Module:
    """Of as many features as tokens, so that dgrad and wgrad have one shape; and a plain linear."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 48, bias=False))
    convert(model, Recipe(wgrad_input=wgrad_input), skip=["2"], skip_small=False)
    return model


def test_weight_gradients_of_x_in_squares_are_told_from_data_gradients() -> None:
    report = audit(squarish("128x128"), randn(32, 32, dtype=torch.float32, grad=True))
    assert [e.kind for e in report.entries if e.precision == "FP8"] == ["fprop", "dgrad", "wgrad"]
    assert not report.marked


def test_weight_gradients_in_high_precision_are_labelled_and_not_marked() -> None:
    model, x = squarish("high_precision"), randn(32, 32, dtype=torch.float32, grad=True)
    report = audit(model, x)
    assert_expected_inline(
        str(report).partition("\n\n")[0],
        """\
module  matmul                             M x N x K     precision  FLOPs
------  ---------------------------------  ------------  ---------  -----
0       fprop                              32 x 32 x 32  FP8        13.3%
2       forward                            32 x 48 x 32  fp32       20.0%
2       backward                           48 x 32 x 32  fp32       20.0%
2       backward                           32 x 32 x 48  fp32       20.0%
0       dgrad                              32 x 32 x 32  FP8        13.3%
0       wgrad in high precision by recipe  32 x 32 x 32  fp32       13.3%
FP8: 26.7% of FLOPs; fp32: 2 60.0%, wgrad in high precision by recipe 13.3%""",
    )
    assert not report.marked
    again = audit_step(model, lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    assert [e.note for e in again.entries if e.note] == ["in high precision by recipe"]


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_both_gradients_in_high_precision_are_told_apart(backward: Any) -> None:
    """With as many tokens as features, both have the same sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32, bias=False))
    convert(model, Recipe(backward=backward), skip_small=False)
    by_recipe = "in high precision by recipe"
    for tokens in (32, 7):
        report = audit(model, randn(tokens, 48, dtype=torch.float32, grad=True))
        kinds = [(e.kind, e.note) for e in report.entries]
        assert kinds == [("fprop", ""), ("dgrad", by_recipe), ("wgrad", by_recipe)]
        assert not report.marked


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize(
    ("choice", "note"),
    [("1x128", ""), ("128x128", ""), ("high_precision", "in high precision by recipe")],
)
def test_experts_with_weight_gradients_by_recipe(choice: Any, note: str, kn: bool) -> None:
    w = nn.Parameter(BlockwiseFP8Weight(randn(2, 32, 32), Recipe(wgrad_input=choice)))
    x, offs = randn(32, 32, grad=True), torch.tensor([5, 32], dtype=torch.int32)

    def run() -> None:
        F.grouped_mm(x, w if kn else w.mT, offs=offs).sum().backward()

    kinds = [(e.kind, e.note) for e in audit_step(nn.Module(), run).entries]
    assert kinds == [("fprop", ""), ("dgrad", ""), ("wgrad", note)]
