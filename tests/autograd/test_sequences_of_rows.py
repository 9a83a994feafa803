"""Recordings of whole sequences are the same for all numbers of rows of a step.

Kernels are planned on CPU tensors and not launched: a recording is compared as the data that
``player.cpp`` gets. ``test_compile_sm90.py`` compares single launches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe
from blocktensor.autograd import adapted_linear, gated_mlp, linear, matmuls
from blocktensor.autograd.gated_forms import plan_gated
from blocktensor.autograd.plan import plan_matmul
from blocktensor.ops.cast import choose_backend as casts
from blocktensor.ops.cast import ops as ops_of_casts
from blocktensor.ops.devices import H200
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.gemm import choose_backend as gemms
from blocktensor.ops.gemm.hopper import launch as hopper_launch
from blocktensor.ops.grouped_gemm import hopper_launch as grouped_launch
from blocktensor.ops.grouped_gemm.ops import grouped_gemm
from blocktensor.ops.norm import ops as norms
from blocktensor.ops.norm import triton_norm
from blocktensor.ops.producers import choose_backend as producers
from blocktensor.ops.runtime import record
from blocktensor.ops.runtime.launch import Launch, this_thread, watch_launches
from blocktensor.ops.runtime.specialize import SEQUENCES, Sequence
from blocktensor.ops.runtime.triton_compat import launcher
from blocktensor.ops.scale_layouts import empty_columnwise, empty_quantized, in_group_steps
from blocktensor.ops.thin import ops as thin
from tests.support.fake_driver import player

ROWS = (66, 65, 70, 72, 80, 96, 100, 112, 120, 127)
N = 256
CPU = torch.device("cpu")


def plain_kernel(launch: Launch, compiled: Any) -> Any:
    """What is recorded of a launch, without a compiled kernel."""
    parameters: list[tuple[Any, ...]] = []
    for arg in launch.args:
        if isinstance(arg, Tensor):
            parameters.append(("pointer", arg))
        elif hasattr(arg, "base"):
            parameters.append(("map", arg.base, tuple(arg.strides), arg.block_shape, arg.shape))
        else:
            parameters.append(("number", arg))
    constants = sorted((name, str(value)) for name, value in launch.constants.items())
    kernel = launch.kernel.__name__, launch.grid, constants, str(launch.options)
    return SimpleNamespace(parameters=parameters, configuration=kernel)


@pytest.fixture(params=["gluon", "triton"])
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ops plan the kernels of a backend on CPU tensors, and launch nothing."""

    def choose(backends: Any, problem: Any, device: Any) -> Any:
        by_name = {backend.name: backend for backend in backends}
        names = (request.param, "triton")
        backend = next(
            by_name[n] for n in names if n in by_name and by_name[n].declines(problem) is None
        )
        return SimpleNamespace(backend=backend, name=backend.name, others=())

    for module in (casts, gemms, producers, norms, thin):
        monkeypatch.setattr(module, "first_choice", choose)
    monkeypatch.setattr(hopper_launch, "card", lambda _: H200)
    monkeypatch.setattr(grouped_launch, "sms", lambda _: 132)
    monkeypatch.setattr(Launch, "__call__", lambda self: this_thread.launches.append((self, None)))
    monkeypatch.setattr(launcher, "kernel_of", plain_kernel)


def recording(function: Callable[..., Any], args: tuple[Any, ...], with_rows: int) -> Any:
    """The data of a recording, with a word for each number that is the rows of a call.

    None for a call that has a recording for its exact number, as another size equals it.
    """
    rows = player().rows_of(args, with_rows)
    if rows < 0:
        return None
    with torch.no_grad(), watch_launches() as launches, record._Watch() as watch:
        result = function(*args)
    assert watch.others == []
    call = record._Call(record.tensors_in(args), watch.allocated, launches, result, rows)
    _, allocations, recorded, returned, _ = call.as_data()
    sizes = [
        (("rows", *size[1:]) if has_rows else size, strides, dtype)
        for size, strides, dtype, has_rows in allocations
    ]
    found = []
    for *configuration, parameters in recorded:
        described: list[Any] = []
        for kind, *rest in parameters:
            if kind == "rows":
                described.append(("rows", rest[1]))
            elif kind == "map":
                *others, of_map, beyond = rest
                pairs = zip(of_map, beyond, strict=True)
                described.append((*others, [x if b < 0 else ("rows", b) for x, b in pairs]))
            else:
                described.append((kind, *rest))
        found.append((configuration, described))
    return sizes, found, returned


