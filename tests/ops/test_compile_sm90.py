"""Every kernel but the GEMMs on Hopper compiles for sm_90 without a GPU, and spills little.

Functions that launch kernels are called with meta tensors; their launches are recorded and compiled
instead of run. GEMMs of tensor cores: test_compile_gemms_sm90.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import (
    ACTIVATION_FORMATS,
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    GRID_FORMATS,
    GROUP_STEP,
    WEIGHT_FORMATS,
    BlockFormat,
)
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from blocktensor.ops.producers.ptx import Role, word_ptx
from blocktensor.ops.scale_layouts import empty_columnwise, empty_quantized
from tests.support.casts import BOTH, GLUON_WAYS, SQUARE, WAYS, Functions, Way, gluon_takes, kernels
from tests.support.numeric import DTYPES, E4M3

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blocktensor.ops.cast.gluon_columnwise import plan_columnwise
from blocktensor.ops.cast.producer import empty_forms
from blocktensor.ops.cast.triton_128x128 import plan_shard
from blocktensor.ops.cast.triton_cast import plan_1x128
from blocktensor.ops.cross_entropy import triton_rows
from blocktensor.ops.devices import H200
from blocktensor.ops.gemm import triton_gemm
from blocktensor.ops.gemm.hopper import launch as hopper
from blocktensor.ops.gemm.hopper.launch import plan_sum
from blocktensor.ops.gemm.hopper.tiles import TILES
from blocktensor.ops.norm import triton_norm
from blocktensor.ops.runtime.launch import Launch, Rows
from tests.support import sm90
from tests.support.sm90 import TUNED, Launches, cast_like, compile_for_sm90, like

launches = sm90.launches
META = torch.device("meta")
BF16, FP16, FP32 = DTYPES
*OLDER, COLUMNWISE_SQUARE, MIXED = WAYS
TRITON, GLUON = kernels("triton"), kernels("gluon")

# None with the Triton that the kernels are tuned with. Others may, a little, at odd shapes in fp32.
SPILLS = 0 if TUNED else 192


class Case(NamedTuple):
    """What launches kernels, how many, and how many bytes a thread of each may spill.

    ``launches`` is None where an awkward tensor takes more than one.
    """

    run: Callable[[], object]
    launches: int | None = 1
    spills: int | Callable[[Launch], int] = SPILLS


INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "even": lambda dtype: like(4096, 7168, dtype=dtype),
    "even.t()": lambda dtype: like(7168, 4096, dtype=dtype).t(),
    "300x576": lambda dtype: like(300, 576, dtype=dtype),
    "4096x10944": lambda dtype: like(4096, 10944, dtype=dtype),
    "129x130": lambda dtype: like(129, 130, dtype=dtype),
    "304x130": lambda dtype: like(304, 130, dtype=dtype),
    "129x130.t()": lambda dtype: like(130, 129, dtype=dtype).t(),
    "unaligned": lambda dtype: like(257, 512, dtype=dtype).flatten()[1:-511].view(256, 512),
    "stepped": lambda dtype: like(300, 1152, dtype=dtype)[:, ::2],
    "one number": lambda dtype: like(1, 1, dtype=dtype).expand(256, 512),
    "one column": lambda dtype: like(128, 1, dtype=dtype),
    "wide": lambda dtype: torch.empty_strided((256, 130), (2**25, 1), dtype=dtype, device=META),
}


def casts_in_triton() -> Iterator[Case]:
    variants: list[tuple[Way, torch.dtype, str, bool]] = [
        *product(OLDER, [FP32], INPUTS, [False]),
        *product([COLUMNWISE_SQUARE], [FP32], ["129x130.t()", "one column", "wide"], [False]),
        *product([MIXED], [FP32], ["even", "300x576", "129x130"], [False]),
        *product(WAYS, [FP32], ["129x130"], [True]),
        *product(WAYS, [BF16], ["even", "129x130", "4096x10944"], [False]),
        *product(WAYS, [FP16], ["300x576", "even.t()"], [False]),
        *product([BOTH], [BF16], ["129x130.t()", "one column"], [False]),
        (MIXED, BF16, "wide", False),
        *product(WAYS, [BF16], ["300x576"], [True]),
    ]
    for way, dtype, view, power_of_two in variants:
        yield Case(partial(way, TRITON, INPUTS[view](dtype), power_of_two), None)


def casts_in_gluon() -> Iterator[Case]:
    """All dtypes of whole tiles and of the most ragged ones; other shapes in bf16 alone."""
    for way, dtype, shape, power_of_two in [
        *product(GLUON_WAYS, DTYPES, [(4096, 7168), (300, 130)], [False]),
        *product(GLUON_WAYS, [BF16], [(300, 576), (304, 130)], [False]),
        *product(GLUON_WAYS, [FP32], [(300, 576)], [True]),
    ]:
        x = like(*shape, dtype=dtype)
        assert gluon_takes(x, *way.formats(power_of_two))
        yield Case(partial(way, GLUON, x, power_of_two))
    for dtype, shape, format in product(
        DTYPES, [(14336, 4096), (160, 10), (3, 272, 576)], [BLOCKS_128X128, BLOCKS_128X128_POW2]
    ):
        yield Case(partial(GLUON.quantize_with_transpose, like(*shape, dtype=dtype), format))
        yield Case(partial(GLUON.quantize_rowwise, like(*shape, dtype=dtype)[..., 1:, :], format))


def casts_of_stacks() -> Iterator[Case]:
    for x in (like(3, 129, 130, dtype=FP32), like(3, 256, 512)):
        yield Case(partial(SQUARE, TRITON, x, False))
        yield Case(partial(SQUARE, TRITON, x.mT, True))


def casts_to_grids() -> Iterator[Case]:
    for format, dtype in product(GRID_FORMATS.values(), DTYPES):
        for shape in ((4096, 4096), (300, 576)):
            x = like(*shape, dtype=dtype)
            yield Case(partial(TRITON.quantize_rowwise, x, format))
            yield Case(partial(TRITON.shard_amax, x, format, 64, 32))


def finished_casts() -> Iterator[Case]:
    """Transposes and dequantize."""
    for shape in ((256, 512), (129, 130), (3, 300, 576), (256, 132)):
        x = cast_like(*shape, rows=128)
        flipped = x._replace(data=x.data.mT.contiguous().mT)
        yield Case(partial(TRITON.transpose, x))
        yield Case(partial(TRITON.transpose, flipped))
    for shape, rows, dtype in (
        ((256, 512), 1, BF16),
        ((129, 130), 1, FP32),
        ((300, 576), 128, FP16),
        ((3, 129, 130), 128, BF16),
    ):
        yield Case(partial(TRITON.dequantize, cast_like(*shape, rows=rows), dtype))


def derived_columns() -> Iterator[Case]:
    """Columnwise forms of rowwise bytes."""
    for shape, format, experts in product(
        [(4096, 7168), (300, 576), (129, 130)],
        [BLOCKS_1X128_POW2, BLOCKS_128X128_POW2],
        [0, 8, 1000],
    ):
        x = empty_quantized(shape, BLOCKS_1X128_POW2, META)
        offs = like(experts, dtype=torch.int32) if experts else None
        yield Case(partial(TRITON.columnwise_from_rowwise, x, format, offs))


def casts_by_groups() -> Iterator[Case]:
    for (dtype, k, experts, rowwise), square in product(
        [
            *product([BF16, FP32], [2048], [8], [True, False]),
            (FP16, 136, 256, True),
            (FP32, 130, 1000, True),
        ],
        [False, True],
    ):
        x, offs = like(401, k, dtype=dtype), like(experts, dtype=torch.int32)
        rounding: Any = "power_of_two" if k == 136 else "fp32"
        row, squares = ACTIVATION_FORMATS[rounding], WEIGHT_FORMATS[rounding]
        forms = (
            empty_quantized(x.shape, row, META) if rowwise else None,
            empty_columnwise(x, squares if square else row, offs),
        )
        for plan in (plan_columnwise, plan_1x128):
            yield Case(plan(x, *forms, offs))


@pytest.mark.parametrize("formats", [(True, True), (True, False), (False, True)], ids=str)
def test_launches_by_groups_are_the_same_within_a_step_of_rows(formats: tuple[bool, bool]) -> None:
    """But for the number of rows: replays of one recording serve them all."""

    def laid_out(arg: object) -> object:
        is_tensor = isinstance(arg, Tensor)
        return (arg.shape, arg.stride(), arg.dtype) if is_tensor else described(arg)

    def planned(plan: Any, rows: int) -> Any:
        x, offs = like(rows, 384), like(8, dtype=torch.int32)
        row, col = (BLOCKS_1X128 if wanted else None for wanted in formats)
        launch = plan(x, *empty_forms(x, offs, row, col), offs)
        return launch._replace(args=[laid_out(arg) for arg in launch.args if arg is not x])

    for plan in (plan_columnwise, plan_1x128)[not formats[1] :]:
        step = [GROUP_STEP + more for more in (1, 16, GROUP_STEP // 2, GROUP_STEP - 1)]
        assert all(planned(plan, rows) == planned(plan, 2 * GROUP_STEP) for rows in step)
        assert planned(plan, GROUP_STEP) != planned(plan, GROUP_STEP + 1)


def described(arg: Any) -> Any:
    """What a recording holds of an argument; a number of rows is read at every call."""
    if type(arg) is Rows:
        return "rows", arg.beyond
    if isinstance(arg, TensorDescriptor):
        sizes = [described(size) for size in arg.shape]
        return sizes, arg.strides, arg.block_shape, arg.base.dtype
    return arg.dtype if isinstance(arg, Tensor) else arg


def described_launch(launch: Launch) -> Any:
    inner = [x.shape[1:] for x in launch.sized]
    return launch._replace(args=[described(arg) for arg in launch.args], sized=inner)


def launches_of_rows(rows: int, launches: Launches) -> Any:
    """All launches of dense sequences with so many rows, as a recording holds them."""
    x, n, k = like(rows, 640), 1152, 640
    for name, kind in product(("triton", "gluon"), (BLOCKS_1X128, BLOCKS_128X128, None)):
        made = kernels(name)
        if kind is not None:
            row, col = made.quantize_both(x, BLOCKS_1X128, kind)
            made.quantize_columnwise(x, kind)
        made.quantize_rowwise(x, BLOCKS_1X128)
        for formats in (BOTH_FORMS, TWO_FORMATS, ROWWISE):
            sources = grad, gate, up = sources_of((rows, 640))
            producers = producers_of(name, sources, formats)
            producers.gated(gate, up, "silu", *formats)
            producers.gated_backward(grad, gate, up, "silu", *formats)
    w = cast_like(n, k, rows=128)
    for module in (triton_gemm, hopper):
        y = module.gemm(row, w, None, BF16)
        assert any(x is y for x in launches[-1].sized)
        module.gemm(cast_like(n, col.data.shape[1]), col, None, BF16)
    for tile in TILES.values():
        if tile.b_block == 128:
            hopper.plan_gemm(row, w, None, like(rows, n), tile)()
    for kind in ("llama", "gemma"):
        y, rstd = triton_norm.normalized(x, like(k), 1e-6, kind)
        assert launches[-1].sized == (y, rstd)
        triton_norm.row_gradients(x, x, rstd, like(k), kind, True, True)
    plan_sum(like(5, -(-rows // 128) * 128, n, dtype=FP32), None, like(rows, n))()
    forms = [launch.sized for launch in launches if "ROWWISE" in launch.constants]
    assert [len(sized) > 0 for sized in forms] == [
        launch.constants["ROWWISE"] for launch in launches if "ROWWISE" in launch.constants
    ]
    found = [described_launch(launch) for launch in launches]
    launches.clear()
    return found


@pytest.mark.parametrize("first", [64, 128, 1024, 8000])
def test_launches_are_the_same_within_a_step_of_rows(
    first: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the number of rows: recordings of sequences serve all rows of a step."""
    monkeypatch.setattr(hopper, "card", lambda _: H200)
    wanted = launches_of_rows(first + 1, launches)
    assert len(wanted) > 30
    for rows in (2, 15, 16, 17, 31, 32, 33, 48, 62, 63):
        found = launches_of_rows(first + rows, launches)
        assert found == wanted, rows
    assert launches_of_rows(first + 65, launches) != wanted


