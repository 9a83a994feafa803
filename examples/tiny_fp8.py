"""DeepSeek-V3's blockwise FP8 training on one page of plain torch.

    python examples/tiny_fp8.py      trains a small MLP in bf16 and in FP8, on a CPU or a GPU

A linear layer is three matmuls, and all three can run in FP8, at twice the rate of bf16:

    fprop   y  = x   · w^T   [M, N]  contracts K, the input features
    dgrad   dx = g   · w     [M, K]  contracts N, the output features
    wgrad   dw = g^T · x     [N, K]  contracts M, the tokens

**Why blocks.** e4m3 has 4 significant bits and reaches from 2^-9 to 448. One scale for a whole
tensor would let one outlier push everything else below 2^-9. So every block gets a scale of its
own, amax / 448, and an outlier only costs its neighbours precision. A value is data * scale.

- Activations and gradients: blocks of 1x128, 128 neighbours along the contraction. Outliers sit in
  few tokens or few features, and a block contains only one token (or, columnwise, one feature).
- Weights: blocks of 128x128. They vary less, so coarse blocks cost little; and a square block stays
  a block under transposition, so that one cast serves both fprop and dgrad.
- The x that wgrad reads: 128x128, too. A matmul is faster if one side has such blocks, and whole
  training runs end with the same loss. DeepSeek-V3 has 1x128 blocks there.

**Why two forms.** FP8 tensor cores read operands that are contiguous along the contraction. A
matrix is contracted along its rows in one matmul and along its columns in another, so it has two
FP8 forms: *rowwise*, and *columnwise*, which is the rowwise form of the transpose. With them
every matmul has one rule, mm(a, b) = gemm(a.rowwise, b.columnwise):

    fprop   x.rowwise      w.rowwise       1x128 · 128x128
    dgrad   g.rowwise      w.columnwise    1x128 · 128x128
    wgrad   g.columnwise   x.columnwise    1x128 · 128x128

(A transpose swaps the names: the columnwise form of w^T is the rowwise form of w.) The columnwise
form of a weight is the exact transpose of its bytes. For x and g it is a second cast from high
precision: the blocks are others, and a cast of the FP8 values would round twice.

**Why partial sums.** Hopper's FP8 tensor cores sum with about 14 bits. DeepSeek-V3 therefore lets
them sum only 128 products at a time, one block of the contraction, multiplies this partial product
by the scales of both blocks, and adds it to a sum in fp32.

**What it costs.** Casts read x, w and g in high precision and write one byte an element: small
linear layers lose more there than the matmuls gain. The master weight, the optimizer and everything
between linear layers stay in high precision. Backward reads x in its columnwise form only, so it
saves that, half the bytes of a bf16 x.

**What is missing here.** Speed: this file computes the numbers in fp32 matmuls. blocktensor is the
same arithmetic in kernels that cast x in one read and run the GEMM on tensor cores, and it knows
FSDP2, torch.compile, experts and checkpoints. tests/examples/test_tiny_fp8.py compares both, bit
for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 128
E4M3_MAX = 448.0


class Quantized(NamedTuple):
    """A matrix in FP8; value = data * scale, where each block has one scale.

    ``data[R, C]`` is e4m3 and contiguous along C, the contraction. ``scale`` is fp32,
    ``[R, ceil(C / 128)]`` for 1x128 blocks and ``[ceil(R / 128), ceil(C / 128)]`` for 128x128.
    """

    data: Tensor
    scale: Tensor
    block_rows: int  # 1 or 128


def quantize(x: Tensor, block_rows: int) -> Quantized:
    """Cast ``x[R, C]`` in blocks of ``block_rows`` x 128; a partial block at an edge is a block."""
    rows, cols = x.shape
    wide = F.pad(x.float(), (0, -cols % BLOCK, 0, -rows % block_rows))
    # [block, row in it, block, column in it]
    blocks = wide.view(len(wide) // block_rows, block_rows, wide.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax((1, 3))
    # On CUDA, a tensor divided by a Python number is multiplied by its rounded reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(scale == 0, 1.0, scale)  # a block of zeros, or so small that amax/448 is 0
    # NaN and Inf show: NaN or Inf in a block becomes its amax and scale, and so all its values NaN.
    data = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    data = torch.where(data.isnan(), torch.nan, data)  # a CPU may have made a NaN with a sign
    data = data.to(torch.float8_e4m3fn)  # rounds to nearest, ties to even
    return Quantized(data.view_as(wide)[:rows, :cols].contiguous(), scale, block_rows)


def transpose(w: Quantized) -> Quantized:
    """Return the columnwise form of 128x128 blocks: the same bytes, no second rounding."""
    assert w.block_rows == BLOCK
    return Quantized(w.data.t().contiguous(), w.scale.t(), BLOCK)


def dequantize(x: Quantized) -> Tensor:
    """Return the fp32 values. Training never needs them: matmuls read data and scales."""
    rows, cols = x.data.shape
    scale = x.scale.repeat_interleave(x.block_rows, 0)[:rows]
    return x.data.float() * scale.repeat_interleave(BLOCK, 1)[:, :cols]


def gemm(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``out[M, N] = A[M, K] B[N, K]^T (+ bias[N])``, rounded once, at the end."""
    m, n = len(a.data), len(b.data)
    a_data, b_data = a.data.double(), b.data.double()  # fp64 holds the sum of a block exactly
    a_scale = a.scale.repeat_interleave(a.block_rows, 0)[:m]  # [M, blocks of K]
    b_scale = b.scale.repeat_interleave(b.block_rows, 0)[:n]  # [N, blocks of K]
    out = torch.zeros(m, n, device=a.data.device)
    for block in range(a_scale.shape[1]):
        inside = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = (a_data[:, inside] @ b_data[:, inside].t()).float()
        out += partial * a_scale[:, block, None] * b_scale[:, block]
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


