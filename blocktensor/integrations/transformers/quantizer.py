"""The quantizer "blocktensor" of transformers: weights load as usual, and are then converted.

``save_pretrained`` of the model writes ordinary weights, ``save_pretrained_fp8`` writes FP8.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ...checkpoint.save import save_fp8
from ...conversion.convert import convert
from ...conversion.freeze import unfreeze
from ...conversion.pretrained_models import exchange, values_of
from ...conversion.report import ConversionReport
from ...fusion.fuse import FusionReport, fuse
from ...model.matrix import Matrix, fp8_weights, matrices_of
from ...model.names import weights_to_skip
from ...model.weights import is_linear, kind_of
from ...sharding.dtensor import fp8_part, local_of
from ...tensor.torch_internals.callers import caller
from .config import METHOD, BlockwiseFP8Config
from .loading import FP8Checkpoint, fp8_checkpoint, state_given_to_save


@register_quantizer(METHOD)
class BlockwiseFP8Quantizer(HfQuantizer):  # type: ignore[misc,unused-ignore]
    """Convert a model that ``from_pretrained`` has loaded, by a :class:`BlockwiseFP8Config`.

    Attributes:
        report: the report of :func:`blocktensor.convert`.
        fusion: the report of :func:`blocktensor.fuse`, if ``fuse=True``.
    """

    quantization_config: BlockwiseFP8Config
    report: ConversionReport | None = None
    fusion: FusionReport | None = None
    is_trainable = True  # the adapters and, unless it is frozen, the model itself
    is_compileable = True  # ``generate`` may compile the model

    def __init__(self, quantization_config: BlockwiseFP8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # transformers itself reads high-precision values only
        self._files: Sequence[str] | None = None
        self._stored: FP8Checkpoint | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse settings by which weights would not be in the model.

        Raises:
            NotImplementedError: a ``device_map`` that offloads; DeepSpeed ZeRO-3.
        """
        device_map = kwargs.get("device_map")
        if is_deepspeed_zero3_enabled():
            raise NotImplementedError(
                "DeepSpeed ZeRO-3 keeps no whole weights to convert: shard with FSDP2 instead"
            )
        places = set(device_map.values()) if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise _offloaded(f"device_map puts modules on {sorted(map(str, places))}")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._files = kwargs.get("checkpoint_files")
        return model

    def before_loading(
        self,
        model: Any,
        state: Mapping[str, Any],
        rules: Sequence[Any],
        device_map: Mapping[str, Any] | None,
    ) -> FP8Checkpoint | None:
        """Find the FP8 tensors among those that transformers is about to load, to read them later.

        Args:
            model: on meta.
            state: the tensors that transformers loads, by stored names.
            rules: the rules by which transformers renames and converts them.
            device_map: of modules.

        Returns:
            The weights that transformers must not load; None if there are none.

        Raises:
            CheckpointError: as :func:`.loading.fp8_checkpoint`.
            NotImplementedError: FP8 weights for several devices; the files have other blocks.
        """
        self._stored = fp8_checkpoint(model, self._files, state, rules)
        if self._stored is None:
            return None
        if len(set((device_map or {}).values())) > 1:
            raise NotImplementedError(
                f"device_map={device_map!r} for a checkpoint in FP8: expected one device, e.g. "
                f"device_map={{'': 'cuda:0'}}"
            )
        return self._stored

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        stored = set() if self._stored is None else self._stored.weights
        unread = [n for n, x in model.named_parameters() if x.is_meta and n not in stored]
        if unread:
            raise _offloaded(f"{unread[0]!r} is not on a device")
        if config.frozen:
            model.requires_grad_(False)
        if self._stored is not None:
            devices = (x.device for x in model.parameters() if not x.is_meta)
            device = next(devices, torch.device("cpu"))
            if any(local_of(x) is not None for x in model.parameters()):
                # distributed_config: transformers has cut the empty weights between ranks
                _convert_stored(model, config, stored)
                is_frozen = config.frozen
                self._stored.load(
                    model,
                    config.recipe,
                    device,
                    lambda x: not is_frozen or fp8_part(x) is None,  # skipped ones are plain
                )
            else:
                self._stored.load(model, config.recipe, device)
                if not config.frozen:
                    unfreeze(model)
                _dequantize_skipped(model, config.skip)  # these train, too
        self.report = _converted(model, config, of_fp8=self._stored is not None)
        self._stored = None
        if config.fuse:
            self.fusion = fuse(model)
        del model.config.quantization_config  # checkpoints hold ordinary weights
        return model

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the state that ``save_pretrained`` was given, unchanged."""
        return state_given_to_save(caller()), {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: ``save_pretrained`` works."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Return True if the model itself trains."""
        return not self.quantization_config.frozen

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Make FP8 weights plain parameters of the model's dtype, for ``model.dequantize()``."""
        for module in model.modules():
            for matrix in fp8_weights(module):
                _make_plain(model, matrix)
        return model


