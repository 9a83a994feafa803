"""What a conversion decides: heads by size and place, ties, thresholds, filters, and reasons."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from blocktensor import BlockwiseFP8Weight, MinSizes, Recipe, convert, explain
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.conversion.plan import heads_of
from blocktensor.model.matrix import all_fp8_weights
from tests.support.matrices import every_matrix
from tests.support.models import DIM, LINEARS, Model, converted_names, randn, reasons
from tests.support.moe_models import TitanMoE
from tests.support.ranks import on_ranks
from tests.support.sharded import build, shard

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
        (
            NESTED + "model.language_model.lm_head[V,D] model.vision_tower.layers.0.output[D,D]",
            "model.language_model.lm_head",
        ),
        (MTP, "model.layers.2.shared_head.head"),
        (BERT + "classifier[3,D]", "classifier"),
        (VIT + "head[10,D]", "head"),  # of timm
        (TORCHTITAN + "output[V,D]", "output"),
        ("layers.0.attention.wo[D,D] output[V,D]", "output"),  # the last pipeline stage
        ("q[D,D] k[D,D] output[D,D]", ""),  # attention alone
        ("layers.0.q[D,D] pool.q[D,D] pool.output[D,D]", ""),  # attention beside the body
        ("embed[V] up[D,D] output[2,D]", "output"),  # an embedding is a body
        ("embed[V] heads.0[V,D] heads.1[V,D]", "heads.0 heads.1"),
        # a table of as many positions as a feed-forward layer has outputs
        ("embed[V] pos[80] a.up[80,D] a.down[D,80] b.up[80,D] b.down[D,80] proj[V,D]", "proj"),
        ("embed[V] pos[80] a.up[80,D] heads.0[80,D] heads.1[80,D] proj[V,D]", "proj"),
        ("embed[V] a.up[V,D] b.up[V,D] c.output[V,D]", "c.output"),
        ("embed[V] up[V,D] output[V,D]", "output"),
        ("embed[V] up[V,D] proj[80,D]", "up"),  # one layer of this size
        ("embed[D] layers.0.q[D,D] proj[D,D]", ""),  # as wide as its vocabulary
        ("embed[D] layers.0.output[D,D] head[D,D]", "head"),  # and by name
    ],
)
def test_the_heads_of_known_models(leaves: str, heads: str) -> None:
    assert head_names(tree(leaves)) == heads.split()


def test_a_tied_layer_is_the_head_rather_than_others_of_its_size() -> None:
    model: Any = tree("embed[V] up[V,D] proj[V,D]")
    assert head_names(model) == []
    model.proj.weight = model.embed.weight
    assert head_names(model) == ["proj"]


def test_layers_that_follow_each_other_are_no_heads_by_their_size() -> None:
    up, down, again = nn.Linear(DIM, 96), nn.Linear(96, DIM), nn.Linear(DIM, 96)
    assert heads_of(nn.Sequential(nn.Embedding(96, DIM), up, down)).keys() == {up}
    assert heads_of(nn.Sequential(nn.Embedding(96, DIM), up, down, again)) == {}


NAMES = "lm_head output output_layer head embed_out output_projection logits proj_out classifier"


@pytest.mark.parametrize("name", [*NAMES.split(), "score"])
def test_usual_names_of_heads(name: str) -> None:
    body = "embed[V] layers.0.attention.output[D,D] "
    assert head_names(tree(f"{body} {name}[3,D] up[3,D]")) == [name]
    assert head_names(tree(f"{body} {name}_norm[3,D]")) == []


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
    alone = nn.Sequential()  # no body, however deep
    alone.add_module("heads", vision["heads"])
    assert heads_of(alone) == heads_of(nn.Sequential(alone)) == {}


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


# Dry runs: what they say, and that they change nothing

OPTIONS: dict[str, Any] = {"skip_small": False}
NAMED = OPTIONS | {"stacks": {"*.experts": ["gate_up_proj", "down_proj"]}}


def all_frozen() -> nn.Module:
    model = every_matrix()
    for parameter in model.parameters():
        parameter.requires_grad = False  # requires_grad_ refuses lazy ones
    return model


def partly_frozen() -> nn.Module:
    model = Model()
    model.blocks[0].requires_grad_(False)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return partly_frozen()


def with_hooks() -> nn.Module:
    model = Model()
    model.blocks[0].up.register_forward_hook(lambda *args: None)
    model.blocks[0].up.weight.register_hook(lambda g: g)
    model.blocks[0].up.weight.attribute = 3
    return model


def twice_converted() -> nn.Module:
    """Some weights of another recipe, one of them tied to what is no linear and comes first."""
    model = nn.Sequential(nn.Module(), *partly_frozen().blocks, nn.Embedding(DIM, 3 * DIM))
    model[0].alias = model[2].up.weight
    model[3].weight = model[2].up.weight
    model[2].apply(lambda module: apply(module, Recipe(scale="power_of_two")))
    return model


Case = tuple[Callable[[], nn.Module], dict[str, Any]]
CASES: dict[str, Case] = {
    "kinds": (every_matrix, OPTIONS),
    "kinds, frozen": (all_frozen, NAMED),
    "stacks": (every_matrix, NAMED),
    "experts": (lambda: TitanMoE(2, 128, 256), OPTIONS),
    "partly frozen": (partly_frozen, OPTIONS | {"convert_head": True, "skip": ["*.1.up"]}),
    "meta": (on_meta, OPTIONS),
    "hooks": (with_hooks, OPTIONS | {"recipe": Recipe(cache_weight=False)}),
    "again": (twice_converted, OPTIONS),
    "recast": (twice_converted, OPTIONS | {"recipe": Recipe(wgrad_input="128x128")}),
    "one linear": (lambda: nn.Linear(DIM, DIM), OPTIONS),
}


def marks(model: nn.Module) -> list[Any]:
    """All that a conversion could change: objects, classes, hooks, attributes, storage."""

    def held(x: Any) -> Any:
        return [(key, id(value)) for key, value in x.items()] if isinstance(x, dict) else id(x)

    objects = [*model.modules(), *model.parameters(), *model.buffers()]
    return [
        (id(x), type(x), {key: held(value) for key, value in vars(x).items()}) for x in objects
    ] + [
        (p.requires_grad, p._version, p._backward_hooks and list(p._backward_hooks))
        for p in model.parameters()
    ]


@pytest.mark.parametrize("case", CASES)
def test_it_changes_nothing_and_is_the_report_of_the_conversion(case: str) -> None:
    """A report that also counts the layers that ``explain`` lists, as does a later one."""
    make, options = CASES[case]
    model = make()
    before, values = marks(model), copy.deepcopy(model).state_dict()
    report = convert(model, dry_run=True, **options)
    assert report.converted
    assert marks(model) == before
    for name, value in model.state_dict().items():
        is_known = not isinstance(value, nn.UninitializedParameter) and not value.is_meta
        assert not is_known or torch.equal(value, values[name])
    assert convert(model, **options) == report
    assert marks(model) != before or case == "again"
    listed = dict.fromkeys(matmul.layer for matmul in explain(model).matmuls)
    again = convert(model, **(options | {"stacks": None}))
    for each in (report, again):
        assert [entry.name for entry in each.converted] == list(listed)
    assert again.bytes_after == report.bytes_after
    assert again.fp8_share == report.fp8_share > 0


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"meta", "again", "recast"}))
def test_the_bytes_are_those_that_the_model_holds(case: str) -> None:
    make, options = CASES[case]
    options = options | {"recipe": Recipe(cache_weight=False)}
    model = make()
    converted = convert(model, dry_run=True, **options).converted
    convert(model, **options)
    told = {"frozen": 0, "trainable": 0}
    for entry in converted:
        told["frozen" if entry.reason.startswith("frozen") else "trainable"] += entry.bytes_after
    held = {"frozen": 0, "trainable": 0}
    for weight in {matrix.parameter for matrix in all_fp8_weights(model)}:
        if isinstance(weight, BlockwiseFP8Weight):
            held["trainable"] += weight.master.nbytes
        else:
            held["frozen"] += weight.operand.nbytes()  # type: ignore[operator]
    assert told == held


def test_what_is_fp8_already_keeps_its_recipe() -> None:
    model = Model()
    held = convert(model, Recipe(cache_weight=False), **OPTIONS).bytes_after
    again = convert(model, dry_run=True, **OPTIONS)
    assert (again.bytes_before, again.bytes_after) == (held, held)


def test_the_row_of_the_linear_counts_a_weight_that_another_module_holds_first() -> None:
    model = nn.Sequential(nn.Module(), nn.Linear(DIM, DIM, bias=False))
    model[0].alias = model[1].weight
    size = DIM * DIM
    for options in (OPTIONS | {"dry_run": True}, OPTIONS, OPTIONS):
        report = convert(model, **options)
        assert [(e.converted, e.elements) for e in report.entries] == [(False, 0), (True, size)]
        assert (report.fp8_share, report.bytes_after) == (1.0, 4 * size + size + 4)


def test_an_embedding_in_fp8_is_no_layer() -> None:
    model = nn.Sequential(nn.Embedding(50, DIM), nn.Linear(DIM, DIM))
    model[0].weight = nn.Parameter(BlockwiseFP8Weight(model[0].weight.detach()))
    assert reasons(convert(model, **OPTIONS)) == {"0": "embedding"}


@on_ranks(2)
def test_a_sharded_model(mesh: DeviceMesh, device: str) -> None:
    model = build().to(device)
    shard(model, mesh)
    before = marks(model)
    report = convert(model, skip_small=False, dry_run=True)
    assert marks(model) == before
    assert {e.reason for e in report.converted} == {"trainable, gathered in FP8"}
    assert report.bytes_after == report.bytes_before
    assert convert(model, skip_small=False) == report


def test_it_warns_as_the_conversion_does() -> None:
    with pytest.warns(UserWarning, match="^no weight of this Model is in FP8: skip_small=False"):
        convert(Model(), dry_run=True)
