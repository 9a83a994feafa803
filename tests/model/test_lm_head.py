"""Which linear is the head: by size and place, on the shapes of known models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktensor import convert
from blocktensor.model.lm_head import heads_of
from tests.support.models import reasons

VOCABULARY, DIM = 96, 64


def tree(leaves: dict[str, nn.Module]) -> nn.Module:
    """A model of modules by their dotted names; those named by numbers are in an nn.ModuleList."""
    children: dict[str, dict[str, nn.Module]] = {}
    model = nn.Module()
    for name, leaf in leaves.items():
        first, _, rest = name.partition(".")
        if rest:
            children.setdefault(first, {})[rest] = leaf
        else:
            model.add_module(name, leaf)
    for name, below in children.items():
        model.add_module(name, tree(below))
    if children and all(name.isdigit() for name in children):
        return nn.ModuleList(model.children())
    return model


def linears(**sizes: tuple[int, int]) -> dict[str, nn.Module]:
    """Linears by name (``__`` for a dot), N and K."""
    return {k.replace("__", "."): nn.Linear(i, o, bias=False) for k, (o, i) in sizes.items()}


def embeddings(**sizes: int) -> dict[str, nn.Module]:
    return {k.replace("__", "."): nn.Embedding(rows, DIM) for k, rows in sizes.items()}


LLAMA = {
    **embeddings(model__embed_tokens=VOCABULARY),
    **linears(
        model__layers__0__self_attn__q_proj=(DIM, DIM),
        model__layers__0__mlp__up_proj=(VOCABULARY, DIM),
        model__layers__1__mlp__up_proj=(VOCABULARY, DIM),
    ),
}
BERT = {
    **embeddings(
        bert__embeddings__word_embeddings=VOCABULARY,
        bert__embeddings__position_embeddings=DIM,
        bert__embeddings__token_type_embeddings=2,
    ),
    **linears(
        bert__encoder__layer__0__attention__output__dense=(DIM, DIM),
        bert__encoder__layer__0__output__dense=(DIM, 128),
        bert__pooler__dense=(DIM, DIM),
        cls__predictions__transform__dense=(DIM, DIM),
    ),
}
TORCHTITAN = {
    **embeddings(tok_embeddings=VOCABULARY),
    **linears(layers__0__attention__wo=(DIM, DIM), layers__0__attn__output=(DIM, DIM)),
}
VIT = linears(vit__layers__0__attention__output=(DIM, DIM), vit__layers__0__mlp__head=(DIM, DIM))
WHISPER = {
    **embeddings(model__encoder__embed_positions=128, model__decoder__embed_tokens=VOCABULARY),
    **linears(model__decoder__layers__0__self_attn__out_proj=(DIM, DIM)),
}
T5 = {
    **embeddings(
        shared=VOCABULARY, encoder__block__0__layer__0__SelfAttention__relative_attention_bias=32
    ),
    **linears(decoder__block__0__layer__0__SelfAttention__o=(DIM, DIM)),
}
MTP = {
    **LLAMA,
    **linears(
        model__layers__2__shared_head__head=(VOCABULARY, DIM),
        model__layers__2__eh_proj=(DIM, 2 * DIM),
    ),
}


@pytest.mark.parametrize(
    ("leaves", "heads"),
    [
        pytest.param({**LLAMA, **linears(lm_head=(VOCABULARY, DIM))}, ["lm_head"], id="Llama"),
        pytest.param({**LLAMA, **linears(score=(3, DIM))}, ["score"], id="Llama that classifies"),
        pytest.param(
            {
                **{f"model.language_model.{name}": leaf for name, leaf in LLAMA.items()},
                **linears(
                    model__language_model__lm_head=(VOCABULARY, DIM),
                    model__vision_tower__layers__0__output=(DIM, DIM),
                ),
            },
            ["model.language_model.lm_head"],
            id="nested",
        ),
        pytest.param(MTP, ["model.layers.2.shared_head.head"], id="multi-token prediction"),
        pytest.param(
            {**BERT, **linears(cls__predictions__decoder=(VOCABULARY, DIM))},
            ["cls.predictions.decoder"],
            id="BERT",
        ),
        pytest.param(
            {**BERT, **linears(classifier=(3, DIM))}, ["classifier"], id="BERT classifier"
        ),
        pytest.param({**T5, **linears(lm_head=(VOCABULARY, DIM))}, ["lm_head"], id="T5"),
        pytest.param({**VIT, **linears(classifier=(10, DIM))}, ["classifier"], id="ViT"),
        pytest.param({**VIT, **linears(head=(10, DIM))}, ["head"], id="ViT of timm"),
        pytest.param(
            {**WHISPER, **linears(proj_out=(VOCABULARY, DIM))}, ["proj_out"], id="Whisper"
        ),
        pytest.param(
            {**TORCHTITAN, **linears(output=(VOCABULARY, DIM))}, ["output"], id="torchtitan"
        ),
        pytest.param(
            linears(layers__0__attention__wo=(DIM, DIM), output=(VOCABULARY, DIM)),
            ["output"],
            id="last pipeline stage",
        ),
        pytest.param(
            linears(q=(DIM, DIM), k=(DIM, DIM), output=(DIM, DIM)), [], id="attention alone"
        ),
        pytest.param(
            linears(layers__0__q=(DIM, DIM), pool__q=(DIM, DIM), pool__output=(DIM, DIM)),
            [],
            id="attention beside the body",
        ),
        pytest.param(
            {**embeddings(embed=VOCABULARY), **linears(up=(DIM, DIM), output=(2, DIM))},
            ["output"],
            id="an embedding is a body",
        ),
        pytest.param(
            {
                **embeddings(embed=VOCABULARY),
                **linears(heads__0=(VOCABULARY, DIM), heads__1=(VOCABULARY, DIM)),
            },
            ["heads.0", "heads.1"],
            id="a list of heads",
        ),
        pytest.param(
            {**embeddings(embed=DIM), **linears(layers__0__q=(DIM, DIM), proj=(DIM, DIM))},
            [],
            id="as wide as its vocabulary",
        ),
        pytest.param(
            {**embeddings(embed=DIM), **linears(layers__0__output=(DIM, DIM), head=(DIM, DIM))},
            ["head"],
            id="as wide as its vocabulary, by name",
        ),
    ],
)
def test_the_heads_of_known_models(leaves: dict[str, nn.Module], heads: list[str]) -> None:
    model = tree(leaves)
    names = {module: name for name, module in model.named_modules()}
    assert [names[head] for head in heads_of(model)] == heads


def test_places_in_other_containers() -> None:
    def block() -> nn.Module:
        return tree(linears(output=(DIM, DIM), up=(VOCABULARY, DIM), attn__q=(DIM, DIM)))

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(DIM)

    embed = nn.Embedding(VOCABULARY, DIM)
    for model in (
        nn.ModuleDict({"embed": embed, "layers": nn.ModuleDict({"0": block()})}),
        nn.ModuleDict({"embed": embed, "layers": nn.Sequential(block(), block())}),
        nn.Sequential(embed, nn.ModuleList([block()]), Other()),
    ):
        assert heads_of(model) == {}
    head = nn.Linear(DIM, VOCABULARY)
    assert heads_of(nn.Sequential(embed, nn.ModuleList([block()]), head)) == {
        head: "lm head: 96 outputs, the entries of '0'"
    }
    # torchvision: the head in a container of its own, beside the body
    last = nn.Linear(DIM, 10)
    body = nn.ModuleDict({"layers": nn.ModuleList([block()])})
    vision = nn.ModuleDict({"encoder": body, "heads": nn.Sequential()})
    vision["heads"].add_module("head", last)
    assert heads_of(vision) == {last: "lm head: by name and place"}


def test_convert_leaves_heads_alone_and_nothing_else() -> None:
    model = tree({**BERT, **linears(cls__predictions__decoder=(VOCABULARY, DIM))})
    report = convert(model, auto_filter_small_kn=False)
    assert [e.name for e in report.converted] == [
        "bert.encoder.layer.0.attention.output.dense",
        "bert.encoder.layer.0.output.dense",
        "bert.pooler.dense",
        "cls.predictions.transform.dense",
    ]
    assert reasons(report)["cls.predictions.decoder"] == (
        "lm head: 96 outputs, the entries of 'bert.embeddings.word_embeddings'"
    )


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("Llama", ["lm_head"]),
        ("Bert", ["cls.predictions.decoder"]),
        ("GPT2", ["lm_head"]),
        ("T5", ["lm_head"]),
        ("Whisper", ["proj_out"]),
        ("ViT", ["classifier"]),
    ],
)
def test_the_heads_of_transformers(name: str, heads: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = {
        "Bert": "BertForMaskedLM",
        "GPT2": "GPT2LMHeadModel",
        "Llama": "LlamaForCausalLM",
        "T5": "T5ForConditionalGeneration",
        "ViT": "ViTForImageClassification",
        "Whisper": "WhisperForConditionalGeneration",
    }
    config = getattr(transformers, f"{name}Config")(tie_word_embeddings=False)
    with torch.device("meta"):
        model = getattr(transformers, kinds[name])(config)
    names = {module: module_name for module_name, module in model.named_modules()}
    assert [names[head] for head in heads_of(model)] == heads


def test_the_head_is_converted_on_request() -> None:
    model = tree({**LLAMA, **linears(lm_head=(VOCABULARY, DIM))})
    assert "lm_head" in reasons(convert(model, auto_filter_small_kn=False))
    report = convert(model, auto_filter_small_kn=False, head="fp8")
    assert "lm_head" in [entry.name for entry in report.converted]
    assert "lm_head" not in reasons(report)


def test_a_tied_head_stays() -> None:
    model = tree({**LLAMA, **linears(lm_head=(VOCABULARY, DIM))})
    model.lm_head.weight = model.model.embed_tokens.weight
    report = convert(model, auto_filter_small_kn=False, head="fp8")
    assert reasons(report)["lm_head"] == "tied to embedding 'model.embed_tokens'"


def test_another_head_raises() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM))
    with pytest.raises(ValueError, match="head='bf16': expected 'fp8', or None"):
        convert(model, head="bf16")  # type: ignore[arg-type]
    assert type(model[0].weight) is nn.Parameter
