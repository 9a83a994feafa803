"""Matrices ``[..., N, K]`` of which each program takes a block of 128x128, as 32-bit words."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import num_blocks

_WORD_BYTES = 4
_WORDS_OF_VECTOR = 4


@gluon.jit
def block_of_program(blocks_n, blocks_k):
    """The matrix (int64), and the row and column among its blocks."""
    block = gl.program_id(0)
    matrix = (block // (blocks_k * blocks_n)).to(gl.int64)
    return matrix, block // blocks_k % blocks_n, block % blocks_k


class Stack(NamedTuple):
    """What the kernels are told of the matrices; columns and strides are in units of words.

    Attributes:
        programs: one a block.
        unit: words of a unit: as many as one instruction can load of every row.
        stride_e, stride_n: from one matrix to the next, and from one row.
    """

    programs: int
    blocks_n: int
    blocks_k: int
    unit: int
    cols: int
    stride_e: int
    stride_n: int


def stack_of(x: Tensor) -> Stack:
    """``x``: one matrix or a stack of them, whose rows are whole words of unit stride."""
    n, k = x.shape[-2:]
    matrices, stride_e = (x.shape[0], x.stride(0)) if x.ndim == 3 else (1, 0)
    blocks_n, blocks_k = num_blocks(n), num_blocks(k)
    of_word = _WORD_BYTES // x.element_size()
    is_even = (k | x.stride(-2) | stride_e) % (_WORDS_OF_VECTOR * of_word) == 0
    unit = _WORDS_OF_VECTOR if is_even else 1
    sizes = (size // (of_word * unit) for size in (k, stride_e, x.stride(-2)))
    return Stack(matrices * blocks_n * blocks_k, blocks_n, blocks_k, unit, *sizes)
