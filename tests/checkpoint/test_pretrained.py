"""Skeletons of models, which transformers' functions change in place of the models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import convert
from blocktensor.checkpoint.pretrained import skeleton


class Model(nn.Module):
    """All that a module may hold: ties, None, buffers of both kinds, shared modules, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2))
        self.shared = self.first
        self.tied = nn.Linear(256, 256, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
        self.register_buffer("steps", torch.ones(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2, dtype=torch.float64), persistent=False)
        self.register_parameter("absent", None)
        self.register_forward_hook(lambda *_: pytest.fail("a hook of the model has run"))
        self.note = "kept"

    def forward(self, x: Any) -> Any:
        return x


def tensors(model: nn.Module) -> dict[str, Any]:
    """Return the tensors of a model by name, under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_skeleton_is_the_model_without_values(in_fp8: bool) -> None:
    model = Model()
    if in_fp8:
        convert(model, skip_small=False)
    model.second.eval()
    made: Any = skeleton(model)
    mine, copies = tensors(model), tensors(made)
    assert copies.keys() == mine.keys()
    assert made.state_dict().keys() == model.state_dict().keys()
    for name, x in mine.items():
        copy = copies[name]
        kind = nn.Parameter if isinstance(x, nn.Parameter) else torch.Tensor
        assert (type(copy), copy.shape, copy.dtype) == (kind, x.shape, x.dtype), name
        assert copy.is_meta and not copy.requires_grad
    pairs = [(a, b) for a in mine for b in mine]
    assert all((copies[a] is copies[b]) == (mine[a] is mine[b]) for a, b in pairs)
    assert made.shared is made.first and made.absent is None and made.note == "kept"
    modules = dict(made.named_modules())
    for name, module in model.named_modules():
        copied = modules[name]
        assert copied is not module and type(copied) is type(module)
        assert copied.training == module.training
    assert made("called") == "called"


def test_a_skeleton_does_not_change_with_its_model() -> None:
    model, name = Model(), "_weight_conversions"
    setattr(model, name, ["of the checkpoint that it was loaded from"])
    made: Any = skeleton(model)
    assert not hasattr(made, name) and hasattr(model, name)
    made.first = nn.Identity()
    made.register_buffer("further", None)
    made.second.weight = None
    assert isinstance(model.first, nn.Linear) and not hasattr(model, "further")
    assert model.second.weight is not None
