"""Repeated launches on a GPU: streams, threads, graphs, reused memory, tensor maps, fallbacks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import ModuleType

import pytest
import torch
from torch import Generator, Tensor

pytest.importorskip("triton")

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blocktensor.ops import reference
from blocktensor.ops.cast import ops as cast_ops
from blocktensor.ops.cast.ops import quantize_rowwise
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128, Quantized
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.runtime import build_player
from blocktensor.ops.runtime.launch import Launch
from blocktensor.ops.runtime.specialize import Specialized, recorded
from blocktensor.ops.runtime.triton_compat.gluon import async_load, async_store
from tests.support.numeric import assert_same, assert_same_forms, relative_error

pytestmark = pytest.mark.gpu

SHAPES = ((256, 512), (128, 384), (300, 576), (17, 130), (512, 256))


def draw(shape: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=rng, device="cuda").to(dtype)


def casts(x: Tensor, module: ModuleType = cast_ops) -> list[Quantized]:
    """The results of six launches."""
    square = module.quantize_rowwise(x, BLOCKS_128X128)
    return [
        module.quantize_rowwise(x, BLOCKS_1X128),
        module.quantize_columnwise(x, BLOCKS_1X128_POW2),
        *module.quantize_both(x, BLOCKS_1X128),
        square,
        module.transpose(square),
        *module.quantize_with_transpose(x, BLOCKS_128X128),
    ]


@pytest.fixture
def plays() -> Callable[[], int]:
    """Count repeated calls, so that a test cannot pass by launching in the ordinary way."""
    player = build_player.player()
    assert player is not None
    before = player.plays()
    return lambda: player.plays() - before


def test_memory_is_reused_by_other_shapes(plays: Callable[[], int]) -> None:
    dtypes = (torch.bfloat16, torch.float32)
    inputs = [draw(*each) for each in product(SHAPES, range(2), dtypes)]
    expected = [casts(x, reference) for x in inputs]
    for turn in range(200):
        i = turn * 7 % len(inputs)
        assert_same_forms(casts(inputs[i]), expected[i])
    assert plays() >= 6 * 180


def test_streams(plays: Callable[[], int]) -> None:
    x = draw((256, 512))
    casts(x), casts(x)
    expected = casts(x, reference)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    late = []
    for stream in streams:
        with torch.cuda.stream(stream):
            y = torch.zeros_like(x)
            torch.cuda._sleep(2_000_000)  # what runs on another stream would see the zeros
            y.copy_(x)
            late.append(casts(y))
    torch.cuda.synchronize()
    for results in late:
        assert_same_forms(results, expected)
    assert plays() >= 18


def test_threads(plays: Callable[[], int]) -> None:
    inputs = [draw(shape, seed) for seed, shape in enumerate(SHAPES)]
    expected = [casts(x, reference) for x in inputs]

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(first, first + 40):
                i = turn % len(inputs)
                assert_same_forms(casts(inputs[i]), expected[i])

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert plays() >= 4 * 30 * 6


def test_a_captured_graph_follows_its_inputs(plays: Callable[[], int]) -> None:
    x = draw((256, 512))
    torch.cuda.synchronize()  # the other stream reads x
    with torch.cuda.stream(torch.cuda.Stream()):
        casts(x), casts(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = casts(x)
    assert plays() >= 6
    for seed in (1, 2):
        x.copy_(draw((256, 512), seed))
        graph.replay()
        assert_same_forms(results, casts(x, reference))


@pytest.mark.multi_gpu
def test_tensors_of_another_device_than_the_current(plays: Callable[[], int]) -> None:
    for index in (1, 0, 1, 0, 1, 0, 1):
        x = draw((256, 512), index).to(f"cuda:{index}")
        results = casts(x)
        assert {y.device for made in results for y in (made.data, made.scale)} == {x.device}
        assert_same_forms(results, casts(x, reference))
        assert torch.cuda.current_device() == 0
    assert plays() >= 3 * 6


def test_deterministic_mode_fills_what_a_replay_leaves(plays: Callable[[], int]) -> None:
    a = quantize_rowwise(draw((130, 512)), BLOCKS_1X128)
    for _ in range(3):
        data, scale, _ = quantize_rowwise(draw((130, 512)), BLOCKS_1X128)
        padding = scale.as_strided((62, 4), (1, 192), 130)  # the leading dimension's last rows
        assert padding.isnan().all() == torch.are_deterministic_algorithms_enabled()
        assert_same(data, a.data)
    assert plays() >= 2


def test_gemms_replay(monkeypatch: pytest.MonkeyPatch, plays: Callable[[], int]) -> None:
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "triton")
    bias = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    for seed in range(4):
        for k in (512, 130):  # rows of 130 bytes are padded by a copy first
            a = quantize_rowwise(draw((256, k), seed), BLOCKS_1X128)
            b = quantize_rowwise(draw((128, k), seed + 9), BLOCKS_128X128)
            for added in (None, bias, bias.repeat_interleave(2)[::2]):
                out = gemm(a, b, bias=added, out_dtype=torch.float32)
                product = reference.gemm(a, b, None, torch.float32)
                wanted = product if added is None else product + added
                assert relative_error(out, wanted) <= 2e-4
    assert plays() >= 2 * 2 * 4


@pytest.mark.unchecked
def test_hooks_see_every_launch() -> None:
    x, seen = draw((256, 512)), []
    casts(x)
    enter, hook = triton.knobs.runtime.launch_enter_hook, seen.append
    enter.add(hook)
    try:
        results = casts(x)
    finally:
        enter.remove(hook)
    assert len(seen) == 6
    assert_same_forms(results, casts(x, reference))
    casts(x)
    assert len(seen) == 6


@gluon.jit
def copy_tile_kernel(source, target, rows):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    first = gl.program_id(0) * rows
    mbarrier.expect(ready, source.block_type.nbytes)
    async_load(source, [first, 0], ready, tile)
    mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    async_store(target, [first, 0], tile)
    tma.store_wait(0)


TILE = [16, 64]
needs_tma = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="TMA: sm_90"
)


def copy_by_tiles(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dtype = gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(TILE, dtype)
    source, target = (TensorDescriptor.from_tensor(t, TILE, layout) for t in (x, out))
    options = {"num_warps": 4, "enable_fp_fusion": False}
    Launch(copy_tile_kernel, (x.shape[0] // 16,), (source, target, 16), {}, options)()
    return out


@pytest.fixture
def copy() -> Specialized:
    return Specialized(lambda x: recorded(copy_by_tiles))


@needs_tma
def test_tensor_maps_follow_their_tensors(copy: Specialized, plays: Callable[[], int]) -> None:
    kept = []
    for turn in range(60):
        shape = ((64, 64), (32, 64), (64, 48))[turn % 3]
        x = draw(shape, turn, torch.float32 if turn % 2 else torch.bfloat16)
        y = copy(x)
        assert torch.equal(x, y)
        if turn % 4 == 0:
            kept.append((x, y))
    assert all(torch.equal(x, y) for x, y in kept)
    assert plays() == 54


@needs_tma
def test_a_recording_holds_its_kernel(copy: Specialized, plays: Callable[[], int]) -> None:
    """Triton drops a kernel that another thread compiles at the same time, and then unloads it."""
    x = draw((64, 64))
    for _ in range(3):
        copy(x)
    copy_tile_kernel.device_caches.clear()
    gc.collect()
    assert torch.equal(copy(x), x)
    assert plays() == 3
