"""Device functions that bring accumulators to memory."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .products import halves

CHUNK = gl.constexpr(32)  # columns of an output buffer


@builtin
def _reduce_add(desc, coord, source, _semantic=None):
    # cp.reduce.async.bulk.tensor: Triton 3.6 builds it, but Gluon has no name for it.
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle
    )


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
        if parts[i].shape[1] == CHUNK:
            chunks = chunks + (parts[i],)
        else:
            chunks = chunks + halves(parts[i])
    return chunks


@gluon.jit
def _send(
    chunks, out, out_s, row, col, WAVE: gl.constexpr, WG: gl.constexpr, ADD: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    # Through the warpgroup's buffers, as many chunks at a time as they hold. Where they hold two
    # waves, waves alternate; else a buffer is awaited that the same wave has filled before.
    COUNT: gl.constexpr = T.cols * T.width // CHUNK
    BUFFERS: gl.constexpr = out_s.shape[0] // T.warpgroups
    ALTERNATE: gl.constexpr = BUFFERS >= 2 * COUNT and BUFFERS % COUNT == 0
    BATCH: gl.constexpr = COUNT if COUNT < BUFFERS else BUFFERS
    BASE: gl.constexpr = WAVE * COUNT % BUFFERS if ALTERNATE else 0
    for i in gl.static_range(COUNT):
        if i == 0:
            tma.store_wait(BUFFERS - COUNT if ALTERNATE and WAVE > 0 else 0)
        elif i % BATCH == 0:
            tma.store_wait(0 if COUNT - i > BATCH else BATCH - (COUNT - i))
        buffer = out_s.index(WG * BUFFERS + BASE + i % BATCH)
        if T.turned:
            buffer = buffer.permute((1, 0))
        buffer.store(chunks[i].to(out.dtype))
        if i % BATCH == BATCH - 1 or i == COUNT - 1:
            fence_async_shared()
            for j in gl.static_range(i // BATCH * BATCH, i + 1):
                at = col + j * CHUNK
                place = (at, row) if T.turned else (row, at)
                full = out_s.index(WG * BUFFERS + BASE + j % BATCH)
                if ADD:
                    _reduce_add(out, [place[0], place[1]], full)
                else:
                    tma.async_copy_shared_to_global(out, [place[0], place[1]], full)


@gluon.jit
def _store_masked(x, out, row, col, M, N, out_ld, T: gl.constexpr):
    # For rows that TMA cannot address, whose length is no multiple of 16 bytes.
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    cols = _columns(x, col)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if T.turned:
        target = out + (cols.to(gl.int64)[None, :] * out_ld + rows[:, None])
    else:
        target = out + (rows.to(gl.int64)[:, None] * out_ld + cols[None, :])
    gl.store(target, x.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def store_wave(
    parts,
    out,
    out_s,
    bias,
    row,
    col,
    M,
    N,
    out_ld,
    WAVE: gl.constexpr,
    WG: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    TMA: gl.constexpr,
    T: gl.constexpr,
):
    # Row wave WAVE of warpgroup WG, tensors [64, 64 or 32] from left to right, to [row, col].
    PARTS: gl.constexpr = T.cols * T.pieces
    if BIAS:
        for i in gl.static_range(PARTS):
            parts = parts[:i] + (_with_bias(parts[i], bias, col + i * 64, N),) + parts[i + 1 :]
    if TMA:
        _send(_chunks(parts, PARTS), out, out_s, row, col, WAVE, WG, ADD, T)
    else:
        for i in gl.static_range(PARTS):
            _store_masked(parts[i], out, row, col + i * 64, M, N, out_ld, T)
