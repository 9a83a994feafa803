"""Device functions that store accumulators."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...runtime.triton_compat.gluon import async_store
from .promotion import halves

CHUNK = gl.constexpr(32)  # columns of an output buffer


@dataclass(frozen=True)
class Output:
    """The choices by which a GEMM writes its sums: a constant of the kernel.

    Attributes:
        tma: True if TMA can address the output's rows; otherwise stores are masked.
        bias: True if a bias is added.
        split: True if the output holds the sums of several parts of K, one below the other.
        clip: True if a tile may contain rows of other groups, which a store by TMA would overwrite:
            row waves at the edges of groups are stored with masks.
    """

    tma: bool
    bias: bool = False
    split: bool = False
    clip: bool = False


@gluon.jit
def _columns(like, col):
    return col + gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))


@gluon.jit
def _with_bias(x, bias, col, N):
    cols = _columns(x, col)
    return x + gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _chunks(parts, PARTS: gl.constexpr):
    chunks = ()
    for i in gl.static_range(PARTS):
        chunks = chunks + halves(parts[i])
    return chunks


@gluon.jit
def _send(chunks, out, out_s, row, col, WAVE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    # Stores through the warpgroup's buffers, as many chunks at a time as they hold. Buffers for two
    # waves are used in turn; otherwise a chunk waits for a buffer that the same wave has filled.
    COUNT: gl.constexpr = T.cols * T.width // CHUNK
    BUFFERS: gl.constexpr = T.out_buffers(out.dtype.primitive_bitwidth)
    ALTERNATE: gl.constexpr = BUFFERS >= 2 * COUNT and BUFFERS % COUNT == 0
    BATCH: gl.constexpr = COUNT if COUNT < BUFFERS else BUFFERS
    BASE: gl.constexpr = WAVE * COUNT % BUFFERS if ALTERNATE else 0
    for i in gl.static_range(COUNT):
        if i == 0:
            tma.store_wait(BUFFERS - COUNT if ALTERNATE and WAVE > 0 else 0)
        elif i % BATCH == 0:
            tma.store_wait(0 if COUNT - i > BATCH else BATCH - (COUNT - i))
        out_s[WG * BUFFERS + BASE + i % BATCH].store(chunks[i].to(out.dtype))
        if i % BATCH == BATCH - 1 or i == COUNT - 1:
            fence_async_shared()
            for j in gl.static_range(i // BATCH * BATCH, i + 1):
                full = out_s[WG * BUFFERS + BASE + j % BATCH]
                async_store(out, [row, col + j * CHUNK], full)


@gluon.jit
def _inside(rows, cols, begin, M, N, OUT: gl.constexpr):
    # Elements that exist; with OUT.clip, only in rows from `begin` on.
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if OUT.clip:
        inside = inside & (rows >= begin)[:, None]
    return inside


@gluon.jit
def _store_masked(x, out, row, col, begin, M, N, out_ld, OUT: gl.constexpr):
    # For rows that TMA cannot address, whose length is no multiple of 16 bytes.
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    cols = _columns(x, col)
    inside = _inside(rows, cols, begin, M, N, OUT)
    target = out + (rows.to(gl.int64)[:, None] * out_ld + cols[None, :])
    gl.store(target, x.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _store_clipped(parts, target, row, col, begin, M, N, WG: gl.constexpr, T: gl.constexpr):
    # A row wave at the edge of a group: through the buffers, from which whole vectors are stored.
    out, out_ptr, out_ld, out_s, _, _ = target
    PARTS: gl.constexpr = T.cols * T.pieces
    BITS: gl.constexpr = out.dtype.primitive_bitwidth
    BUFFERS: gl.constexpr = T.out_buffers(BITS)
    COUNT: gl.constexpr = T.cols * T.width // CHUNK
    VECTOR: gl.constexpr = 128 // BITS
    LANES: gl.constexpr = CHUNK // VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    chunks = _chunks(parts, PARTS)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    kept = (rows >= begin) & (rows < M)
    place = out_ptr + rows.to(gl.int64)[:, None] * out_ld
    tma.store_wait(0)
    for i in gl.static_range(COUNT):
        buffer = out_s[WG * BUFFERS + i % BUFFERS]
        buffer.store(chunks[i].to(out.dtype))
        values = buffer.load(LAYOUT)
        cols = col + i * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
        # TMA can address the rows, so that N is a multiple of a vector
        inside = kept[:, None] & (cols // VECTOR < N // VECTOR)[None, :]
        gl.store(place + cols[None, :], values, mask=inside)


@gluon.jit
def store_wave(
    parts,
    target,
    row,
    col,
    begin,
    M,
    N,
    WAVE: gl.constexpr,
    WG: gl.constexpr,
    OUT: gl.constexpr,
    T: gl.constexpr,
):
    # Stores row wave WAVE of warpgroup WG at [row, col]: tensors [64, 64] from left to right.
    # A bias is added to columns below `biased`. `begin` is read if OUT.clip.
    _, _, _, _, bias, biased = target
    PARTS: gl.constexpr = T.cols * T.pieces
    if OUT.bias:
        for i in gl.static_range(PARTS):
            parts = parts[:i] + (_with_bias(parts[i], bias, col + i * 64, biased),) + parts[i + 1 :]
    if OUT.clip and OUT.tma:
        if (row >= begin) & (row + 64 <= M):
            _store_whole(parts, target, row, col, begin, M, N, WAVE, WG, OUT, T)
        elif (row + 64 > begin) & (row < M):
            _store_clipped(parts, target, row, col, begin, M, N, WG, T)
    else:
        _store_whole(parts, target, row, col, begin, M, N, WAVE, WG, OUT, T)


@gluon.jit
def _store_whole(
    parts,
    target,
    row,
    col,
    begin,
    M,
    N,
    WAVE: gl.constexpr,
    WG: gl.constexpr,
    OUT: gl.constexpr,
    T: gl.constexpr,
):
    out, _, out_ld, out_s, _, _ = target
    PARTS: gl.constexpr = T.cols * T.pieces
    if OUT.tma:
        _send(_chunks(parts, PARTS), out, out_s, row, col, WAVE, WG, T)
    else:
        for i in gl.static_range(PARTS):
            _store_masked(parts[i], out, row, col + i * 64, begin, M, N, out_ld, OUT)
