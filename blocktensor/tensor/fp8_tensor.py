"""Define BlockwiseFP8Tensor: a matrix in blockwise FP8, with up to two forms of its bytes.

A matrix ``x[M, K]`` has a *rowwise* form (data ``[M, K]`` contiguous, blocks along K) and a
*columnwise* form (data ``[K, M]`` contiguous, blocks along M): FP8 tensor cores read operands
contiguous along the contraction only. ``x.t()`` swaps the two forms and moves no data, so that
every matmul is ``mm(a, b) = gemm(a.rowwise, b.columnwise)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..ops.cast import ops as cast
from ..ops.formats import BLOCKS_1X128, BlockFormat, Quantized, with_block_shape
from ..ops.runtime.specialize import PLAIN
from ..ops.scale_layouts import laid_out
from ..recipe import DEFAULT_RECIPE, Recipe, check_recipe
from .base import FP8Base, StraightThrough, interned, wrapper
from .operand import Operand, form_of, operand_of
from .refusals import refuse_one_tensor, refuse_rebuilding

ATEN_OPS: dict[Any, Callable[..., Any]] = {}
"""The ops of BlockwiseFP8Tensor below autograd, from ``tensor/aten``; other ops are refused."""

_PREPARED = ("prepared_data", "prepared_scale", "prepared_runs")
_INNER = (
    "rowwise_data",
    "rowwise_scale",
    "columnwise_data",
    "columnwise_scale",
    "source",
    *_PREPARED,
)


def _prepared_part(index: int) -> property:
    def part(self: BlockwiseFP8Tensor) -> Tensor | None:
        return None if self.prepared is None else self.prepared.parts[index]

    return property(part)


@dataclass(eq=False)
class Generation:
    """The version of the values in the bytes of a gathered weight; shared by all its aliases.

    Attributes:
        version: changes with every change of the values that PyTorch counts; None if the bytes are
            NaN, since the values have changed before a gather for a backward.
    """

    version: int | None = None

    def read(self, since: int | None = None) -> int:
        """Return the version of the values that a forward or backward is about to read.

        Args:
            since: in a backward, the version that its forward has read.

        Raises:
            RuntimeError: the values have changed since the forward, or are not from a forward.
        """
        if since is None and self.version is None:
            raise RuntimeError(
                "an FP8 weight that FSDP2 gathers was changed between a forward and a backward, "
                "which has left it gathered: call reset_iter_state() (torch 2.13) and reshard() of "
                "the FSDP modules before the next forward"
            )
        if since not in (None, self.version):
            raise RuntimeError(
                "an FP8 weight that FSDP2 gathers was changed or moved on this rank between a "
                "forward and its backward, which gathers it again: run backward before, or forward "
                "again after"
            )
        assert self.version is not None
        return self.version


class BlockwiseFP8Tensor(FP8Base):
    """A matrix (or a stack of weight matrices) in blockwise FP8. Immutable except by ``copy_``.

    To autograd it looks like a tensor of ``dtype`` (bf16, fp16 or fp32); its bytes are e4m3.
    Matmuls read it in FP8; ops that cannot run in FP8 raise and point to ``.dequantize()``.

    Attributes:
        rowwise_data, rowwise_scale: e4m3 ``[M, K]`` and fp32 ``[M, K/128]``, of 128x128 blocks
            ``[M/128, K/128]`` (rounded up), or None.
        columnwise_data, columnwise_scale: e4m3 ``[K, M]`` and fp32 ``[K, M/128]``, of 128x128
            blocks ``[K/128, M/128]`` (rounded up), or None. In the data of an activation M is
            rounded up to a multiple of 64, with zeros (``ops/scale_layouts.py``).
        rowwise_format, columnwise_format: the formats of both forms, held or not. They differ for
            activations that are cast with ``Recipe(wgrad_input="128x128")``.
        source: the tensor from which an activation was cast, if its recipe computes wgrad from it.
        source_version: the address and version of ``source`` at the cast; None if unknown.
        recipe: the :class:`~blocktensor.Recipe` it was cast with.
        generation: the :class:`Generation` of a weight that FSDP2 has gathered; else None.
        prepared: facts for the tensor parallel linear layers that share this input
            (``prepare_input.py``); else None. Compilers see its ``parts`` as inner tensors, and its
            ``context`` as a constant.

    A 1x128 tensor ``[..., K]`` holds its bytes flattened to ``[M, K]``; a 128x128 tensor may be a
    stack ``[E, N, K]``.

    Examples:
        >>> x = torch.tensor([[448.0, 2.0, 0.1]])
        >>> y = blocktensor.BlockwiseFP8Tensor.from_values(x)
        >>> y.rowwise_data.dtype, y.rowwise_scale
        (torch.float8_e4m3fn, tensor([[1.]]))
        >>> y.dequantize()
        tensor([[4.4800e+02, 2.0000e+00, 1.0156e-01]])
        >>> y = blocktensor.quantize(torch.randn(200, 384))  # columnwise in 128x128 blocks
        >>> y.columnwise_data.shape, y.columnwise_scale.shape
        (torch.Size([384, 256]), torch.Size([3, 2]))
    """

    rowwise_data: Tensor | None
    rowwise_scale: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale: Tensor | None
    rowwise_format: BlockFormat
    columnwise_format: BlockFormat
    source: Tensor | None = None
    source_version: tuple[int, int] | None = None
    recipe: Recipe
    generation: Generation | None = None
    prepared: Any = None
    _ops = ATEN_OPS
    prepared_data, prepared_scale, prepared_runs = map(_prepared_part, range(3))
    __create_write_items__ = __create_chunk_list__ = refuse_one_tensor

    @staticmethod
    def __new__(
        cls,
        rowwise: Quantized | BlockwiseFP8Tensor | None,
        columnwise: Quantized | None = None,
        *,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
        recipe: Recipe = DEFAULT_RECIPE,
        strides: Sequence[int] | None = None,
        formats: tuple[BlockFormat, BlockFormat] | None = None,
        source: Tensor | None = None,
        requires_grad: bool | None = None,
    ) -> BlockwiseFP8Tensor:
        """Wrap finished casts; most callers want :meth:`quantize`.

        Args:
            rowwise, columnwise: the forms that exist; at least one.
            shape, strides: logical ones; for 1x128 blocks any ``[..., K]`` over the rows of data.
            dtype: the high-precision dtype that autograd sees and that ``dequantize`` returns.
            formats: the formats of both forms; by default a missing form has the format of the
                other.
            recipe, source: see the attributes.
            requires_grad: passed only by frameworks that rebuild a parameter ``rowwise``.

        Raises:
            ValueError: neither form is given.
            NotImplementedError: a framework rebuilds the tensor from plain values.
        """
        if requires_grad is not None:
            if not isinstance(rowwise, BlockwiseFP8Tensor):
                refuse_rebuilding(cls)
            alias = rowwise.relabel()
            alias.requires_grad_(requires_grad)
            return alias
        assert not isinstance(rowwise, Tensor)
        present = rowwise or columnwise
        if present is None:
            raise ValueError(
                "BlockwiseFP8Tensor needs a rowwise or a columnwise form, got neither; "
                "BlockwiseFP8Tensor.from_values(x) makes them"
            )
        self: BlockwiseFP8Tensor = wrapper(
            cls, shape, strides=strides, dtype=dtype, device=present.data.device
        )
        self.rowwise_data, self.rowwise_scale = (None, None) if rowwise is None else rowwise[:2]
        self.columnwise_data, self.columnwise_scale = columnwise[:2] if columnwise else (None, None)
        self.rowwise_format, self.columnwise_format = formats or (
            present.format,
            present.format if columnwise is None else columnwise.format,
        )
        self.recipe = recipe
        if source is not None:
            self.source = source
        return self

    @classmethod
    def from_data(
        cls,
        rowwise_data: Tensor,
        rowwise_scale: Tensor,
        *,
        block_shape: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
        recipe: Recipe | None = None,
    ) -> BlockwiseFP8Tensor:
        """Return a tensor with existing FP8 bytes and scales (value = data * scale).

        Args:
            rowwise_data: e4m3 ``[M, K]``, or ``[E, N, K]`` with 128x128 blocks.
            rowwise_scale: fp32 ``[M, K/128]`` or ``[..., N/128, K/128]`` (rounded up).
            block_shape: ``(1, 128)`` or ``(128, 128)``.
            dtype: the high-precision dtype that autograd sees.
            recipe: numeric choices; default ``Recipe()``. Its ``scale`` must say how these scales
                are rounded, with blocks of one row for activations, else for weights. That is not
                checked, since the host would wait for the GPU.

        Raises:
            TypeError, ValueError: wrong dtypes, ranks, devices, or a scale of another shape.
        """
        check_recipe(recipe)
        recipe = recipe or DEFAULT_RECIPE
        form = Quantized(rowwise_data, rowwise_scale, _format(block_shape, recipe))
        checks.quantized(form)
        checks.given_dtype(dtype, "dtype")
        row = laid_out(rowwise_data.contiguous(), rowwise_scale, form.format)
        return cls(row, None, shape=rowwise_data.shape, dtype=dtype, recipe=recipe)

    @classmethod
    def from_values(
        cls,
        x: Tensor,
        blocks: BlockFormat | tuple[int, int] = BLOCKS_1X128.block_shape,
        recipe: Recipe | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> BlockwiseFP8Tensor:
        """Cast a high-precision tensor; not differentiable (:func:`blocktensor.quantize` is).

        Both forms have the same blocks, whatever ``recipe.wgrad_input`` says.

        Args:
            x: bf16, fp16 or fp32: ``[..., K]`` for 1x128 blocks, ``[N, K]`` or ``[E, N, K]`` for
                128x128 blocks; any strides.
            blocks: the shape of blocks, whose scales ``recipe`` chooses, or their format.
            recipe: numeric choices; default ``Recipe()``.
            rowwise, columnwise: which forms of 1x128 blocks to make (128x128: always rowwise).

        Raises:
            TypeError, ValueError: no tensor; another dtype, rank or block shape.
        """
        checks.tensor(x, "x")
        check_recipe(recipe)
        recipe = recipe or DEFAULT_RECIPE
        format = _format(blocks, recipe)
        if format.transposes:
            operand = Operand(cast.quantize_rowwise(x, format), None)
        elif rowwise or columnwise:
            formats = format if rowwise else None, format if columnwise else None
            operand = Operand(*cast.quantize_forms(x, *formats))
        else:
            raise ValueError(
                "from_values(rowwise=False, columnwise=False) makes nothing: pick a form"
            )
        return cls(*operand, shape=x.shape, dtype=x.dtype, recipe=recipe)

    @property
    def formats(self) -> tuple[BlockFormat, BlockFormat]:
        """The formats of the rowwise and of the columnwise form."""
        return self.rowwise_format, self.columnwise_format

    @property
    def format(self) -> BlockFormat:
        """The format of its forms; if they have two, the format with blocks of one row."""
        row, col = self.rowwise_format, self.columnwise_format
        return row if row.rows <= col.rows else col

    def unchanged_source(self) -> Tensor:
        """Return the tensor from which this one was cast.

        Raises:
            RuntimeError: that tensor was changed in place since.
        """
        assert self.source is not None
        if self.source_version is None:
            return self.source
        address, version = self.source_version
        # a deep copy has another address
        if address == self.source.data_ptr() and version != self.source._version:
            raise RuntimeError(
                f"the tensor that this BlockwiseFP8Tensor {list(self.shape)} was cast from, which "
                f"the gradient of the weight reads (wgrad_input='high_precision'), was changed in "
                f"place since: quantize a copy, or the changed tensor"
            )
        return self.source

    @property
    def kind(self) -> object | None:
        """The part of a plan's key for this weight, without its layouts.

        It is the same object for all weights that linear layers read in the same way. None if
        the bytes have no memory: then each call makes its own plan.
        """
        data = self.columnwise_data if self.rowwise_data is None else self.rowwise_data
        if type(data) not in PLAIN:
            return None
        return interned(type(self), self.formats, self.recipe)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.format.block_shape

    @property
    def operand(self) -> Operand:
        """The forms held."""
        return Operand(
            form_of(self.rowwise_data, self.rowwise_scale, self.rowwise_format),
            form_of(self.columnwise_data, self.columnwise_scale, self.columnwise_format),
        )

    def rowwise(self) -> Quantized:
        """Return the rowwise form; 128x128 blocks derive a missing one by a byte transpose.

        Raises:
            ValueError: 1x128 blocks without this form, which would need a second rounding.
        """
        return self.operand.need_rowwise(self.rowwise_format)

    def columnwise(self) -> Quantized:
        """Return the columnwise form; 128x128 blocks derive a missing one by a byte transpose.

        Raises:
            ValueError: as :meth:`rowwise`.
        """
        return self.operand.need_columnwise(self.columnwise_format)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``data * scale`` as a plain tensor, in ``dtype`` or ``self.dtype``.

        Differentiable: the gradient passes straight through.
        """
        if self.requires_grad:
            made: Tensor = StraightThrough.apply(self, dtype, False)
            return made
        return self._values_in(dtype)

    def _values_in(self, dtype: torch.dtype | None) -> Tensor:
        """Return what :meth:`dequantize` returns, without a gradient."""
        dtype, (row, col) = dtype or self.dtype, self.operand
        *lead, cols = self.shape
        if row is not None:
            value = _first_columns(cast.dequantize(row, dtype), cols)
        else:
            assert col is not None
            rows = math.prod(lead) if self.format.rows == 1 else lead[-1]
            value = _first_columns(cast.dequantize(col, dtype), rows).transpose(-1, -2)
        # not a view, which callers of an autograd function could not change in place
        return torch.ops.aten._unsafe_view(value, self.shape)

    def relabel(
        self,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        transpose: bool = False,
        dtype: torch.dtype | None = None,
    ) -> BlockwiseFP8Tensor:
        """Return the same bytes with another shape, orientation or dtype."""
        operand, formats, source = self.operand, self.formats, self.source
        if transpose:
            operand, formats, source = operand.transposed(), formats[::-1], None
        if shape is None:
            shape, strides = self.shape, self.stride()
        dtype = dtype or self.dtype
        relabelled = self.like(operand, shape, strides, formats=formats, dtype=dtype, source=source)
        for name in ("generation", "source_version", "prepared"):
            if (value := getattr(self, name)) is not None:
                setattr(relabelled, name, value)
        return relabelled

    def like(
        self, operand: Operand, shape: Sequence[int], strides: Sequence[int] | None, **others: Any
    ) -> BlockwiseFP8Tensor:
        """Return a tensor of other forms; by default with the same formats, recipe and dtype."""
        known: dict[str, Any] = {"formats": self.formats, "recipe": self.recipe}
        known |= {"dtype": self.dtype, **others}
        return BlockwiseFP8Tensor(*operand, shape=shape, strides=strides, **known)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        prepared = None if self.prepared is None else self.prepared.context
        return names, (self.dtype, self.formats, self.recipe, prepared)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> BlockwiseFP8Tensor:
        dtype, formats, recipe, prepared = context
        tensor = BlockwiseFP8Tensor(
            *operand_of(inner, *formats),
            shape=size,
            strides=stride,
            dtype=dtype,
            recipe=recipe,
            formats=formats,
            source=inner.get("source"),
        )
        if prepared is not None:
            tensor.prepared = prepared.of(*map(inner.get, _PREPARED))
        return tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        # addresses and versions are valid only in the process that wrote them
        super().__setstate__({**state, "source_version": None})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        sides = [s for s in ("rowwise", "columnwise") if getattr(self, f"{s}_data") is not None]
        if self.rowwise_format.name != self.columnwise_format.name:
            sides = [f"{side} {getattr(self, f'{side}_format').name}" for side in sides]
        forms = "+".join([*sides, *([] if self.source is None else ["source"])])
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"BlockwiseFP8Tensor(shape={list(self.shape)}, dtype={self.dtype}, "
            f"block_shape={self.block_shape}, scale={self.format.scale_rounding!r}, forms={forms}, "
            f"device={str(self.device)!r}{grad})"
        )


def _format(blocks: BlockFormat | Sequence[int], recipe: Recipe) -> BlockFormat:
    """Return the format of these blocks: of weights, or of activations if they have one row."""
    if isinstance(blocks, BlockFormat):
        return blocks
    operand: Any = "activations" if tuple(blocks[:1]) == (1,) else "weights"
    return with_block_shape(blocks, recipe.scale_of(operand))


def _first_columns(value: Tensor, count: int) -> Tensor:
    return value if value.shape[-1] == count else value[..., :count]
