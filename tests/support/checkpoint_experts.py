"""A layer of experts as transformers marks them, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blocktensor import Recipe, save_fp8
from blocktensor import convert as convert_model
from blocktensor.checkpoint import stored
from tests.support.models import randn

E, K = 3, 200
STACKS = {"experts.gate_up_proj", "experts.down_proj"}
MATRICES = ("gate_proj", "up_proj", "down_proj")
Tensors = dict[str, Tensor]


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

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(sizes.get("experts", E), K, dtype=torch.bfloat16))
        self.experts = Experts(**sizes)


def layer(
    seed: int = 0,
    *,
    convert: bool = True,
    frozen: bool = False,
    recipe: Recipe | None = None,
    **sizes: Any,
) -> Layer:
    """One with values that follow from ``seed``."""
    model = Layer(**sizes)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=10 * seed + i, dtype=torch.bfloat16))
    model.experts.requires_grad_(not frozen)
    if convert:
        convert_model(model, recipe or Recipe(), skip_small=False)
    return model


def on_meta() -> Layer:
    with torch.device("meta"):
        return Layer()


def read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint, which becomes one file without index."""
    made = read(folder)
    change(made)
    for file in folder.glob("model*"):
        file.unlink()
    tensors = {name: x.contiguous().clone() for name, x in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_whole(model: nn.Module, folder: Path, **options: Any) -> Path:
    """Save stacks of experts whole, under the model's own names, for models of transformers too.

    Where it dequantizes, transformers would leave out their scales.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stored, "pretrained_models", lambda _: ())
        return save_fp8(model, folder, all_in_fp8=True, **options)


def join_matrices(made: Tensors) -> None:
    """Store stacks in place of matrices whose scales are those of stacks, as load_fp8 says."""
    parts = {"gate_up_proj": ("gate_proj", "w1", "up_proj", "w3"), "down_proj": ("down_proj", "w2")}
    for scale in [name for name in made if name.endswith(tuple(f".{x}_scale_inv" for x in parts))]:
        home, _, stack = scale.removesuffix("_scale_inv").rpartition(".")
        experts: list[Tensor] = []
        while True:
            names = [f"{home}.{len(experts)}.{part}.weight" for part in parts[stack]]
            matrices = [made.pop(name) for name in names if name in made]
            if not matrices:
                break
            experts.append(torch.cat(matrices))
        if experts:
            made[f"{home}.{stack}"] = torch.stack(experts)
