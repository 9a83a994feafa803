"""Ops that FP8 bytes cannot serve are refused; errors name the op, the module and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from blocktensor import convert, freeze, quantize
from tests.support.models import complaint, linear, randn

X, INDEX = randn(4, 256, dtype=torch.float32), torch.zeros(1, 256, dtype=torch.long)
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.mul.Tensor": lambda x: x * x,
    "aten.sum.default": lambda x: x.sum(),
    "aten.stack.default": lambda x: torch.stack([x, x], 1),
    "aten.index.Tensor": lambda x: x[[0, 2]],
    "aten.where.self": lambda x: torch.where(X > 0, x, X),
    "aten._local_scalar_dense.default": lambda x: quantize(X[:1, :1]).item(),
    "aten.equal.default": lambda x: torch.equal(x, x),
    "aten.abs.default": lambda x: x.isfinite(),
    "aten.gather.default": lambda x: x.gather(0, INDEX),
    "aten.index_select.default": lambda x: x.index_select(0, INDEX[0]),
    "aten.gelu.default": lambda x: F.gelu(x),
    "aten.embedding.default": lambda x: F.embedding(INDEX, x),
    "aten.as_strided.default": lambda x: x.as_strided((2, 2), (1, 1)),
    "aten.view.dtype": lambda x: x.view(torch.int32),
    "aten.zero_.default": lambda x: x.zero_(),
    "aten.add_.Tensor": lambda x: X.clone().add_(x),
    "aten._foreach_add.Scalar": lambda x: torch._foreach_add([x], 1),
    "aten.copy_.default": lambda x: X.clone().copy_(x),
    "a BlockwiseFP8Tensor has no tolist()": lambda x: x.tolist(),
    "a BlockwiseFP8Tensor has no numpy()": lambda x: x.numpy(),
}


@pytest.mark.parametrize("op", REFUSED)
def test_an_unsupported_op_names_itself_and_the_way_out(op: str) -> None:
    text = complaint(NotImplementedError, lambda: REFUSED[op](quantize(X)))
    assert text.startswith(op)
    assert ".dequantize()" in text


def test_the_text_of_a_refusal() -> None:
    x = quantize(X)
    assert_expected_inline(
        "\n".join(complaint(NotImplementedError, f) for f in (x.sin, lambda: x.add_(1), x.svd)),
        """\
aten.sin.default is not implemented for BlockwiseFP8Tensor, which keeps its values
in FP8: call .dequantize() first to work on a plain tensor
aten.add_.Tensor is not implemented for BlockwiseFP8Tensor, which keeps its values
in FP8: call .dequantize() first to work on a plain tensor; to write to a frozen
weight (merge an adapter into it, say), call blocktensor.unfreeze(model) first and
blocktensor.freeze(model) after
aten._linalg_svd.default is not implemented for BlockwiseFP8Tensor, which keeps its
values in FP8: to begin adapters from the values of a frozen weight (PiSSA, OLoRA,
DeLoRA), call blocktensor.unfreeze(model), then get_peft_model, then
blocktensor.freeze(model); or call .dequantize() first to work on a plain tensor""",
    )


DIM = 128
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("tk,nk->tn", x, w),
    "a view": lambda x, w: torch.einsum("tk,kn->tn", x, w.detach().t()[:, :DIM]),
    "below autograd": lambda x, w: torch.ops.aten.mv(w, x[0])[None],
    "a copy": lambda x, w: torch.einsum("tk,nk->tn", x, w.bfloat16()),
    "two overrides": lambda x, w: w.new_zeros(1, DIM, DIM).baddbmm_(w[None], w[None].mT)[0, :3],
}


class Mixer(nn.Module):
    """Multiplies by the weights of its linears without calling them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.proj, self.out = how, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(READS[self.how](x, self.proj.weight))


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mixer": Mixer(how)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["mixer"](x)
        return x