def assert_same(
    function: Callable[..., Any],
    make: Callable[[int], tuple[Any, ...]],
    with_rows: int,
    numbers: tuple[int, ...] = ROWS,
) -> None:
    every = {rows: recording(function, make(rows), with_rows) for rows in numbers}
    found = {rows: each for rows, each in every.items() if each is not None}
    assert len(found) >= len(numbers) - 2
    wanted = next(iter(found.values()))
    assert len(wanted[1]) > 0
    assert [rows for rows, each in found.items() if each != wanted] == []


def matrix(rows: int, cols: int) -> Tensor:
    return torch.zeros(rows, cols, dtype=torch.bfloat16)


def weight(n: int, k: int) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(matrix(n, k), Recipe()).requires_grad_()


def columnwise(rows: int, cols: int, format: BlockFormat | None) -> Quantized:
    assert format is not None
    return empty_columnwise(matrix(rows, cols), format)


# the scales of 66 * 128 columns are as many lines as there are rows
WIDTHS = pytest.mark.parametrize("k", [256, 640, 66 * 128, 100 * 128])


@pytest.mark.usefixtures("planned")
@WIDTHS
def test_linear_layers(k: int) -> None:
    w = weight(N, k)

    def forward(rows: int) -> tuple[Any, ...]:
        x = matrix(rows, k).requires_grad_()
        return x.detach(), None, w.master, None, None, plan_matmul(x, w, None, None)

    def backward(rows: int) -> tuple[Any, ...]:
        plan = forward(rows)[-1]
        x = columnwise(rows, k, plan.x_columnwise)
        return matrix(rows, N), x, empty_quantized((k, N), plan.weight_format, CPU), None, plan

    assert_same(linear._fprop._function, forward, 0b11)
    assert_same(linear._backward._function, backward, 0b1)


@pytest.mark.usefixtures("planned")
@WIDTHS
@pytest.mark.parametrize("columnwise", [BLOCKS_128X128, BLOCKS_1X128, None])
def test_shared_casts(k: int, columnwise: BlockFormat | None) -> None:
    formats = BLOCKS_1X128, columnwise
    assert_same(matmuls._cast_of_rows._function, lambda rows: (matrix(rows, k), *formats), 0b1)


@pytest.mark.usefixtures("planned")
@WIDTHS
@pytest.mark.parametrize("joint", [False, True])
def test_gated_mlps(k: int, joint: bool) -> None:
    inner = k  # of h
    w_gate = weight(2 * inner if joint else inner, N)
    w_up, w_down = None if joint else weight(inner, N), weight(N, inner)

    def plan(rows: int) -> Any:
        x = matrix(rows, N).requires_grad_()
        return plan_gated(None, x, (w_gate, w_up, w_down), (None,) * 3, "silu", False, None)

    def forward(rows: int) -> tuple[Any, ...]:
        masters = (w_gate.master, None if w_up is None else w_up.master, w_down.master)
        return matrix(rows, N), *masters, None, None, None, None, plan(rows)

    def backward(rows: int) -> tuple[Any, ...]:
        of = plan(rows)
        x = columnwise(rows, N, of.x_columnwise)
        h = columnwise(rows, inner, of.down.x_columnwise) if of.saves_h else None
        gate = matrix(rows, w_gate.shape[0])
        up = None if joint else matrix(rows, inner)
        shapes = (N, w_gate.shape[0]), None if joint else (N, inner), (inner, N)
        forms = [s and empty_quantized(s, of.gate.weight_format, CPU) for s in shapes]
        asked = True, not joint, True, not joint, True, False, False, False
        return matrix(rows, N), x, h, gate, up, *forms, None, asked, of

    assert_same(gated_mlp._cast_and_fprop._function, forward, 0b1)
    assert_same(gated_mlp._of_forms._function, backward, 0b11001)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("rank", [5, 16])
