"""Producers in Triton, interpreted on the CPU: the casts of what their PTX computes.

``test_triton_activation.py`` says what the PTX computes; here is all around it: which tensors are
read where, and which forms are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference as casts
from blocktensor.ops.formats import Quantized
from blocktensor.ops.producers.activations import ActivationName
from blocktensor.ops.producers.ptx import Role, word_ptx
from tests.support.casts import FORMATS, Formats, three
from tests.support.groups import ends, filled, first
from tests.support.interpreter import interpreted
from tests.support.numeric import DTYPES, KINDS, assert_same_forms
from tests.support.ptx import U32, WITH_PTX, run

BF16, FP16, FP32 = DTYPES
every_activation = pytest.mark.parametrize("activation", WITH_PTX)


def computed(activation: ActivationName, role: Role, *sources: Tensor) -> Tensor:
    """What the PTX of a producer computes of tensors."""
    x = sources[0]
    even = [torch.cat([s.flatten(), s.new_zeros(s.numel() % 2)]) for s in sources]
    words = [s.view(torch.int32).numpy().view(U32) for s in even]
    made = run(word_ptx(activation, role, x.dtype), words, x.dtype)
    return torch.from_numpy(made.view(np.int32).copy()).view(x.dtype)[: x.numel()].view_as(x)


def by_casts(x: Tensor, formats: Formats, sizes: Any = None) -> tuple[Any, ...]:
    if sizes is not None:
        return casts.quantize_grouped(x, ends(*sizes), *formats)
    row, col = formats
    return (
        None if row is None else casts.quantize_rowwise(x, row),
        None if col is None else casts.quantize_columnwise(x, col),
    )


def check(made: Any, x: Tensor, formats: Formats, sizes: Any = None) -> None:
    """Forms that were made are casts of x, in the rows and blocks that have contents."""
    wanted = by_casts(x, formats, sizes)
    if sizes is None:
        assert_same_forms(made, wanted)
        return
    assert [form is None for form in made] == [form is None for form in wanted]
    cuts: list[Callable[[Quantized], Quantized]] = [
        lambda form: first(form, len(x)),
        lambda form: filled(form, sizes),
    ]
    for form, want, cut in zip(made, wanted, cuts, strict=True):
        if form is not None:
            assert_same_forms(cut(form), cut(want))


def elements() -> Any:
    from blocktensor.ops.producers.kernels import elements

    return elements


SHAPES = [(128, 256), (131, 136), (1, 8), (257, 128)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_activation
@interpreted
def test_gated(activation: ActivationName, dtype: torch.dtype) -> None:
    for i, formats in enumerate(FORMATS):
        kind = KINDS[i % len(KINDS)]
        _, gate, up = three(*SHAPES[i % len(SHAPES)], dtype, (kind, kind, "normal"), seed=i)
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)  # halves of one matrix
        want = computed(activation, "gated", gate.contiguous(), up.contiguous())
        check(elements().gated(gate, up, activation, *formats), want, formats)


@every_activation
@interpreted
def test_gradients(activation: ActivationName) -> None:
    for i, formats in enumerate(FORMATS):
        sources = grad, gate, up = three(*SHAPES[i % len(SHAPES)], BF16, seed=i)
        of_gate = computed(activation, "gated gradient", gate, grad, up)
        of_up = computed(activation, "gated with gradient", gate, grad)
        made = elements().gated_backward(*sources, activation, *formats)
        check(made[0], of_gate, formats)
        check(made[1], of_up, formats)
        alone = elements().gated_backward(*sources, activation, *formats, of_up=False)
        check(alone[0], of_gate, formats)
        assert alone[1] == (None, None)


@pytest.mark.parametrize("sizes", [(130, 0, 20, 1), (0, 5)], ids=str)
@interpreted
def test_groups(sizes: tuple[int, ...]) -> None:
    """Rows of no group are read by rowwise casts alone."""
    grad, gate, up = three(sum(sizes) + 3, 136)
    for formats in FORMATS[:2]:
        rest = "silu", *formats, ends(*sizes)
        want = computed("silu", "gated", gate, up)
        check(elements().gated(gate, up, *rest), want, formats, sizes)
        of_gate, of_up = elements().gated_backward(grad, gate, up, *rest)
        check(of_gate, computed("silu", "gated gradient", gate, grad, up), formats, sizes)
        check(of_up, computed("silu", "gated with gradient", gate, grad), formats, sizes)


@every_activation
@interpreted
def test_joint_gradients(activation: ActivationName) -> None:
    """Those of gate and up side by side, with rows in groups and without.

    Activations differ in their PTX alone.
    """
    for sizes in (None, (70, 0, 60)) if activation == "silu" else (None,):
        grad, gate, up = three(130, 256)
        parts = (
            computed(activation, "gated gradient", gate, grad, up),
            computed(activation, "gated with gradient", gate, grad),
        )
        offs = None if sizes is None else ends(*sizes)
        every = activation == "silu" and sizes is None
        for formats in FORMATS if every else FORMATS[:2]:
            both = torch.cat([gate, up], 1)
            made = elements().joint_gated_backward(grad, both, activation, *formats, offs)
            check(made, torch.cat(parts, 1), formats, sizes)