class FP8Linear(torch.autograd.Function):
    """``x[M, K] w[N, K]^T (+ bias[N])`` with fprop, dgrad and wgrad in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        x_row, x_col = quantize(x, 1), quantize(x.t(), BLOCK)  # a kernel does both in one read
        w_row = quantize(w, BLOCK)
        ctx.save_for_backward(x_col.data, x_col.scale, w_row.data, w_row.scale)
        ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
        return gemm(x_row, w_row, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad
        dx = dw = dbias = None
        if needs_dx:
            w_col = transpose(Quantized(w_data, w_scale, BLOCK))
            dx = gemm(quantize(g, 1), w_col, None, x_dtype)
        if needs_dw:
            x_col = Quantized(x_data, x_scale, BLOCK)
            dw = gemm(quantize(g.t(), 1), x_col, None, w_dtype)
        if needs_dbias:
            dbias = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, dbias


class Linear(nn.Linear):
    """``nn.Linear`` in FP8. Its weight stays the fp32 or bf16 master that the optimizer updates."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y: Tensor = FP8Linear.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return y.view(*x.shape[:-1], len(self.weight))


def train(linear: type[nn.Linear], device: str, steps: int) -> list[float]:
    """Train an MLP to name the class that a random matrix gives to random inputs; its losses."""
    torch.manual_seed(0)  # the same weights and data for every kind of linear
    losses = []
    wanted = torch.randn(256, 10, device=device)
    model = nn.Sequential(linear(256, 512), nn.GELU(), linear(512, 512), nn.GELU(), linear(512, 10))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(512, 256, device=device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), (x @ wanted).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(steps: int = 60) -> None:
    """Train in bf16 and in FP8, and print both losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("step   bf16    FP8")
    both = zip(train(nn.Linear, device, steps), train(Linear, device, steps), strict=True)
    for step, (bf16, fp8) in enumerate(both, start=1):
        if step == 1 or step % 10 == 0 or step == steps:
            print(f"{step:4} {bf16:6.3f} {fp8:6.3f}")


if __name__ == "__main__":
    main()
