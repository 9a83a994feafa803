"""What producers refuse: every error with its whole text."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline

from blocktensor.ops.formats import BLOCKS_1X128 as ROW
from blocktensor.ops.formats import BLOCKS_128X128 as SQUARES
from blocktensor.ops.producers import ops
from tests.support.refusals import Call, refused

BF16 = torch.bfloat16


def test_gated() -> None:
    grad, gate, up = (torch.zeros(130, 300, dtype=BF16) for _ in range(3))
    rest: Any = ("silu", ROW, None)
    wrong: Any = "swish"
    calls: list[Call] = [
        lambda: ops.gated(gate, up, wrong, ROW, None),
        lambda: ops.gated(gate, up, "silu", None, None),
        lambda: ops.gated(gate, up, "silu", SQUARES, None),
        lambda: ops.gated(gate, up[:5], *rest),
        lambda: ops.gated(gate, up.float(), *rest),
        lambda: ops.gated(gate[None], None, *rest),
        lambda: ops.gated(gate.int(), None, *rest),
        lambda: ops.gated(gate, up.to("meta"), *rest),
        lambda: ops.gated(gate, up, *rest, offs=torch.tensor([130])),
        lambda: ops.gated_backward(grad[:, :7], gate, up, *rest),
        lambda: ops.gated_backward(grad.float(), gate, up, *rest),
        lambda: ops.joint_gated_backward(grad, gate[:, :299], *rest),
        lambda: ops.joint_gated_backward(grad, gate, *rest),
        lambda: ops.gated_backward_with_h(grad[:, :8], gate, up, "silu", ROW, ROW, ROW),
        lambda: ops.gated_backward_with_h(grad, gate, up.float(), "silu", ROW, ROW, ROW),
        lambda: ops.gated_backward_with_h(grad, gate, up, wrong, ROW, ROW, ROW),
        lambda: ops.gated_backward_with_h(grad, gate, up, "silu", SQUARES, ROW, ROW),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
ValueError: activation 'swish': expected one of silu, gelu, gelu_tanh, relu2
ValueError: neither a rowwise nor a columnwise format was given: pass one or both
ValueError: the rowwise format is 128x128: expected blocks of one row, e.g. 1x128; square blocks
  are for the columnwise form
ValueError: up has shape [5, 300] and gate [130, 300]: expected the same
TypeError: up has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: gate has 3 dimensions, shape [1, 130, 300]: expected 2; flatten tokens to [T, I]
TypeError: gate has dtype torch.int32: blocktensor casts torch.bfloat16, torch.float16 and
  torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)
ValueError: up is on meta and gate on cpu: move them to one device
TypeError: offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)
ValueError: grad has shape [130, 7] and gate [130, 300]: expected the same
TypeError: grad has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: gate_up has 299 columns: expected gate, then as many columns of up
ValueError: grad has shape [130, 300] and gate [130, 150]: expected the same
ValueError: grad has shape [130, 8] and gate [130, 300]: expected the same
TypeError: up has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: activation 'swish': expected one of silu, gelu, gelu_tanh, relu2
ValueError: the rowwise format is 128x128: expected blocks of one row, e.g. 1x128; square blocks
  are for the columnwise form""",
    )
