"""The ops of producers: what they refuse, their schemas and fakes, and who runs them."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor
from torch._subclasses import FakeTensorMode

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from blocktensor.ops.producers.op_forms import halves
from blocktensor.ops.producers.reference import ACTIVATIONS
from tests.support.groups import ends
from tests.support.numeric import values
from tests.support.producers import assert_same_forms

BF16 = torch.bfloat16
OPS = torch.ops.blocktensor
FORMATS: tuple[tuple[BlockFormat | None, BlockFormat | None], ...] = (
    (BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_128X128),
    (None, BLOCKS_128X128),
    (BLOCKS_1X128, None),
)
every_formats = pytest.mark.parametrize("formats", FORMATS, ids=range(len(FORMATS)))


def three(rows: int = 130, cols: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    grad, gate, up = (values("normal", rows, cols, BF16, rng) for _ in range(3))
    return grad, gate, up


@every_formats
def test_opcheck(formats: tuple[BlockFormat | None, BlockFormat | None]) -> None:
    names = [None if format is None else format.name for format in formats]
    for shape, is_gated, grouped in (((130, 300), True, False), ((5, 7), False, True)):
        grad, gate, up = three(*shape)
        offs = ends(shape[0] // 2, shape[0] - shape[0] // 2) if grouped else None
        args = (up if is_gated else None, offs, "silu", *names)
        torch.library.opcheck(OPS.gated.default, (gate, *args))
        for of_up in (True, False):
            torch.library.opcheck(OPS.gated_backward.default, (grad, gate, *args, of_up))
        both = (torch.cat([gate, gate], 1), offs, "silu", *names)
        torch.library.opcheck(OPS.joint_gated_backward.default, (grad, *both))


def calls(grad: Tensor, gate: Tensor, up: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    return (ops.gated(gate, up, *rest), *ops.gated_backward(grad, gate, up, *rest))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_formats
def test_functions_are_the_reference_here(
    activation: str, formats: tuple[BlockFormat | None, BlockFormat | None]
) -> None:
    grad, gate, up = three()
    for given in (up, None):
        rest = (None, activation, *formats)
        want = (
            reference.gated(gate, given, *rest),
            *reference.gated_backward(grad, gate, given, *rest),
        )
        for ours, theirs in zip(calls(grad, gate, given, activation, *formats), want, strict=True):
            assert_same_forms(ours, theirs)
        alone, none = ops.gated_backward(grad, gate, given, activation, *formats, of_up=False)
        assert_same_forms(alone, want[1])
        assert none == (None, None)


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
def test_compiled_functions_give_the_same_bytes(is_gated: bool) -> None:
    grad, gate, up = three()

    def run(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Any, ...]:
        return calls(grad, gate, up if is_gated else None, "gelu", BLOCKS_1X128, BLOCKS_128X128)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(compiled(grad, gate, up), run(grad, gate, up), strict=True):
        assert_same_forms(ours, theirs)


def test_fakes_have_the_layouts_of_results() -> None:
    sources = three()
    offs = ends(100, 30)
    for rest in ((None,), (offs,)):
        given = "silu", BLOCKS_1X128, BLOCKS_128X128
        real = calls(*sources, *given, *rest)
        with FakeTensorMode() as mode:
            fake_rest = [None if x is None else mode.from_tensor(x) for x in rest]
            fakes = calls(*(mode.from_tensor(x) for x in sources), *given, *fake_rest)
        for ours, theirs in zip(fakes, real, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                for x, y in zip(mine[:2], other[:2], strict=True):
                    assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@every_formats
@pytest.mark.parametrize("cols", [1, 128, 256, 300])
def test_a_joint_gradient_is_both_gradients_side_by_side(
    cols: int, formats: tuple[BlockFormat | None, BlockFormat | None]
) -> None:
    grad, gate, up = three(cols=cols)
    both = torch.cat([gate, up], 1)
    for offs in (None, ends(100, 0, 30)):
        rest = ("gelu", *formats, offs)
        made = ops.joint_gated_backward(grad, both, *rest)
        assert_same_forms(made, reference.joint_gated_backward(grad, both, offs, *rest[:3]))
        with FakeTensorMode() as mode:
            fakes = [None if x is None else mode.from_tensor(x) for x in (grad, both, offs)]
            fake = ops.joint_gated_backward(*fakes[:2], *rest[:3], fakes[2])
        for mine, other in zip(made, fake, strict=True):
            for x, y in zip(mine[:2] if mine else (), other[:2] if other else (), strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        if cols % 128 == 0:
            parts = ops.gated_backward(grad, gate, up, *rest)
            for got, want in zip(halves(made), parts, strict=True):
                assert_same_forms(got, want)


def declines(name: str, *sources: Tensor) -> str | None:
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    return backend.declines(ProducerProblem(sources, BLOCKS_1X128, BLOCKS_1X128))


def test_who_takes_which_layouts() -> None:
    x = torch.empty((128, 512), dtype=BF16, device="meta")
    gate, up = x.chunk(2, 1)
    odd = torch.empty((128, 257), dtype=BF16, device="meta")[:, :256]
    across = torch.empty((256, 128), dtype=BF16, device="meta").t()
    assert [backend.name for backend in PRODUCER_BACKENDS] == ["gluon", "triton", "reference"]
    assert declines("gluon", gate, up) is None
    assert declines("triton", gate, up) is None
    assert declines("gluon", gate, odd) == "reads rows of whole 32-bit words"
    assert declines("triton", gate, odd) is None
    assert declines("triton", gate, across) == "reads rows of unit stride"
    assert declines("reference", gate, across) is None
    wide = torch.empty((128, 256), device="meta")
    three_alone = "computes from three tensors in bf16 alone: others would spill"
    assert declines("triton", wide, wide, wide) == three_alone
    assert declines("gluon", wide, wide, wide) is None
    wide = torch.empty((128, 258), device="meta")
    assert declines("triton", wide) == "reads fp16 and fp32 in whole vectors of eight elements"
    assert declines("triton", wide[:, :256].contiguous()) is None


class TestBadInput(TestCase):
    def refused(self, *args: Any, **other: Any) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            ops.gated(*args, **other)
        return f"{caught.type.__name__}: {caught.value}"

    def test_gated(self) -> None:
        _, gate, up = three()
        rest = ("silu", BLOCKS_1X128, None)
        calls = (
            self.refused(gate, up, "swish", BLOCKS_1X128, None),
            self.refused(gate, up, "silu", None, None),
            self.refused(gate, up, "silu", BLOCKS_128X128, None),
            self.refused(gate, up[:5], *rest),
            self.refused(gate, up.float(), *rest),
            self.refused(gate[None], None, *rest),
            self.refused(gate.int(), None, *rest),
            self.refused(gate, up.to("meta"), *rest),
            self.refused(gate, up, *rest, offs=torch.tensor([130])),
        )
        self.assertExpectedInline(
            "\n".join(line for call in calls for line in wrap(call, 90)),
            """\
