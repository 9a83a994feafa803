"""A model class that converts itself as it is built, and refuses parallelism that FP8 lacks.

torchtitan hands a converter the config of a model, and the model is built from it later. The config
is made one of a subclass of the model's class. It stays the same object, because the trainer has a
reference to it already when overrides run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ...model.fused_class import fused_modules
from ...model.fused_mlp import FusedMLP, why_apart
from .model_options import ModelOptions, convert_model

_OPTIONS = "_blockwise_fp8_options"


def build_in_fp8(model_config: Any, options: ModelOptions) -> Any:
    """Make the config of a torchtitan model build one that trains in FP8; returns the same config.

    Raises:
        ValueError: it does so already.
    """
    model_class = type(model_config)._owner
    if hasattr(model_class, _OPTIONS):
        raise ValueError(
            f"the model {model_class.__name__} is in blockwise FP8 already: keep one of the "
            f"converter and the override"
        )
    model_config.__class__ = _in_fp8(model_class, options).Config
    return model_config


def _in_fp8(model_class: Any, options: ModelOptions) -> Any:
    """A subclass of a torchtitan model class, of the same name.

    Its Config adds no fields, so that a config of the model can change its class to it.
    """

    class InFP8(model_class):
        @dataclass(kw_only=True, slots=True)
        class Config(model_class.Config):
            def to_dict(self) -> dict[str, Any]:
                """The fields, and the choices for FP8."""
                return {**model_class.Config.to_dict(self), "blockwise_fp8": asdict(options)}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            convert_model(self, options)
            if options.recipe.cache_weight == "step":
                self.register_forward_pre_hook(_check_not_recorded)

        def parallelize(self, parallel_dims: Any) -> None:
            """Cut the model for parallelism other than FSDP's.

            Raises:
                NotImplementedError: weights in FP8 cannot be cut so; fused MLPs would come apart.
            """
            _check_parallelism(parallel_dims)
            super().parallelize(parallel_dims)
            _check_fused(self)

    setattr(InFP8, _OPTIONS, options)
    InFP8.__name__ = model_class.__name__
    InFP8.__qualname__ = model_class.__qualname__
    InFP8.__doc__ = model_class.__doc__
    InFP8.Config.__qualname__ = model_class.Config.__qualname__
    return InFP8


def _check_parallelism(parallel_dims: Any) -> None:
    if parallel_dims.tp_enabled:
        raise NotImplementedError(
            f"tensor_parallel_degree={parallel_dims.tp}: torchtitan's tensor parallel linears "
            f"would compute weight gradients in high precision; set "
            f"--parallelism.tensor_parallel_degree 1 and shard with FSDP "
            f"(--parallelism.data_parallel_shard_degree), or train without blockwise FP8"
        )
    if parallel_dims.spmd_backend != "partial_dtensor" and parallel_dims.world_size > 1:
        raise NotImplementedError(
            f"spmd_backend={parallel_dims.spmd_backend!r} on {parallel_dims.world_size} ranks cuts "
            f"weights before FSDP does, which blockwise FP8 does not follow: set "
            f"--parallelism.spmd_backend partial_dtensor"
        )


def _check_fused(model: nn.Module) -> None:
    """Raise if ``parallelize`` has replaced the forward of a linear of a fused MLP."""
    for name, module in fused_modules(model, FusedMLP):
        why = why_apart(module, module._fused_parts)
        if why is not None:
            raise NotImplementedError(
                f"fuse=True: torchtitan's parallelize takes {name!r} apart ({why}); set "
                f"--parallelism.spmd_backend partial_dtensor and no expert parallelism, or "
                f"fuse=False"
            )


def _check_not_recorded(model: nn.Module, inputs: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "cache_weight='step' in a CUDA graph: every replay would read the weights of the step "
            "that was recorded; set --training.disable_cuda_graphs, or cache_weight='backward'"
        )
