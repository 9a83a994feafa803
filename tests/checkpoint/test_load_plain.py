"""Loading what is not in FP8, or must not be: ordinary checkpoints, embeddings, other models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from blocktensor import BlockwiseFP8Tensor, convert, freeze, load_fp8, save_fp8
from tests.support.checkpoint_experts import rewrite
from tests.support.checkpoint_models import (
    TARGETS,
    VOCABULARY,
    assert_refused,
    assert_same,
    bits,
    filled,
    folder,
    state,
)

__all__ = ["folder"]

TOKENS = torch.arange(VOCABULARY)[None]


def test_a_checkpoint_without_fp8(folder: Path) -> None:
    """It leaves a plain model, and says so."""
    values = {name: x.clone() for name, x in filled(6, convert=False).state_dict().items()}
    del values["head.weight"]  # the embedding
    rewrite(folder, lambda stored: (stored.clear(), stored.update(values)))
    model = TARGETS["plain"]()
    with pytest.warns(UserWarning, match=r"no weight of this Model is in FP8: of .* 7 tensors are"):
        report = load_fp8(model, folder)
    assert report.fp8 == () and len(report.plain) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_fp8(filled(5), folder)  # converted: its masters are loaded


class Table(nn.Module):
    """An embedding of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Ends(nn.Module):
    """An embedding, a head, and a linear layer between them."""

    def __init__(self, embedding: Callable[[], nn.Module], tied: bool) -> None:
        super().__init__()
        self.embed, self.mid = embedding(), nn.Linear(128, 128, bias=False)
        self.head = nn.Linear(128, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(tokens)))


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("embedding", "tied"),
    [
        (lambda: nn.Embedding(VOCABULARY, 128), False),
        (lambda: nn.Embedding(VOCABULARY, 128), True),
        (Table, True),
    ],
    ids=["embedding", "tied", "tied to another class"],
)
def test_embeddings_are_dequantized(
    embedding: Callable[[], nn.Module], tied: bool, meta: bool, tmp_path: Path
) -> None:
    """They have no matmul that could read FP8."""
    source = Ends(embedding, tied)
    for module in (source.embed, source.mid):
        fp8 = BlockwiseFP8Tensor.from_values(module.weight.detach(), (128, 128))
        module.weight = nn.Parameter(fp8, requires_grad=False)
    if tied:
        source.head.weight = source.embed.weight
    save_fp8(source, tmp_path / "fp8")
    with torch.device("meta" if meta else "cpu"):
        model = Ends(embedding, tied)
    if tied:
        model.head.weight = model.embed.weight  # torch unties what it moves to meta
    report = load_fp8(model, tmp_path / "fp8")
    assert report.fp8 == ("mid.weight",) and "embed.weight" in report.plain
    assert torch.equal(model.embed.weight, source.embed.weight.dequantize())
    assert (model.head.weight is model.embed.weight) == tied
    assert model.embed.weight.requires_grad
    model(TOKENS).sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0


def test_names_below_another_module(tmp_path: Path) -> None:
    """As a text model has them in an image-text checkpoint; the remedy is that of the message."""
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    text, whole = nn.Module(), nn.Module()
    text.model = nn.Module()
    text.model.layers = layers
    whole.model = nn.Module()
    whole.model.language_model = text.model
    convert(whole, skip_small=False)
    save_fp8(whole, tmp_path / "fp8")
    wanted = [x.weight.rowwise().data.clone() for x in layers]
    text.model.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    hint = (
        r"the names of the model's 'model' begin with 'model.language_model' in the checkpoint: "
        r"make the model's 'model' the 'model.language_model' of an empty nn.Module, and load"
    )
    assert_refused(tmp_path / "fp8", text, hint)
    with pytest.warns(UserWarning, match=hint):
        report = load_fp8(text, tmp_path / "fp8", strict=False)
    assert len(report.missing) == 4 and "begin with 'model.language_model'" in str(report)
    holder = nn.Module()
    holder.model = nn.Module()
    holder.model.language_model = text.model
    load_fp8(holder, tmp_path / "fp8", strict=False)
    for found, data in zip(text.model.layers, wanted, strict=True):
        assert torch.equal(bits(found.weight.rowwise().data), bits(data))


def layers(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256, bias=bias), nn.SiLU(), nn.Linear(256, 128, bias=bias))


def below(name: str, model: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.add_module(name, model)
    return holder


@pytest.mark.parametrize("name", ["_orig_mod", "module"])
@pytest.mark.parametrize("source", [layers(), nn.Linear(128, 128, bias=False)], ids=["layers", "1"])
def test_a_small_model_of_other_names(name: str, source: nn.Module, tmp_path: Path) -> None:
    """Names that torch.compile and DDP make; the remedies are those of the messages."""
    model, wrapped = copy.deepcopy(source), below(name, copy.deepcopy(source))
    convert(wrapped, skip_small=False)
    freeze(wrapped)
    save_fp8(wrapped, tmp_path / "wrapped")
    hint = f"; the names of the model begin with '{name}' in the checkpoint: make the model the "
    assert_refused(tmp_path / "wrapped", model, hint)
    with pytest.warns(UserWarning, match=hint) as found:
        assert hint in str(load_fp8(model, tmp_path / "wrapped", strict=False))
    assert "convert" not in str(found[0].message)
    load_fp8(below(name, model), tmp_path / "wrapped", strict=False)
    assert_same(state(below(name, model)), state(wrapped))

    save_fp8(model, tmp_path / "alone")
    other = below(name, copy.deepcopy(source))
    hint = f"; the checkpoint is of the model's '{name}' alone: load into that"
    assert_refused(tmp_path / "alone", other, hint)
    load_fp8(other.get_submodule(name), tmp_path / "alone")


def test_adapters_are_named(tmp_path: Path) -> None:
    """The remedies are those of the messages."""
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"]))

    source = layers().requires_grad_(False)
    convert(source, skip_small=False)
    save_fp8(source, tmp_path / "base")
    model = layers()
    hint = "; the model has adapters of peft: load into it before get_peft_model$"
    assert_refused(tmp_path / "base", adapted(layers()), hint)
    load_fp8(model, tmp_path / "base")
    save_fp8(adapted(model), tmp_path / "adapted")
    hint = "; the checkpoint has adapters of peft: load it into a model with the same adapters$"
    assert_refused(tmp_path / "adapted", layers(), hint)
    load_fp8(adapted(layers()), tmp_path / "adapted")


def test_no_prefix_is_guessed(tmp_path: Path) -> None:
    source = layers()
    convert(source, skip_small=False)
    save_fp8(source, tmp_path / "fp8")
    one = nn.Linear(128, 128)  # it may be either layer
    with pytest.warns(UserWarning, match=r"2 of the model's are missing$"):
        load_fp8(one, tmp_path / "fp8", strict=False)
    # one layer of another name, in a model whose other names fit
    renamed = nn.Sequential(source[0], nn.SiLU(), below("2", source[2]))
    save_fp8(renamed, tmp_path / "renamed")
    report = load_fp8(layers(), tmp_path / "renamed", strict=False)
    assert report.missing == ("2.weight", "2.bias")
    assert str(report).endswith("; 2 missing, 2 unexpected")
