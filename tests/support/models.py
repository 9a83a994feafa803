"""Shared by the tests: small models, the specification spelled out, and instruments."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    Scales,
    functional,
    to_blockwise_fp8_weights,
)
from blocktensor.ops import reference
from blocktensor.reports import ConversionReport

ROW = (1, 128)
SQUARE = (128, 128)
INNER = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")
FP32_SCALES = Recipe()
POWER_OF_TWO = Recipe(scale="power_of_two")
X_IN_POWERS = Recipe(scale=Scales(activations="power_of_two"))
RECIPES = (FP32_SCALES, POWER_OF_TWO, X_IN_POWERS)
FP8_TYPES = (BlockwiseFP8Tensor, BlockwiseFP8Weight)


def randn(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    grad: bool = False,
) -> Tensor:
    """Normal data, the same on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_(grad)


def with_outliers(*shape: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Normal bf16 data with one entry in a hundred a hundred times larger."""
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 10**6)) < 0.01
    x = randn(*shape, seed=seed)
    return torch.where(chosen, x * 100, x).to(device)


def linear(
    n: int,
    k: int,
    *,
    recipe: Recipe = FP32_SCALES,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    frozen: bool = False,
) -> nn.Linear:
    """A converted nn.Linear with weights of ordinary size."""
    module = nn.Linear(k, n, bias=bias, dtype=dtype, device=device)
    with torch.no_grad():
        module.weight.copy_(randn(n, k, seed=1, dtype=dtype) / math.sqrt(k))
        if bias:
            module.bias.copy_(randn(n, seed=2, dtype=dtype))
    module.weight.requires_grad_(not frozen)
    to_blockwise_fp8_weights(module, recipe)
    return module


def pair(
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    recipe: Recipe = FP32_SCALES,
) -> tuple[nn.Linear, nn.Linear]:
    """A plain linear and its converted twin."""
    converted = linear(n, k, dtype=dtype, bias=bias, recipe=recipe)
    ordinary = nn.Linear(k, n, bias=bias, dtype=dtype)
    ordinary.load_state_dict(converted.state_dict())
    return ordinary, converted


def assert_twins(ordinary: nn.Linear, converted: nn.Linear) -> None:
    """Equal values, and products of the FP8 one from these values."""
    w = converted.weight
    assert isinstance(w, BlockwiseFP8Weight) and isinstance(w, nn.Parameter)
    assert torch.equal(w.master, ordinary.weight)
    assert w.cache.master.data_ptr() == w.master.data_ptr()
    x = randn(5, w.shape[1], dtype=w.dtype)
    wanted = functional.linear(x, plain(ordinary.weight), converted.bias, recipe=w.recipe)
    assert torch.equal(converted(x), wanted)


DIM = 64
TOKENS = torch.arange(12).view(2, 6)
LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
"""The linears of a :class:`Model` that ``convert`` converts."""


def in_a_layer(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` in the forward of a module.

    Without gradients, products elsewhere are arithmetic on the values of weights.
    """

    class Layer(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

    return Layer()


class HeadGroups(nn.Linear):
    """Views its weight as one matrix for each group of heads, as DeepSeek-V4's attention does."""

    def __init__(self, groups: int, n: int, k: int) -> None:
        super().__init__(k, groups * n, bias=False)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x[T, K * groups]``, each group of features by a matrix of its own."""
        groups = x.unflatten(-1, (self.groups, self.in_features)).transpose(0, 1)
        w = self.weight.view(self.groups, -1, self.in_features).transpose(1, 2)
        return torch.bmm(groups, w).transpose(0, 1).flatten(1)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A language model as small as they come; the head may share the embedding's weight."""

    def __init__(self, dim: int = DIM, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.add_module(head, nn.Linear(dim, 50, bias=False))
        if tied:
            getattr(self, head).weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embed, blocks, head = self.children()
        return head(nn.Sequential(*blocks)(embed(tokens)))


def converted_names(model: nn.Module) -> list[str]:
    """The names of the modules whose weight is in FP8."""
    modules = model.named_modules()
    return [name for name, m in modules if isinstance(getattr(m, "weight", None), FP8_TYPES)]


def reasons(report: ConversionReport) -> dict[str, str]:
    """Why each module that a conversion left alone was left alone."""
    return {entry.name: entry.reason for entry in report.skipped}


def both_kinds(w: Tensor) -> dict[str, Tensor]:
    """A trainable and a frozen FP8 weight of these values."""
    return {
        "weight": nn.Parameter(BlockwiseFP8Weight(w.clone())),
        "tensor": BlockwiseFP8Tensor.from_values(w, SQUARE),
    }


def unaligned(x: Tensor) -> Tensor:
    """A copy whose address is no multiple of 16."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def plain(w: Tensor) -> Tensor:
    """The high-precision values of a weight, as a plain tensor of their own."""
    return (w.master if isinstance(w, BlockwiseFP8Weight) else w).detach().clone()


def quantized(
    *shape: int, block: tuple[int, int] = ROW, device: torch.device | str = "cpu", **kwargs: Any
) -> BlockwiseFP8Tensor:
    """Normal data in FP8."""
    return BlockwiseFP8Tensor.from_values(randn(*shape, device=device), block, **kwargs)


def inner(x: BlockwiseFP8Tensor) -> dict[str, Tensor]:
    """The tensors that ``x`` holds, by name."""
    return {name: getattr(x, name) for name in INNER if getattr(x, name) is not None}


def assert_same_bytes(a: Tensor, b: Tensor) -> None:
    """Equal shapes, dtypes and bits; for a cast's data and scales."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    assert torch.equal(a, b)


def assert_same(a: BlockwiseFP8Tensor, b: BlockwiseFP8Tensor) -> None:
    """Equal in every respect, bytes and labels."""
    assert type(a) is type(b) is BlockwiseFP8Tensor
    for name in ("shape", "dtype", "device", "block_shape", "recipe"):
        assert getattr(a, name) == getattr(b, name)
    assert a.stride() == b.stride()
    assert inner(a).keys() == inner(b).keys()
    for name, tensor in inner(a).items():
        assert_same_bytes(tensor, getattr(b, name))


def pointers(x: BlockwiseFP8Tensor) -> dict[str, int]:
    """Where the tensors that ``x`` holds lie."""
    return {name: tensor.data_ptr() for name, tensor in inner(x).items()}


def composed(
    x: Tensor, w: Tensor, grad: Tensor, recipe: Recipe = FP32_SCALES, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a linear, written out with the reference ops alone; matrices only."""
    of_x, of_grad, squares = recipe.activation_format, recipe.gradient_format, recipe.weight_format
    x_col = reference.quantize_columnwise(x, recipe.wgrad_input_format or of_x)
    cast = reference.quantize_rowwise
    y = reference.gemm(cast(x, of_x), cast(w, squares), bias, x.dtype)
    dx = reference.gemm(cast(grad, of_grad), cast(w.t().contiguous(), squares), None, x.dtype)
    dw = reference.gemm(cast(grad.t(), of_grad), x_col, None, w.dtype)
    return y, dx, dw


def assert_matches(actual: Tensor, expected: Tensor) -> None:
    """Bit-equal on the CPU; on a GPU equal but for the order of fp32 sums."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.device.type == "cpu":
        assert torch.equal(actual, expected)
        return
    bound = 2e-4 if actual.dtype == torch.float32 else 4e-3
    error = (actual.double() - expected.double()).norm()
    assert error <= bound * expected.double().norm(), f"relative error {error / expected.norm()}"


def complaint(kind: type[Exception], run: Callable[[], Any]) -> str:
    """The text of the exception of exactly this type that ``run`` raises, in short lines."""
    with pytest.raises(kind) as error:
        run()
    assert type(error.value) is kind
    return textwrap.fill(str(error.value), 84)


_VIEWS = ("detach", "alias", "view", "_unsafe_view", "t", "transpose", "expand", "permute")


class Trace(TorchDispatchMode):
    """The names of the ops that run, views of plain tensors left out.

    Ops inside the FP8 types' own dispatch are among them. The package's ops are named with their
    formats, such as "blocktensor.gemm 1x128 128x128".
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).removesuffix(".default")
        fp8 = sorted(
            {type(x).__name__ for x in tree_leaves((args, kwargs)) if type(x) in FP8_TYPES}
        )
        if fp8:
            self.ops.append(f"{name} of {' and '.join(fp8)}")
            return NotImplemented  # hands the op to the tensor's type, with this mode still on
        if func.namespace == "blocktensor":
            self.ops.append(" ".join([name, *(x for x in args if isinstance(x, str))]))
        elif func.overloadpacket.__name__ not in _VIEWS:
            self.ops.append(name)
        return func(*args, **(kwargs or {}))

    def count(self, part: str) -> int:
        """How many ops have ``part`` in their name."""
        return sum(part in op for op in self.ops)


class Rounded(torch.autograd.Function):
    """Straight-through rounding to three values, in several operations."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        scale = w.abs().amax(1, keepdim=True)
        return (w / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Conv1D(nn.Module):
    """The linear of GPT-2, whose weight is ``[K, N]``; as transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"