ValueError: activation 'swish': expected one of silu, gelu, gelu_tanh, relu2
ValueError: neither a rowwise nor a columnwise format was given: pass one or both
ValueError: the rowwise format is 128x128: expected blocks of one row, e.g. 1x128; square
blocks are for the columnwise form
ValueError: up has shape [5, 300] and gate [130, 300]: expected the same
TypeError: up has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: gate has 3 dimensions, shape [1, 130, 300]: expected 2; flatten tokens to [T,
I]
TypeError: gate has dtype torch.int32: blocktensor casts torch.bfloat16, torch.float16 and
torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)
ValueError: up is on meta and gate on cpu: move them to one device
TypeError: offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)""",
        )

    def test_gated_backward(self) -> None:
        grad, gate, up = three()
        rest = ("silu", BLOCKS_1X128, None)
        for wrong, error, message in (
            (grad[:, :7], ValueError, "grad has shape \\[130, 7\\] and gate \\[130, 300\\]"),
            (grad.float(), TypeError, "grad has dtype torch.float32 and gate torch.bfloat16"),
        ):
            with pytest.raises(error, match=message):
                ops.gated_backward(wrong, gate, up, *rest)
        with pytest.raises(ValueError, match="gate_up has 299 columns: expected gate, then as"):
            ops.joint_gated_backward(grad, gate[:, :299], *rest)
        with pytest.raises(ValueError, match="grad has shape \\[130, 300\\] and gate \\[130, 150"):
            ops.joint_gated_backward(grad, gate, *rest)
