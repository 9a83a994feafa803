"""What the converter and the overrides make of torchtitan's configs; nothing is trained here."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import titan_cpu

titan_cpu.skip_without_torchtitan()
titan_cpu.patch_torchtitan()

from torchtitan.models.deepseek_v3 import model_registry as deepseek_v3
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from blocktensor import BlockwiseFP8Weight, Recipe, Scales, saved_tensors_in_fp8
from blocktensor.integrations.torchtitan import BlockwiseFP8Converter, with_blockwise_fp8


def built(config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = config.build()
    return model


def convert(config: Any, **options: Any) -> Any:
    return BlockwiseFP8Converter.Config(**options).build().convert(config)


def converted(registry: Any, size: str = "debugmodel", **options: Any) -> Any:
    """A model of torchtitan in FP8, of two layers (llama3: one) on the meta device."""
    config = registry(size).model
    config.layers = config.layers[: 1 if registry is llama3 else 2]
    return built(convert(config, **{"skip_small": False, **options}))


def in_fp8(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if isinstance(p, BlockwiseFP8Weight)}


def kinds(model: nn.Module) -> set[str]:
    """The last parts of the names of weights in FP8, without the numbers of layers."""
    return {name.removesuffix(".weight").rpartition(".")[2] for name in in_fp8(model)}


LLAMA = {"w1", "w2", "w3", "wo", "wqkv"}
DENSE = {"w1", "w2", "w3", "wkv_a", "wkv_b", "wo", "wq"}
EXPERTS = {"w1_EFD", "w2_EDF", "w3_EFD"}


def test_converters_go_to_model_registry() -> None:
    options = BlockwiseFP8Converter.Config(skip_small=False)
    model = built(llama3("debugmodel", converters=[options]).model)
    assert kinds(model) == LLAMA
    assert len(in_fp8(model)) == 5 * 6


@pytest.mark.parametrize(
    ("model", "options", "found"),
    [
        (deepseek_v3, {}, DENSE | EXPERTS),  # no router
        (deepseek_v3, {"experts": False}, DENSE),
        (llama3, {"convert_head": True}, LLAMA | {"lm_head"}),
        (llama3, {"size": "8B", "skip_small": True}, LLAMA),
    ],
)
def test_what_is_in_fp8(model: Any, options: dict[str, Any], found: set[str]) -> None:
    assert kinds(converted(model, **options)) == found


def test_the_model_is_the_one_in_high_precision() -> None:
    plain = llama3("debugmodel").model
    want = built(plain)
    config = convert(llama3("debugmodel").model, skip_small=False)
    model = built(config)
    got, wanted = (
        {name: (p.shape, p.dtype) for name, p in each.named_parameters()} for each in (model, want)
    )
    assert got == wanted
    assert model.state_dict().keys() == want.state_dict().keys()
    assert config.get_nparams_and_flops(model, 64) == plain.get_nparams_and_flops(want, 64)
    assert type(model).__name__ == type(want).__name__ and isinstance(model, type(want))
    model.verify_module_protocol()


def test_filters_and_small_weights_which_are_left_alone_by_default() -> None:
    names = ["feed_forward", "moe", "wkv", "layers.1.attention"]
    for given in (names, tuple(names)):
        model = converted(deepseek_v3, filter_fqns=given)
        assert in_fp8(model) == {f"layers.0.attention.{name}.weight" for name in ("wq", "wo")}
    for options in ({"skip_small": True}, {"filter_fqns": ["auto_filter_small_kn"]}):
        with pytest.warns(UserWarning, match="skip_small=False converts small weights"):
            assert not in_fp8(converted(llama3, **options))


def test_a_head_that_is_tied_to_the_embedding() -> None:
    model: Any = converted(llama3, "1B", convert_head=True)
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert kinds(model) == LLAMA


def test_recipe_and_fusion() -> None:
    others: dict[str, Any] = {
        "scale": "power_of_two",
        "cache_weight": False,
        "wgrad_input": "1x128",
        "batch_invariant": True,
        "backward": "dequantized",
        "weight_grid": "mxfp4",
    }
    assert others.keys() == asdict(Recipe()).keys()
    assert not others.items() & asdict(Recipe()).items()  # none is the default
    for name, value in others.items():
        choices = {name: value}
        if name == "weight_grid":
            choices["scale"] = "power_of_two"
        layer = converted(llama3, **choices).layers["0"]
        assert layer.attention.wo.weight.recipe == Recipe(**choices)
        assert not hasattr(layer.feed_forward, "_fused_pattern")
    scales = Scales(activations="power_of_two")
    layer = converted(llama3, scale=scales).layers["0"]
    assert layer.attention.wo.weight.recipe == Recipe(scale=scales)
    fused = converted(llama3, fuse=True).layers["0"].feed_forward
    assert fused._fused_pattern.linears == ("w1", "w3", "w2")


class First(nn.Module):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


def test_activations_saved_in_fp8() -> None:
    """The context is entered by hooks of the model."""
    tokens = torch.zeros(1, 256, dtype=torch.int64, device="meta")
    for wanted in (False, True):
        model = converted(llama3, saved_tensors_in_fp8=wanted)
        model.layers["0"].attention = First()  # FlexAttention needs masks
        with saved_tensors_in_fp8(enabled=False) as watch:
            model(tokens)
        hooks = [hook.__self__ for hook in model._forward_pre_hooks.values()]
        assert len(hooks) == wanted
        assert (watch.bytes_after == 0) == wanted
        for hook in hooks:
            assert "FP8" in {kind.kept_as for kind in hook._context.kinds}


def test_the_report_is_logged_and_configs_show_the_choices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        converted(llama3)
    assert "layers.0.attention.wo" in caplog.text and "5 converted, 2 skipped" in caplog.text
    shown = convert(llama3("debugmodel").model, wgrad_input="1x128").to_dict()
    assert shown["blockwise_fp8"]["wgrad_input"] == "1x128"
    assert shown["dim"] == 256 and len(shown["layers"]) == 6


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"filter_fqns": "wo"}, TypeError, r"filter_fqns='wo': expected a list of parts"),
        ({"filter_fqns": [""]}, ValueError, "empty name, which every module contains"),
        ({"convert_head": "fp8"}, TypeError, "convert_head='fp8': expected True or False"),
        ({"scale": "bf16"}, ValueError, "scale"),
        ({"filter_fqns": ["attn.wo"]}, ValueError, r"filter_fqns=\['attn.wo'\].*no weight"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        converted(llama3, **options)


def test_what_cannot_be_converted() -> None:
    converter = BlockwiseFP8Converter.Config().build()
    config = converter.convert(llama3("debugmodel").model)
    for again in (converter, BlockwiseFP8Converter.Config(fuse=True).build()):
        with pytest.raises(ValueError, match="Llama3Model is in blockwise FP8 already"):
            again.convert(config)
    with pytest.raises(TypeError, match=r"cannot convert a Linear.Config: expected the config of"):
        converter.convert(config.lm_head)
    run = llama3_debugmodel()
    run.model_spec = None
    with pytest.raises(ValueError, match="has no model_spec"):
        with_blockwise_fp8(run)
