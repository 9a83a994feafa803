"""Ops that FP8 bytes cannot serve are refused; errors name the op, the module and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, convert, freeze
from tests.support.models import complaint, randn

X = randn(4, 256, dtype=torch.float32)


INDEX = torch.zeros(1, 256, dtype=torch.long)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.mul.Tensor": lambda x: x * x,
    "aten.sum.default": lambda x: x.sum(),
    "aten.stack.default": lambda x: torch.stack([x, x]),
    "aten.index.Tensor": lambda x: x[[0, 2]],
    "aten.where.self": lambda x: torch.where(X > 0, x, X),
    "aten._local_scalar_dense.default": lambda x: BlockwiseFP8Tensor.from_values(X[:1, :1]).item(),
    "aten.equal.default": lambda x: torch.equal(x, x),
    "aten.abs.default": lambda x: x.isfinite(),
    "aten.gather.default": lambda x: x.gather(0, INDEX),
    "aten.gelu.default": lambda x: F.gelu(x),
    "aten.embedding.default": lambda x: F.embedding(INDEX, x),
    "aten.as_strided.default": lambda x: x.as_strided((2, 2), (1, 1)),
    "aten.view.dtype": lambda x: x.view(torch.int32),
    "aten.zero_.default": lambda x: x.zero_(),
    "aten.add_.Tensor": lambda x: X.clone().add_(x),
    "aten._foreach_add.Scalar": lambda x: torch._foreach_add([x], 1),
    "aten.copy_.default": lambda x: X.clone().copy_(x),
}


@pytest.mark.parametrize("op", REFUSED)
def test_an_unsupported_op_names_itself_and_the_way_out(op: str) -> None:
    text = complaint(NotImplementedError, lambda: REFUSED[op](BlockwiseFP8Tensor.from_values(X)))
    assert text.startswith(op)
    assert ".dequantize()" in text


@pytest.mark.parametrize("convert", [lambda x: x.tolist(), lambda x: x.numpy()])
def test_conversions_to_python_are_refused(convert: Callable[[Tensor], Any]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"numpy|tolist"):
        convert(BlockwiseFP8Tensor.from_values(X))


def test_the_text_of_a_refusal() -> None:
    """Of an op that reads, and of one that writes."""
    x = BlockwiseFP8Tensor.from_values(X)
    assert_expected_inline(
        "\n".join(complaint(NotImplementedError, run) for run in (x.sin, lambda: x.add_(1))),
        """\
aten.sin.default is not implemented for BlockwiseFP8Tensor, which keeps its values
in FP8: call .dequantize() first to work on a plain tensor
aten.add_.Tensor is not implemented for BlockwiseFP8Tensor, which keeps its values
in FP8: call .dequantize() first to work on a plain tensor; to write to a frozen
weight (merge an adapter into it, say), call blocktensor.unfreeze(model) first and
blocktensor.freeze(model) after""",
    )


# The module of an error


DIM = 128


class Mixer(nn.Module):
    """Multiplies by the weights of its linears without calling them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.proj, self.out = how, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "einsum":
            x = torch.einsum("tk,nk->tn", x, self.proj.weight)
        elif self.how == "a view":
            x = torch.einsum("tk,kn->tn", x, self.proj.weight.detach().t()[:, :DIM])
        elif self.how == "below autograd":
            x = torch.ops.aten.mv(self.proj.weight, x[0])[None]
        elif self.how == "a copy":
            x = torch.einsum("tk,nk->tn", x, self.proj.weight.bfloat16())
        return self.out(x)


class Layers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mixer": Mixer(how)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["mixer"](x)
        return x


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["einsum", "a view", "below autograd", "a copy"])
def test_an_error_in_a_forward_names_the_module_and_a_skip_that_serves(
    how: str, frozen: bool
) -> None:
    def model(**options: Any) -> nn.Module:
        made = Layers(how).bfloat16()
        convert(made, skip_small=False, **options)
        return made

    x, failing = randn(3, DIM), model()
    if frozen:
        freeze(failing)
    text = complaint(NotImplementedError, lambda: failing(x)).replace("\n", " ")
    assert "in 'layers.0.mixer', a Mixer, by 'layers.0.mixer.proj.weight'; to compute" in text
    found = re.search(r"convert\(model, (skip=\[.*\])\)$", text)
    assert found is not None
    assert found[1] == "skip=['layers.*.mixer.proj']"
    model(skip=["layers.*.mixer.proj"])(x).sum().backward()


def test_an_error_outside_of_modules_is_as_it_was() -> None:
    linear = nn.Linear(DIM, DIM).bfloat16()
    convert(linear, skip_small=False)
    text = complaint(NotImplementedError, lambda: torch.inner(linear.weight, linear.bias))
    assert "skip" not in text


class Attention(nn.Module):
    """Has torch multiply by the weights of its linears, as WavLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.q, self.k, self.v
        weights = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), qkv, strict=True))
        bias = torch.cat([each.bias for each in qkv])
        made, _ = F.multi_head_attention_forward(
            *[x[:, None]] * 3, DIM, 2, None, bias, None, None, False, 0.0, self.out.weight,
            self.out.bias, use_separate_proj_weight=True,
            **{name: each.weight for name, each in weights.items()},
        )  # fmt: skip
        return made


def test_all_weights_of_a_refused_op_are_named() -> None:
    def model(**options: Any) -> nn.Module:
        made = nn.Sequential(Attention(), nn.Linear(DIM, DIM))
        convert(made, skip_small=False, **options)
        return made

    x = randn(3, DIM, dtype=torch.float32)
    text = complaint(NotImplementedError, lambda: model()(x)).replace("\n", " ")
    assert "by '0.q.weight' and '0.k.weight' and '0.v.weight' and '0.out.weight'" in text
    skip = ["*.q", "*.k", "*.v", "*.out"]
    assert text.endswith(f"convert(model, skip={skip})")
    model(skip=skip)(x).sum().backward()


def test_operands_that_do_not_fit_name_the_module() -> None:
    model = Layers("linear")
    convert(model, skip_small=False)
    for x, error, wanted in (
        (randn(3, DIM), TypeError, "input is torch.bfloat16 and the weight torch.float32"),
        (torch.ones(3, DIM + 1), ValueError, "K is 129 in one and 128 in the other"),
    ):
        text = complaint(error, lambda x=x: model(x)).replace("\n", " ")
        assert wanted in text
        assert text.endswith("; in 'layers.0.mixer.out', a Linear")
