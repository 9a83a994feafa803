"""A layer of experts as transformers marks them, for checkpoints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blocktensor import Recipe, save_fp8
from blocktensor import convert as convert_model
from blocktensor.checkpoint import names
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.models import randn

E, K = 3, 200
STACKS = {"experts.gate_up_proj", "experts.down_proj"}
MATRICES = ("gate_proj", "up_proj", "down_proj")
Tensors = dict[str, Tensor]
_SCALE = re.compile(r"(.*experts\.)(\d+)\.(w\d|gate_proj|up_proj|down_proj)\.weight_scale_inv")


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


def split_experts(seed: int) -> nn.Module:
    """The frozen experts of a layer as torchtitan has them: stacks of gate and of up."""
    experts, split = layer(seed, frozen=True).experts, nn.Module()
    split.w1_EFD, split.w3_EFD = (nn.Parameter(x, False) for x in experts.gate_up_proj.chunk(2, 1))
    split.w2_EDF = experts.down_proj
    return split


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


def stack_scales(tensors: Tensors) -> None:
    """Replace the scales of matrices of experts by those of stacks, as transformers 5.23 does."""
    found: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=lambda name: "up_proj" in name or "w3" in name):
        match = _SCALE.fullmatch(name)
        if match is not None:
            home, expert, matrix = match.groups()
            stack = "down_proj" if matrix in ("down_proj", "w2") else "gate_up_proj"
            shape = BLOCKS_128X128.scale_shape(tensors[name.removesuffix("_scale_inv")].shape)
            scale = tensors.pop(name).view(shape)
            found[f"{home}{stack}_scale_inv"][int(expert)].append(scale)
    for name, experts in found.items():
        tensors[name] = torch.stack([torch.cat(experts[e]) for e in range(len(experts))])


def written(folder: Path, change: Callable[[Tensors], object], **kwargs: Any) -> Path:
    """A checkpoint in matrices of experts, without index, after a change to its tensors."""
    rewrite(save_fp8(layer(frozen=True, **kwargs), folder, separate_experts=True), change)
    return folder


def save_whole(model: nn.Module, folder: Path, **options: Any) -> Path:
    """Save stacks of experts whole, under the model's own names, for models of transformers too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(names, "pretrained_names", lambda *_: {})
        return save_fp8(model, folder, **options)


def own_scales(made: Tensors) -> None:
    """Leave the scales of each matrix."""


def split_stacks(made: Tensors) -> None:
    """Store the matrices of experts one by one, and leave the scales of their stacks."""
    for stack, parts in (("gate_up_proj", MATRICES[:2]), ("down_proj", MATRICES[2:])):
        for e, expert in enumerate(made.pop(f"experts.{stack}")):
            for part, x in zip(parts, expert.chunk(len(parts)), strict=True):
                made[f"experts.{e}.{part}.weight"] = x


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


def sharing(folder: Path) -> Path:
    """144 rows of gate and of up: the second block of the stack has rows of both."""
    rewrite(save_fp8(layer(n=144, frozen=True), folder), split_stacks)
    return folder


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda made: [made.pop(key) for key in list(made) if key.startswith(name)]


def to_bf16(matrix: str) -> Callable[[Tensors], object]:
    def change(made: Tensors) -> None:
        made[f"{matrix}.weight"] = made[f"{matrix}.weight"].bfloat16()
        made.pop(f"{matrix}.weight_scale_inv", None)

    return change