def layers(how: str, **options: Any) -> nn.Module:
    model = Model(how).bfloat16()
    convert(model, skip_small=False, **options)
    return model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", READS)
def test_an_error_in_a_forward_names_the_module_and_a_skip_that_serves(
    how: str, frozen: bool
) -> None:
    x, model = randn(3, DIM), layers(how)
    if frozen:
        freeze(model)
    text = complaint(NotImplementedError, lambda: model(x)).replace("\n", " ")
    by = "in 'layers.0.mixer', a Mixer, by 'layers.0.mixer.proj.weight'; to compute"
    assert text.count("a Mixer") == text.count(by) == 1
    skip = ["layers.*.mixer.proj"]
    assert text.endswith(f"convert(model, skip={skip})")
    layers(how, skip=skip)(x).sum().backward()


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(DIM, DIM)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["up"](x)
        return x


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("first", ["convert", "get_peft_model"])
def test_a_skip_serves_before_and_after_peft_wraps_layers(first: str, inside: bool) -> None:
    """HiRA multiplies the base's weight elementwise; ``inside``: a Trainer calls peft's tuner."""
    peft = pytest.importorskip("peft")

    def adapted(**options: Any) -> nn.Module:
        base = Linears().requires_grad_(False)
        if first == "convert":
            convert(base, skip_small=False, **options)
        model = peft.get_peft_model(base, peft.HiraConfig(r=2, target_modules=["up"]))
        if first == "get_peft_model":
            convert(model, skip_small=False, **options)
        return model.base_model if inside else model

    x = randn(3, DIM, dtype=torch.float32)
    text = complaint(NotImplementedError, lambda: adapted()(x)).replace("\n", " ")
    skip = ["*layers.*.up"]
    assert text.endswith(f"convert(model, skip={skip})")
    with pytest.warns(UserWarning, match="no weight"):  # nothing else is there to convert
        model = adapted(skip=skip)
    model(x).sum().backward()


class OfOne(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("tk,nk->tn", x, self[0].weight)


def test_a_skip_of_one_linear_by_its_number_is_of_no_other() -> None:
    x, model = randn(3, DIM), OfOne(nn.Linear(DIM, DIM)).bfloat16()
    convert(model, skip_small=False)
    text = complaint(NotImplementedError, lambda: model(x)).replace("\n", " ")
    assert text.endswith("convert(model, skip=['0'])")
    text = complaint(TypeError, lambda: nn.Sequential(model[0])(x.double())).replace("\n", " ")
    assert "; in '0', a Linear" in text and "skip" not in text


def test_an_error_outside_of_modules_is_as_it_was() -> None:
    module = linear(DIM, DIM, bias=True)
    text = complaint(NotImplementedError, lambda: torch.inner(module.weight, module.bias))
    assert "skip" not in text


class Einsum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("tk,nk->tn", x, self.weight)


@pytest.mark.parametrize("multi", [None, get_ema_multi_avg_fn(0.5)])
def test_an_average_of_frozen_weights_names_a_list_that_serves(multi: Any) -> None:
    model = Linears()
    convert(model.layers[0].requires_grad_(False), skip_small=False)
    averaged = AveragedModel(model, multi_avg_fn=multi)
    averaged.update_parameters(model)  # copies
    text = complaint(NotImplementedError, lambda: averaged.update_parameters(model))
    remedy = text.replace("\n", " ").partition("update_parameters too: ")[2]

    averaged = eval(remedy, {"AveragedModel": AveragedModel, "nn": nn, "model": model})
    for _ in range(2):
        averaged.update_parameters(averaged.module)


def test_a_forward_of_an_average_names_its_own_remedy() -> None:
    model = Einsum(DIM, DIM)
    convert(model, skip_small=False)
    text = complaint(NotImplementedError, lambda: AveragedModel(model)(randn(3, DIM)))
    assert ".high_precision()" in text
    assert "update_parameters" not in text
