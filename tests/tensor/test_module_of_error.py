"""Errors of refused ops name the module whose code runs them, and a remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import convert, freeze
from tests.support.models import complaint, randn

DIM = 128


class Mixer(nn.Module):
    """Multiplies by the weights of its linears without calling them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.proj, self.out = how, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "matmul":
            x = (self.proj.weight @ x[None].transpose(1, 2))[0].t()
        elif self.how == "einsum":
            x = torch.einsum("tk,nk->tn", x, self.proj.weight)
        elif self.how == "a view":
            x = torch.einsum("tk,kn->tn", x, self.proj.weight.detach().t()[:, :DIM])
        elif self.how == "below autograd":
            x = torch.ops.aten.mv(self.proj.weight, x[0])[None]
        else:
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
@pytest.mark.parametrize("how", ["matmul", "einsum", "a view", "below autograd", "a copy"])
def test_an_error_in_a_forward_names_the_module_and_a_skip_that_serves(
    how: str, frozen: bool
) -> None:
    def model(**options: Any) -> nn.Module:
        made = Layers(how).bfloat16()
        convert(made, auto_filter_small_kn=False, **options)
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
    convert(linear, auto_filter_small_kn=False)
    text = complaint(NotImplementedError, lambda: torch.inner(linear.weight, linear.bias))
    assert "skip" not in text