def passes() -> Iterator[Case]:
    """Sums of split products, and losses of logits."""
    for dtype, n in product(DTYPES, (576, 2048, 2049)):
        splits, out = like(7, 64, n, dtype=FP32), like(50, n, dtype=dtype)
        yield Case(plan_sum(splits, like(n, dtype=dtype), out), spills=0)
        yield Case(plan_sum(splits, None, out), spills=0)
    target = like(1024, dtype=torch.int64)
    for dtype, total, cols in product(DTYPES, (None, like(dtype=torch.int64)), (300, 128256)):
        args = like(1024, cols, dtype=dtype), target, total, -100
        yield Case(partial(triton_rows.loss_and_gradient_, *args), 2, 0)
        for weight in (None, like(cols, dtype=FP32)):
            more = partial(triton_rows.loss_and_gradient_, *args, weight, 0.1)
            yield Case(more, 2, 0)


GELUS = ("gelu", "gelu_tanh")
Formats = tuple[BlockFormat | None, BlockFormat | None]
BOTH_FORMS: Formats = BLOCKS_1X128, BLOCKS_1X128
TWO_FORMATS: Formats = BLOCKS_1X128, BLOCKS_128X128
COLUMNWISE: Formats = None, BLOCKS_1X128
ROWWISE: Formats = BLOCKS_1X128, None
POW2: Formats = BLOCKS_1X128_POW2, BLOCKS_1X128_POW2


