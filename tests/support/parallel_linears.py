"""Tensor parallel models, and what they compute: in one process, whole and as sums over parts.

A partial sum is emulated as a product with all of the weight, of an input or gradient whose columns
on other ranks are zeros: parts of the weight are not made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from blocktensor import Recipe, convert, to_blockwise_fp8_weights
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from blocktensor.ops.cast.ops import quantize_both, quantize_forms, quantize_rowwise, transpose
from blocktensor.ops.gemm.ops import gemm
from blocktensor.recipe import DEFAULT_RECIPE
from tests.support.numeric import assert_same

BF16 = torch.bfloat16
DIM, HEAD = 256, 64


@contextmanager
def one_backend(device: str) -> Iterator[None]:
    """On GPUs, one kernel for the products of wholes and of parts: others sum in other orders."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cuda":
            patch.setenv("BLOCKTENSOR_GEMM", "triton")
        yield


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def my_part(mesh: DeviceMesh, x: Tensor, dim: int) -> Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()


class Computed(NamedTuple):
    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor]


def compute(model: nn.Module, x: Tensor, grad: Tensor) -> Computed:
    """A forward and a backward; gradients are the local parts, of those that are there."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    assert x.grad is not None
    grads = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return Computed(y.detach(), x.grad, grads)


def assert_alike(got: Computed, want: Computed) -> None:
    """The same bits; no gradient is zero throughout."""
    assert_same(got.y, want.y)
    assert_same(got.dx, want.dx)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in got.grads.items():
        assert grad.any(), name
        assert_same(grad, want.grads[name])


# One linear


def plain(n: int, k: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias).to(dtype)


def converted(
    n: int = 256,
    k: int = 256,
    bias: bool = False,
    dtype: torch.dtype = BF16,
    recipe: Recipe | None = None,
) -> nn.Linear:
    module = plain(n, k, bias, dtype)
    to_blockwise_fp8_weights(module, recipe)
    return module


def masked(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """``x[..., C]`` flattened to rows, with zeros in the columns that other ranks have."""
    x = x.reshape(-1, x.shape[-1])
    made = torch.zeros_like(x)
    made.chunk(mesh.size(), 1)[mesh.get_local_rank()].copy_(my_part(mesh, x, 1))
    return made


def partial(module: Any, x: Tensor, mesh: DeviceMesh, wire: torch.dtype, dgrad: bool) -> Tensor:
    """Return this rank's share of the output for ``x``; with ``dgrad``, of the data gradient."""
    weight = module.weight
    w = quantize_rowwise(weight.master.detach(), weight.format)
    recipe = weight.recipe
    format = recipe.gradient_format if dgrad else recipe.activation_format
    row, _ = quantize_both(masked(x, mesh), format)
    return gemm(row, transpose(w) if dgrad else w, None, wire)


def of_all(mesh: DeviceMesh, partial: Tensor) -> list[Tensor]:
    """The partial sums of all ranks."""
    partials = [torch.empty_like(partial) for _ in range(mesh.size())]
    dist.all_gather(partials, partial, mesh.get_group())
    return partials


def in_order(partials: list[Tensor]) -> Tensor:
    """The fp32 sum from the first rank to the last."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total


def summed(
    module: Any, x: Tensor, mesh: DeviceMesh, wire: torch.dtype | None, dgrad: bool = False
) -> Tensor:
    """The output of a linear whose inputs are cut: partial sums, added in order, and the bias.

    With ``dgrad``, the data gradient of one whose outputs are cut.
    """
    total = in_order(of_all(mesh, partial(module, x, mesh, wire or x.dtype, dgrad)))
    if module.bias is not None and not dgrad:
        total = total + module.bias.detach().float()
    return total.to(x.dtype).view(*x.shape[:-1], -1)


def wgrad_of_part(module: Any, x: Tensor, grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """The weight gradient of a linear whose inputs are cut, in columns of this rank."""
    recipe, format = module.weight.recipe, module.weight.recipe.wgrad_input_format
    rows = grad.reshape(-1, grad.shape[-1])
    if format is None:
        return rows.t() @ my_part(mesh, x, -1).flatten(0, -2)
    _, x_col = quantize_forms(masked(x, mesh), None, format)
    _, g_col = quantize_forms(rows, None, recipe.gradient_format)
    assert g_col is not None and x_col is not None
    return my_part(mesh, gemm(g_col, x_col, None, module.weight.dtype), 1)


def summed_dbias(grad: Tensor, dim: int, ranks: int) -> Tensor:
    """The gradient of a bias of tokens cut along ``dim``: partial sums, added in order."""
    parts = grad.chunk(ranks, dim=dim)
    sums = [part.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32) for part in parts]
    return in_order(sums).to(grad.dtype)


# A decoder block


class Attention(nn.Module):
    def __init__(self, kv: int) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=True)
        self.k, self.v = (nn.Linear(DIM, kv, bias=False) for _ in range(2))
        self.o = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, DIM, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then SwiGLU; of 2 ranks, each has 64 rows of k and v and 192 of gate and up."""

    def __init__(self, kv: int = 128, hidden: int = 384) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.mlp = Attention(kv), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def block(recipe: Recipe | None = DEFAULT_RECIPE, dtype: torch.dtype = BF16, **sizes: int) -> Block:
    """One of the same values on every rank, converted if there is a recipe."""
    torch.manual_seed(0)
    made = Block(**sizes).to(dtype)
    if recipe is not None:
        convert(made, recipe, skip_small=False)
    return made


def parallel_block(
    mesh: DeviceMesh, sequence: bool = True, recipe: Recipe | None = DEFAULT_RECIPE, **options: Any
) -> Block:
    """A :func:`block` that is tensor parallel; with ``sequence``, tokens are cut too."""
    tokens = Shard(1) if sequence else Replicate()
    norm = SequenceParallel(use_local_output=True)
    prepare = PrepareModuleInput(
        input_layouts=tokens, desired_input_layouts=Replicate(), in_rank_order=True
    )
    colwise = ColwiseParallel(in_rank_order=True)
    rowwise = RowwiseParallel(output_layouts=tokens, in_rank_order=True)
    plan = {
        **{"attention": prepare, "attention.o": rowwise, "mlp": prepare, "mlp.down": rowwise},
        **{f"attention.{name}": colwise for name in "qkv"},
        **{f"mlp.{name}": colwise for name in ("gate", "up")},
        **({"norm1": norm, "norm2": norm} if sequence else {}),
    }
    made: Block = parallelize_module(block(recipe, **options).to(mesh.device_type), mesh, plan)
    return made


def tokens_of(mesh: DeviceMesh, x: Tensor, sequence: bool = True) -> Tensor:
    """This rank's tokens of ``x[batch, time, DIM]``."""
    return my_part(mesh, x, 1) if sequence else x


def batch(seed: int, tokens: int = 256) -> Tensor:
    return drawn((2, tokens, DIM), BF16, seed)


def batches(mesh: DeviceMesh, tokens: int = 256, sequence: bool = True) -> tuple[Tensor, Tensor]:
    """This rank's tokens of an input, and of the gradient of the output."""
    x, grad = (batch(seed, tokens).to(mesh.device_type) for seed in (1, 2))
    return tokens_of(mesh, x, sequence), tokens_of(mesh, grad, sequence)
