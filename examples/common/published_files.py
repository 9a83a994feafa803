"""Random weights in the files and under the names of DeepSeek-V3's published checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import blocktensor

INDEX = "model.safetensors.index.json"


def write_published(model: Any, folder: Path, device: torch.device) -> None:
    """Write random weights for a model on meta: a file for each layer, made on ``device``.

    Matrices are e4m3 with ``weight_scale_inv``. The index comes last: a folder that has one is
    whole.
    """
    linear = {f"{name}.weight" for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    files: dict[str, list[tuple[str, Sequence[int], bool]]] = defaultdict(list)
    for name, x in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        for stored, shape in stored_as(name, x.shape):
            is_fp8 = stored != name or (name in linear and layer != "rest")
            files[f"model-{layer}.safetensors"].append((stored, shape, is_fp8))
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    places: dict[str, str] = {}
    for file, described in files.items():
        tensors: dict[str, Tensor] = {}
        for name, shape, is_fp8 in described:
            tensors |= in_fp8(name, shape, device) if is_fp8 else in_bf16(name, shape, device)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    model.config.quantization_config = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": [128, 128],
    }
    model.config.save_pretrained(folder)
    index = {"metadata": {}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def stored_as(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """Names and shapes in the files: matrices of each expert in the place of a stack."""
    home, _, stack = name.rpartition(".")
    if stack == "gate_up_proj":
        for expert in range(shape[0]):
            for part in ("gate_proj", "up_proj"):
                yield f"{home}.{expert}.{part}.weight", (shape[1] // 2, shape[2])
    elif stack == "down_proj":
        for expert in range(shape[0]):
            yield f"{home}.{expert}.down_proj.weight", shape[1:]
    else:
        yield name, shape


def in_fp8(name: str, shape: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Make a matrix and its scales."""
    values = torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)
    data, scale, _ = blocktensor.BlockwiseFP8Tensor.from_values(values, (128, 128)).rowwise()
    return {name: data.cpu(), f"{name}_scale_inv": scale.contiguous().cpu()}


def in_bf16(name: str, shape: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Make a norm, an embedding, the head or a router; the biases of routers are zeros in fp32."""
    if name.endswith("e_score_correction_bias"):
        return {name: torch.zeros(*shape)}
    if len(shape) == 1:
        return {name: torch.ones(*shape, dtype=torch.bfloat16)}
    values = torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)
    return {name: values.cpu()}
