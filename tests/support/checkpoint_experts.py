"""A layer of experts as transformers marks them, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blocktensor import Recipe, save_fp8
from blocktensor import convert as convert_model
from tests.support.models import randn

E, K = 3, 200
STACKS = {"experts.gate_up_proj", "experts.down_proj"}
MATRICES = ("gate_proj", "up_proj", "down_proj")


class Experts(nn.Module):
    """Stacks as in transformers: ``[E, 2N, K]`` and ``[E, K, N]``, transposed if asked for."""

    def __init__(self, n: int = 128, is_transposed: bool = False, experts: int = E) -> None:
        super().__init__()
        self.is_transposed, self.has_bias, self.has_gate = is_transposed, False, True
        for name, (rows, cols) in {"gate_up_proj": (2 * n, K), "down_proj": (K, n)}.items():
            shape = (experts, cols, rows) if is_transposed else (experts, rows, cols)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))


class Layer(nn.Module):
    """A router that stays in bf16, and experts."""

    def __init__(self, n: int = 128, is_transposed: bool = False, experts: int = E) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(experts, K, dtype=torch.bfloat16))
        self.experts = Experts(n, is_transposed, experts)


def layer(
    seed: int = 0,
    *,
    n: int = 128,
    is_transposed: bool = False,
    experts: int = E,
    convert: bool = True,
    frozen: bool = False,
    recipe: Recipe | None = None,
) -> Layer:
    """One with values that follow from ``seed``."""
    model = Layer(n, is_transposed, experts)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=10 * seed + i, dtype=torch.bfloat16))
    model.experts.requires_grad_(not frozen)
    if convert:
        convert_model(model, recipe or Recipe(), auto_filter_small_kn=False)
    return model


def read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def written(folder: Path, change: Callable[[dict[str, Tensor]], object], **kwargs: int) -> Path:
    """A checkpoint in matrices of experts, without index, after a change to its tensors."""
    made = read(save_fp8(layer(frozen=True, **kwargs), folder, expert_names="separate"))
    change(made)
    for file in folder.iterdir():
        file.unlink()
    save_file({name: x.clone() for name, x in made.items()}, folder / "model.safetensors")
    return folder