def producers_of(name: str, sources: tuple[Tensor, ...], formats: Formats) -> Functions:
    """The functions of a backend, which must take the problem."""
    made = kernels(name, PRODUCER_BACKENDS)
    assert made.backend.declines(ProducerProblem("silu", sources, *formats)) is None
    return made


def sources_of(shape: tuple[int, int], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h; gate and up, halves of one tensor."""
    gate, up = like(shape[0], 2 * shape[1], dtype=dtype).chunk(2, 1)
    return like(*shape, dtype=dtype), gate, up


def allowed_spills(launch: Launch) -> int:
    """Bytes. Some programs spill a little: with more registers they are slower."""
    if not TUNED:
        return 256
    if launch.constants["SOURCES"] == 3:
        return 160 if launch.args[0].dtype == FP16 else 128
    few = {64: 48, 72: 8}
    return few.get(launch.options.get("maxnreg", 0), 0) if launch.options["num_warps"] == 8 else 0


def producers() -> Iterator[Case]:
    variants: list[tuple[str, str, torch.dtype, tuple[int, int], Formats]] = [
        *product(
            ["gluon"],
            ["silu"],
            [BF16],
            [(4096, 14336), (302, 130)],
            [BOTH_FORMS, TWO_FORMATS, COLUMNWISE],
        ),
        *product(["gluon"], GELUS, [BF16], [(302, 130)], [BOTH_FORMS, TWO_FORMATS]),
        ("gluon", "relu2", BF16, (300, 576), BOTH_FORMS),
        ("gluon", "gelu", FP16, (302, 136), TWO_FORMATS),
        ("gluon", "relu2", FP32, (300, 576), TWO_FORMATS),
        ("gluon", "gelu_tanh", FP16, (302, 136), TWO_FORMATS),
        ("gluon", "silu", FP32, (300, 520), BOTH_FORMS),
        ("gluon", "gelu_tanh", FP32, (300, 576), TWO_FORMATS),
        ("gluon", "silu", BF16, (300, 576), POW2),
        *product(["triton"], ["silu"], [BF16], [(4096, 14336)], [BOTH_FORMS, TWO_FORMATS, ROWWISE]),
        *product(
            ["triton"],
            ["gelu_tanh"],
            [BF16],
            [(129, 131)],
            [BOTH_FORMS, TWO_FORMATS, POW2, ROWWISE],
        ),
        *product(["triton"], ["gelu"], [BF16], [(129, 131)], [BOTH_FORMS, TWO_FORMATS, POW2]),
        ("triton", "relu2", BF16, (129, 131), ROWWISE),
        ("triton", "gelu", FP32, (129, 136), BOTH_FORMS),
        ("triton", "gelu_tanh", FP16, (129, 136), TWO_FORMATS),
        ("triton", "gelu_tanh", FP32, (129, 136), BOTH_FORMS),
        ("triton", "silu", FP32, (300, 576), TWO_FORMATS),
    ]
    for name, activation, dtype, shape, formats in variants:
        sources = grad, gate, up = sources_of(shape, dtype)
        takes_three = name == "gluon" or dtype == BF16
        made = producers_of(name, sources if takes_three else sources[1:], formats)
        rest = (activation, *formats)
        count = 2 if name == "triton" and shape[1] % 8 and formats == TWO_FORMATS else 1
        runs = [partial(made.gated, gate, up, *rest)]
        if takes_three:
            backward = partial(made.gated_backward, grad, gate, up, *rest)
            runs.append(backward)
            if activation == "silu":  # takes fewer registers than both gradients
                runs.append(partial(backward, of_up=False))
        if name == "gluon" and shape[1] % 128 == 0:
            both = like(shape[0], 2 * shape[1], dtype=dtype)
            runs.append(partial(made.joint_gated_backward, grad, both, *rest))
        yield from (Case(run, count, allowed_spills) for run in runs)


def other_producers() -> Iterator[Case]:
    """Gradients of gelu in rows of whole vectors, and producers by groups."""
    sources = _, gate, up = sources_of((300, 576))
    for activation, formats in product(GELUS, (BOTH_FORMS, TWO_FORMATS)):
        backward = producers_of("gluon", sources, formats).gated_backward
        yield Case(partial(backward, *sources, activation, *formats), 1, allowed_spills)
    for name in ("triton", "gluon"):
        made = producers_of(name, sources, BOTH_FORMS)
        grouped = ("silu", *TWO_FORMATS, like(8, dtype=torch.int32))
        yield Case(partial(made.gated, gate, up, *grouped), 1, allowed_spills)
        yield Case(partial(made.gated_backward, *sources, *grouped), 1, allowed_spills)


TABLE = (
    casts_in_triton,
    casts_in_gluon,
    casts_of_stacks,
    casts_to_grids,
    finished_casts,
    derived_columns,
    casts_by_groups,
    passes,
    producers,
    other_producers,
)
CASES = [(f"{cases.__name__} {i}", case) for cases in TABLE for i, case in enumerate(cases())]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[label for label, _ in CASES])
def test_registers(case: Case, launches: Launches) -> None:
    made = launches.compile(case.run, case.spills)
    assert made == (case.launches or max(made, 1))


@pytest.mark.parametrize("kind", ["amax", "cast", "checked cast"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("shape", "row"), [((1024, 4096), 0), ((1000, 4096), 100), ((7, 130), 3)])
def test_shards_load_even_columns_wide(
    shape: tuple[int, int], row: int, dtype: torch.dtype, kind: str
) -> None:
    data = None if kind == "amax" else like(*shape, dtype=E4M3)
    amax = like(9, 32, dtype=FP32)
    own = amax if kind == "checked cast" else None
    format = BLOCKS_128X128 if dtype == BF16 else BLOCKS_128X128_POW2
    launch = plan_shard(like(*shape, dtype=dtype), amax, data, format, row, 0, own)
    found = compile_for_sm90(launch)
    assert found.spilled_bytes == 0
    assert ("LDG.E.128" in found.sass) == (shape[1] % 128 == 0)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        *product(["llama", "gemma"], DTYPES, [(4096, 4096)]),
        ("llama", BF16, (129, 576)),
        ("gemma", FP16, (1, 4096)),
        ("llama", FP32, (64, 16384)),
        ("gemma", BF16, (64, 16384)),
    ],
)
def test_norms(kind: Any, dtype: torch.dtype, shape: tuple[int, int], launches: Launches) -> None:
    """Without spills, and without a multiply-add, which would round once in place of twice."""
    x, row = like(*shape, dtype=dtype), like(shape[0], 1, dtype=FP32)
    weight = x[0]
    triton_norm.normalized(x, weight, 1e-6, kind)
    for wanted in ((True, True), (True, False), (False, True)):
        triton_norm.row_gradients(x, x, row, weight, kind, *wanted)
    assert len(launches) == 4
    for launch, made in zip(launches, map(compile_for_sm90, launches), strict=True):
        assert made.spilled_bytes == 0
        assert made.registers <= 168
        assert not launch.options["enable_fp_fusion"]
        division = 20 if launch.kernel is triton_norm.norm_kernel else 0  # of a mean
        assert made.sass.count("FFMA") <= division


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_the_ptx_of_an_activation_is_in_the_key_of_its_kernel(
    name: str, launches: Launches
) -> None:
    """Triton hashes no globals of functions at compile time: it would run the PTX of before."""
    sources = grad, gate, up = sources_of((300, 576))
    made = producers_of(name, sources, COLUMNWISE)
    made.gated(gate, up, "gelu", *COLUMNWISE)
    made.gated_backward(grad, gate, up, "gelu", *COLUMNWISE)
    value, beside, gradient = (word_ptx("gelu", role, BF16) for role in get_args(Role))
    wanted = [(value, None), (gradient, beside)]
    assert [launch.constants["DETAIL"] for launch in launches] == wanted


def test_gradients_of_swiglu_spill_little_with_every_triton(launches: Launches) -> None:
    sources, formats = sources_of((4096, 14336)), BOTH_FORMS
    producers_of("gluon", sources, formats).gated_backward(*sources, "silu", *formats)
    assert compile_for_sm90(launches.pop()).spilled_bytes <= 64