def _converted(model: PreTrainedModel, config: BlockwiseFP8Config, of_fp8: bool) -> Any:
    """Convert a model; of an FP8 checkpoint (``of_fp8``), only the head, if that is asked for."""
    head = model.get_output_embeddings() if config.convert_head else None

    def wanted(module: nn.Module, name: str) -> bool:
        return module is head if of_fp8 else config.experts is not False or is_linear(module)

    return convert(
        model,
        config.recipe,
        filter=wanted,
        skip=config.skip,
        skip_small=config.skip_small,
        stacks=config.experts if isinstance(config.experts, dict) else None,
        convert_head=config.convert_head,
    )


def _convert_stored(model: nn.Module, config: BlockwiseFP8Config, names: Set[str]) -> None:
    """Convert the weights of these names, which are on meta."""
    convert(
        model,
        config.recipe,
        filter=lambda _, name: name in names or f"{name}.weight" in names,
        skip=config.skip,
        skip_small=False,
        stacks=config.experts if isinstance(config.experts, dict) else None,
        convert_head=True,
    )


def _dequantize_skipped(model: nn.Module, skip: Sequence[str]) -> None:
    for module, key in weights_to_skip(model, skip, matrices_of(model, {})):
        for matrix in fp8_weights(module):
            if matrix.key == key:
                _make_plain(model, matrix)


def _make_plain(model: nn.Module, matrix: Matrix) -> None:
    """Put a plain parameter in the place of an FP8 weight, in all modules that hold it."""
    weight: Any = matrix.parameter
    if local_of(weight) is not None:
        raise NotImplementedError(
            f"a weight {list(weight.shape)} is sharded: dequantize the model before fully_shard"
        )
    plain = nn.Parameter(values_of(weight).contiguous(), requires_grad=weight.requires_grad)
    exchange(model, weight, plain)


def _offloaded(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what}: FP8 weights cannot be offloaded; choose a device_map without 'disk', and without "
        f"'cpu' next to GPUs (max_memory= sets their shares), or shard the model with FSDP2"
    )


def save_pretrained_fp8(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], **options: Any
) -> Path:
    """Write a converted model in FP8, 1 byte a weight, as DeepSeek-V3's checkpoints.

    ``from_pretrained(folder, quantization_config=BlockwiseFP8Config())`` reads its bytes again;
    transformers by itself reads it as its method "fp8". ``model.save_pretrained`` writes ordinary
    weights.

    Args:
        model: of transformers, converted; trainable, frozen, or both.
        save_directory: the folder to make.
        **options: of :func:`blocktensor.save_fp8`.

    Returns:
        The folder.

    Raises:
        TypeError: ``model`` is no PreTrainedModel.
        ValueError, RuntimeError: as :func:`blocktensor.save_fp8`; adapters are loaded.

    Warns:
        UserWarning: as :func:`blocktensor.save_fp8`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a transformers.PreTrainedModel; "
            f"blocktensor.save_fp8 writes any module"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model has adapters, whose tensors no FP8 checkpoint holds: save them by "
            "model.save_pretrained, which writes adapters alone"
        )
    config = model.config.to_diff_dict()
    config["architectures"] = [kind_of(model)]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    folder = save_fp8(model, save_directory, **{"config": config, **options})
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return folder
