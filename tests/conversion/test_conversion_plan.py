"""What a conversion decides: heads by size and place, ties, thresholds, filters, and reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import MinSizes, convert
from blocktensor.conversion.plan import heads_of
from tests.support.models import DIM, LINEARS, Model, converted_names, randn, reasons

SIZES = {"V": 96, "D": 64}


def tree(leaves: str) -> nn.Module:
    """Return a model of ``name[N,K]``, linears, and ``name[N]``, embeddings.

    V is the vocabulary, D the width; modules that are named by numbers are in an nn.ModuleList.
    """
    children: dict[str, str] = {}
    model = nn.Module()
    for leaf in leaves.split():
        name, _, sizes = leaf.partition("[")
        n, *k = (SIZES.get(x) or int(x) for x in sizes.rstrip("]").split(","))
        first, _, rest = name.partition(".")
        if rest:
            children[first] = f"{children.get(first, '')} {rest}[{sizes}"
        else:
            made = nn.Linear(*k, n, bias=False) if k else nn.Embedding(n, SIZES["D"])
            model.add_module(name, made)
    for name, below in children.items():
        model.add_module(name, tree(below))
    if children and all(name.isdigit() for name in children):
        return nn.ModuleList(model.children())
    return model


def head_names(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[head] for head in heads_of(model)]


LLAMA = """model.embed_tokens[V] model.layers.0.self_attn.q_proj[D,D]
    model.layers.0.mlp.up_proj[V,D] model.layers.1.mlp.up_proj[V,D] """
NESTED = "".join(f"model.language_model.{leaf} " for leaf in LLAMA.split())
MTP = LLAMA + "model.layers.2.shared_head.head[V,D] model.layers.2.eh_proj[D,128] "
BERT = """bert.embeddings.word_embeddings[V] bert.embeddings.position_embeddings[D]
    bert.embeddings.token_type_embeddings[2] bert.encoder.layer.0.attention.output.dense[D,D]
    bert.encoder.layer.0.output.dense[D,128] bert.pooler.dense[D,D]
    cls.predictions.transform.dense[D,D] """
TORCHTITAN = "tok_embeddings[V] layers.0.attention.wo[D,D] layers.0.attn.output[D,D] "
VIT = "vit.layers.0.attention.output[D,D] vit.layers.0.mlp.head[D,D] "


@pytest.mark.parametrize(
    ("leaves", "heads"),
    [
        (LLAMA + "score[3,D]", "score"),
        (NESTED + "model.language_model.lm_head[V,D] model.vision_tower.layers.0.output[D,D]",
         "model.language_model.lm_head"),
        (MTP, "model.layers.2.shared_head.head"),
        (BERT + "classifier[3,D]", "classifier"),
        (VIT + "head[10,D]", "head"),  # of timm
        (TORCHTITAN + "output[V,D]", "output"),
        ("layers.0.attention.wo[D,D] output[V,D]", "output"),  # the last pipeline stage
        ("q[D,D] k[D,D] output[D,D]", ""),  # attention alone
        ("layers.0.q[D,D] pool.q[D,D] pool.output[D,D]", ""),  # attention beside the body
        ("embed[V] up[D,D] output[2,D]", "output"),  # an embedding is a body
        ("embed[V] heads.0[V,D] heads.1[V,D]", "heads.0 heads.1"),
        ("embed[D] layers.0.q[D,D] proj[D,D]", ""),  # as wide as its vocabulary
        ("embed[D] layers.0.output[D,D] head[D,D]", "head"),  # and by name
    ],
)  # fmt: skip
def test_the_heads_of_known_models(leaves: str, heads: str) -> None:
    assert head_names(tree(leaves)) == heads.split()


def test_places_in_other_containers() -> None:
    def block() -> nn.Module:
        return tree("output[D,D] up[V,D] attn.q[D,D]")

    embed, head, last = nn.Embedding(96, DIM), nn.Linear(DIM, 96), nn.Linear(DIM, 10)
    other = nn.ModuleDict({"norm": nn.LayerNorm(DIM)})
    for model in (
        nn.ModuleDict({"embed": embed, "layers": nn.ModuleDict({"0": block()})}),
        nn.ModuleDict({"embed": embed, "layers": nn.Sequential(block(), block())}),
        nn.Sequential(embed, nn.ModuleList([block()]), other),
    ):
        assert heads_of(model) == {}
    assert heads_of(nn.Sequential(embed, nn.ModuleList([block()]), head)) == {
        head: "lm head: 96 outputs, the entries of '0'"
    }
    # torchvision: the head in a container of its own, beside the body
    body = nn.ModuleDict({"layers": nn.ModuleList([block()])})
    vision = nn.ModuleDict({"encoder": body, "heads": nn.Sequential()})
    vision["heads"].add_module("head", last)
    assert heads_of(vision) == {last: "lm head: by name and place"}


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("Llama ForCausalLM", "lm_head"),
        ("Bert ForMaskedLM", "cls.predictions.decoder"),
        ("GPT2 LMHeadModel", "lm_head"),
        ("T5 ForConditionalGeneration", "lm_head"),
        ("Whisper ForConditionalGeneration", "proj_out"),
        ("ViT ForImageClassification", "classifier"),
    ],
)
def test_the_heads_of_transformers(kind: str, head: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, suffix = kind.split()
    config = getattr(transformers, f"{name}Config")(tie_word_embeddings=False)
    with torch.device("meta"):
        assert head_names(getattr(transformers, name + suffix)(config)) == [head]


def test_the_head_is_converted_on_request_unless_it_is_tied() -> None:
    for tied in (None, nn.Embedding, nn.EmbeddingBag):
        model: Any = tree(LLAMA + "lm_head[V,D]")
        if tied is not None:
            model.model.embed_tokens = tied(SIZES["V"], SIZES["D"])
            model.lm_head.weight = model.model.embed_tokens.weight
        assert "lm_head" in reasons(convert(model, skip_small=False))
        found = reasons(convert(model, skip_small=False, convert_head=True))
        why = None if tied is None else "tied to embedding 'model.embed_tokens'"
        assert found.get("lm_head") == why


def tied_linears() -> nn.ModuleDict:
    """Return a and b of one weight, and c."""
    model = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in ("a", "b", "c")})
    model["b"].weight = model["a"].weight
    return model


@pytest.mark.parametrize(("out", "other"), ["ab", "ba"])
def test_a_linear_that_is_left_out_keeps_its_weight_for_those_tied_to_it(
    out: str, other: str
) -> None:
    ways: dict[str, Any] = {
        f"skip pattern {out!r}": {"skip": [out]},
        "filter": {"filter": lambda m, name: name != out},
    }
    for why, options in ways.items():
        model = tied_linears()
        report = convert(model, skip_small=False, **options)
        assert converted_names(model) == ["c"]
        assert reasons(report) == {out: why, other: f"tied to {out!r}: {why}"}


def test_tied_linears_convert_once_and_say_so_again() -> None:
    model = tied_linears()
    for first in ("trainable", "already converted"):
        report = convert(model, skip_small=False)
        assert [e.reason for e in report.entries] == [first, "tied to 'a'", first]
    assert report.bytes_before == report.bytes_after
    model["embed"] = nn.Embedding(DIM, DIM)
    model["embed"].weight = model["a"].weight
    report = convert(model, skip_small=False)
    assert [e.name for e in report.skipped] == ["embed"]
    tied = ["tied to 'a'", "already converted", "embedding; tied to 'a'"]
    assert [e.reason for e in report.entries] == ["already converted", *tied]


def test_the_output_projection_of_attention_is_left_alone() -> None:
    model = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)
    report = convert(model, skip_small=False)
    assert [e.name for e in report.converted] == ["linear1", "linear2"]
    assert "MultiheadAttention" in reasons(report)["self_attn.out_proj"]
    x = randn(2, 5, DIM, dtype=torch.float32, grad=True)
    model(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert model.eval()(x).shape == x.shape


UP, DOWN = LINEARS[::2], LINEARS[1::2]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, LINEARS),
        ({"skip_small": MinSizes(n=DIM, k=DIM, size=0)}, LINEARS),
        ({"skip_small": MinSizes(n=DIM + 1, k=0, size=0)}, UP),
        ({"skip_small": MinSizes(n=0, k=DIM + 1, size=0)}, DOWN),
        ({"skip": ["*.up"]}, DOWN),
        ({"skip": ("blocks.0.*", "*.1.up")}, ["blocks.1.down"]),
        ({"filter": lambda m, name: m.bias is None}, DOWN),
    ],
)
def test_what_convert_leaves_out(options: dict[str, Any], left: list[str]) -> None:
    model = Model()
    report = convert(model, **{"skip_small": False, **options})
    assert converted_names(model) == left == [e.name for e in report.converted]
    assert len(report.entries) == 6
    assert all(entry.reason for entry in report.entries)


def test_the_filter_sees_only_linears_that_could_be_converted() -> None:
    seen: list[tuple[str, type]] = []

    def see(module: nn.Module, name: str) -> bool:
        seen.append((name, type(module)))
        return True

    convert(Model(), filter=see, skip_small=False)
    assert seen == [(name, nn.Linear) for name in LINEARS]