@pytest.mark.parametrize("k", [256, 1104])
@pytest.mark.parametrize("experts", [3, None], ids=["experts", "one weight"])
def test_adapters(experts: int | None, k: int, rank: int) -> None:
    """Rows in groups have larger steps; nothing but the number of rows differs within one."""
    shape = (N, k) if experts is None else (experts, N, k)
    w = BlockwiseFP8Tensor(empty_quantized(shape, BLOCKS_128X128, CPU), shape=shape)
    offs = None if experts is None else torch.zeros(experts, dtype=torch.int32)
    experts = experts or 1
    stack = empty_quantized((experts, N, k), BLOCKS_128X128, CPU)
    w_col = empty_quantized((experts, k, N), BLOCKS_128X128, CPU)
    a, b = torch.zeros(experts, rank, k), torch.zeros(N, rank, experts).permute(2, 0, 1)
    thin_a, thin_b = (thin.empty_operand(t, torch.bfloat16) for t in (a.mT, b))

    def plan(rows: int) -> Any:
        return plan_matmul(matrix(rows, k).requires_grad_(), w, None, None, offs)

    def forward(rows: int) -> tuple[Any, ...]:
        return matrix(rows, k), None, stack, None, offs, a.mT, b, 0.3, BLOCKS_1X128, torch.bfloat16

    def backward(rows: int) -> tuple[Any, ...]:
        u = matrix(rows, thin_a.shape[2])
        how = 0.3, rank, *(torch.float32,) * 2, "erc", "cre", BLOCKS_1X128, torch.bfloat16
        return matrix(rows, N), matrix(rows, k), u, w_col, thin_a, thin_b, offs, *how

    numbers = () if offs is None else ((1025, 1030, 1099, 1104, 1500, 2047, 2048),)
    assert_same(adapted_linear._recorded_fprop._function, forward, 0b11, *numbers)
    assert_same(adapted_linear._recorded_backward._function, backward, 0b111, *numbers)


TOKENS = (1025, 1030, 1099, 1104, 1500, 2047, 2048)
every_columnwise = pytest.mark.parametrize("format", [BLOCKS_1X128_POW2, BLOCKS_128X128_POW2])


@pytest.mark.usefixtures("planned")
@WIDTHS
@every_columnwise
def test_tokens_that_arrive(k: int, format: BlockFormat) -> None:
    """In FP8, with scales in powers of two."""
    w = empty_quantized((N, k), BLOCKS_128X128, CPU)

    def arrived(rows: int) -> Quantized:
        return empty_quantized((rows, k), BLOCKS_1X128_POW2, CPU)

    def forward(rows: int) -> tuple[Any, ...]:
        return *arrived(rows), w, None, torch.bfloat16, False

    assert_same(matmuls._gemm_of_rows._function, forward, 0b11)
    assert_same(matmuls._columnwise_of_rows._function, lambda r: (*arrived(r), format), 0b11)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("room", [False, True])
@every_columnwise
def test_tokens_that_arrive_at_experts(format: BlockFormat, room: bool) -> None:
    experts, k = 3, 1104
    w = empty_quantized((experts, N, k), BLOCKS_128X128, CPU)
    offs = torch.zeros(experts, dtype=torch.int32)

    def arrived(rows: int) -> Quantized:
        x = empty_quantized((2048 if room else rows, k), BLOCKS_1X128_POW2, CPU)
        return in_group_steps(Quantized(x.data[:rows], x.scale[:rows], x.format))

    def forward(rows: int) -> tuple[Any, ...]:
        return arrived(rows), w, offs, None, torch.bfloat16, rows

    assert_same(grouped_gemm, forward, 0, TOKENS)
    derived = ops_of_casts.columnwise_from_rowwise
    assert_same(derived, lambda rows: (arrived(rows), format, offs, rows), 0, TOKENS)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("k", [128, 4096])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norms(k: int, kind: Any) -> None:
    scale = torch.zeros(k, dtype=torch.bfloat16)

    def backward(rows: int) -> tuple[Any, ...]:
        rstd = torch.zeros(rows, 1)
        return matrix(rows, k), matrix(rows, k), rstd, scale, kind, True, True

    assert_same(triton_norm.normalized, lambda rows: (matrix(rows, k), scale, 1e-6, kind), 0b1)
    assert_same(triton_norm.row_gradients, backward, 0b111)


def test_every_sequence_is_compared_here() -> None:
    """By name in this file: a sequence that nothing compares may repeat a call of other rows."""
    found = {
        f"{module.__name__.rpartition('.')[2]}.{name}._function"
        for module in (adapted_linear, gated_mlp, linear, matmuls)
        for name, value in vars(module).items()
        if isinstance(value, Sequence)
    }
    assert len(found) == len(SEQUENCES)
    source = Path(__file__).read_text()
    assert {name for name in found if f"assert_same({name}" not in source} == set()
