"""Saved tensors in plain torch: each rounded by the reference, in place of what was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from blocktensor import convert
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128
from tests.support.models import randn


def in_rows(x: Tensor) -> Tensor:
    """The values of ``x[R, C]`` after a cast to e4m3 in 1x128 blocks."""
    return reference.dequantize(reference.quantize_rowwise(x, BLOCKS_1X128), x.dtype)


@torch.no_grad()
def rounded(x: Tensor) -> Tensor:
    """The values of ``x`` after a cast of the tensor that it is a view of, row by row.

    Blocks of rows of less than 128 elements end where 128 elements of memory do.
    """
    base = x if x._base is None else x._base
    base = base.permute(sorted(range(base.ndim), key=base.stride, reverse=True))
    assert base.is_contiguous()
    values = in_rows(base.reshape(-1, max(128, base.shape[-1]))).flatten()
    made = values.as_strided(x.shape, x.stride(), x.storage_offset() - base.storage_offset())
    return made.clone()


def is_activation(x: Tensor) -> bool:
    """True for a tensor that autograd has computed, and not in the heads of attention."""
    base = x if x._base is None else x._base
    is_in_heads = x.ndim > 3 or (x.ndim == 3 and x.shape[-1] <= 256)
    return x.requires_grad and not base.is_leaf and x.numel() >= 4096 and not is_in_heads


def rounding(chosen: Callable[[Tensor], bool] = is_activation) -> saved_tensors_hooks:
    """Hooks that round the ``chosen`` tensors, unless their memory is kept for others."""
    kept: dict[int, StorageWeakRef] = {}

    def pack(x: Tensor) -> Tensor:
        if type(x) is Tensor:
            storage = x.untyped_storage()
            if chosen(x) and storage._cdata not in kept:
                return rounded(x)
            kept[storage._cdata] = StorageWeakRef(storage)
        return x.detach()

    return saved_tensors_hooks(pack, lambda x: x)


T, K = 32, 512


class Block(nn.Module):
    """A norm, heads, an MLP and a residual, like a transformer's."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, dtype=dtype)
        self.qkv = nn.Linear(K, 3 * K, bias=False, dtype=dtype)
        self.out = nn.Linear(K, K, bias=False, dtype=dtype)
        self.up = nn.Linear(K, 2 * K, bias=False, dtype=dtype)
        self.down = nn.Linear(2 * K, K, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:-1], 4, 128).transpose(-2, -3)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        x = x + self.out(attended)
        return x + self.down(F.silu(self.up(x)))


def model(fp8: bool = False, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, K, dtype=dtype), *(Block(dtype) for _ in range(layers)))
    if fp8:
        convert(made, skip_small=False)
    return made


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(K, K), nn.SiLU(), nn.Linear(K, K)).bfloat16()


def data(dtype: torch.dtype = torch.bfloat16, device: Any = "cpu") -> Tensor:
    return randn(2, T, K, dtype=dtype, device=device)


def gradients(made: nn.Module, run: Callable[..., Tensor], context: Any) -> list[Tensor]:
    """The gradients of all parameters, after a forward in a context, with the loss outside."""
    made.zero_grad()
    first = next(made.parameters())
    with context:
        y = run(data(first.dtype, first.device))
    y.float().square().mean().backward()
    return [p.grad.clone() for p in made.parameters() if p.grad is not None]


def assert_bits(made: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(made) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
