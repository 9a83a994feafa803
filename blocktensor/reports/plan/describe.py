"""Describe a model by what memory and speed depend on: the sizes of its blocks.

A block is what an entry of a container (``layers.3``) holds. Attention and MLPs are recognized by
the usual names of their linear layers.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy

from ...conversion.convert import convert
from ...conversion.plan import heads_of
from ...conversion.report import ALREADY
from ...fusion.layer_names import GATED_MLPS
from ...fusion.norm import linears_of
from ...model.matrix import Matrix, matrices_of
from ...model.weights import experts_per_token, is_linear
from .setup import Setup

Role = Literal["input", "attention output", "down", "head"]

QUERY = {"q", "q_proj", "wq", "q_b_proj", "query", "to_q"}
KEY = {"k", "k_proj", "wk", "key", "to_k"}
VALUE = {"v", "v_proj", "wv", "value", "to_v"}
QKV = {"qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv"}
LATENT = {"kv_b_proj", "wkv_b"}
OUTPUT = {"o", "o_proj", "wo", "out_proj", "c_proj", "dense", "to_out", "proj"}
GATE, UP = ({names[i] for names in GATED_MLPS if names[0] != names[1]} for i in range(2))
JOINT = {"gate_up", "mlp1_weight", *(names[0] for names in GATED_MLPS if names[0] == names[1])}
DOWN = {"c_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp2_weight", *(x[2] for x in GATED_MLPS)}
HEAD_NORMS = {"q_norm": "queries", "query_norm": "queries", "k_norm": "keys", "key_norm": "keys"}

_TORCH_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)
_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")
_EXPERT = re.compile(r"(.*\bexperts)\.\d+(?=\.|$)")
_SUFFIX = re.compile(r"_E[A-Z]{2}$")


@dataclass(frozen=True)
class Matmul:
    """A weight, or a stack of experts, that tokens are multiplied by.

    Attributes:
        name: of the weight in its block.
        parent: the module that it is part of; linear layers of one parent and role that have the
            same K read the same tensor.
        n, k: outputs and inputs.
        experts: matrices in a stack; 1 for a linear layer.
        rows: rows of the input for a token: experts get one for each expert of a token.
        in_fp8: True if ``convert`` would convert it.
    """

    name: str
    parent: str
    role: Role
    n: int
    k: int
    experts: int
    rows: float
    in_fp8: bool

    @property
    def elements(self) -> int:
        """Values of the weight."""
        return self.experts * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """Features of a token's queries, keys, values and output, over all heads."""

    queries: int
    keys: int
    values: int
    output: int
    heads: int


@dataclass(frozen=True)
class Mlp:
    """An MLP of ``hidden`` features.

    Attributes:
        rows: of its input for a token.
        width: features of its input.
    """

    parent: str
    hidden: int
    width: int
    rows: float
    is_gated: bool
    is_stack: bool


@dataclass(frozen=True)
class Norm:
    """A norm of ``width`` features of each token.

    Attributes:
        is_written_out: True if its forward is several ops, as in transformers.
        is_of_heads: True for norms of queries and keys.
        feeds_fp8: True if linear layers that read it, by its name, run in FP8.
    """

    width: int
    is_written_out: bool
    is_of_heads: bool = False
    feeds_fp8: bool = False


@dataclass(frozen=True)
class Block:
    """The matmuls, attention, MLPs and norms of one block, or of all outside of blocks.

    Attributes:
        width: features of a token in the residual stream.
        parameters: values of all its parameters.
    """

    matmuls: tuple[Matmul, ...]
    attention: Attention | None
    mlps: tuple[Mlp, ...]
    norms: tuple[Norm, ...]
    width: int
    parameters: int

    def groups(self) -> dict[tuple[str, str, int], list[Matmul]]:
        """Return the matmuls that read the same tensor, together."""
        groups: dict[tuple[str, str, int], list[Matmul]] = {}
        for matmul in self.matmuls:
            groups.setdefault((matmul.parent, matmul.role, matmul.k), []).append(matmul)
        return groups

    @property
    def fp8_elements(self) -> int:
        """Values of the weights that run in FP8."""
        return sum(m.elements for m in self.matmuls if m.in_fp8)


@dataclass(frozen=True)
class Description:
    """A model.

    Attributes:
        blocks: in order.
        head: the linear layer of the logits, and the norm before it; None if there is none.
        embedding: values of embeddings; with a tied head they are the head's weight too.
        is_tied: True if the head's weight is an embedding.
        others: values of all other parameters outside of blocks.
        is_frozen: True if no parameter requires a gradient.
        notes: what the description leaves out.
    """

    blocks: tuple[Block, ...]
    head: Block | None
    embedding: int
    is_tied: bool
    others: int
    is_frozen: bool = False
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Values of all parameters; tied ones count once."""
        head = 0 if self.head is None else self.head.parameters
        return self.embedding + self.others + head + sum(x.parameters for x in self.blocks)

    @property
    def width(self) -> int:
        """Features of a token in the residual stream."""
        return self.blocks[0].width

    @property
    def fp8_elements(self) -> int:
        """Values of the weights that run in FP8."""
        head = 0 if self.head is None else self.head.fp8_elements
        return head + sum(x.fp8_elements for x in self.blocks)


def describe(model: nn.Module, setup: Setup) -> Description:
    """Return the description of a model, on any device, converted or not; it is not changed.

    Raises:
        ValueError: the model has no linear layers, lazy ones, or more experts for each token than
            there are.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"the {type(model).__name__} has layers without sizes yet: run it once on a batch, or "
            f"build it with nn.Linear in place of nn.LazyLinear"
        )
    in_fp8, note = _converted(model, setup)
    heads = heads_of(model)
    matrices = [m for m in matrices_of(model, {}) if _is_matmul(m)]
    if not matrices:
        raise ValueError(
            f"the {type(model).__name__} has no linear layers and no experts: plan describes "
            f"models by them"
        )
    by_block: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        name = "head" if matrix.module in heads else _block_of(matrix.name)
        by_block.setdefault(name, []).append(matrix)
    of_head = by_block.pop("head", [])
    known: dict[str, Block] = {}
    counted: set[int] = set()
    for name, members in by_block.items():
        known[name] = _block(model, name, members, in_fp8, counted)
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    is_tied = any(matrix.parameter is weight for matrix in of_head for weight in embeddings)
    embedding = _values(embeddings, counted)
    head = _head(model, of_head, in_fp8, counted) if of_head else None
    rest = _values(model.parameters(), counted)
    notes = [*note, *_notes(model, list(known.values()))]
    blocks = tuple(known.values()) or ((head,) if head is not None else ())
    return Description(
        blocks,
        head if known else None,
        embedding,
        is_tied,
        rest,
        _is_frozen(model),
        tuple(dict.fromkeys(notes)),
    )


def _is_frozen(model: nn.Module) -> bool:
    """Return True if no parameter trains; refuse models of which only some do."""
    train = {p.requires_grad for p in model.parameters()}
    if len(train) > 1:
        frozen = next(name for name, p in model.named_parameters() if not p.requires_grad)
        raise NotImplementedError(
            f"some parameters train and others do not ({frozen!r}): plan counts models that train "
            f"as a whole, or, with lora=rank, adapters of a frozen one; pass the model without "
            f"adapters, or count all as trained (model.requires_grad_(True))"
        )
    return not train.pop()


def _converted(model: nn.Module, setup: Setup) -> tuple[set[str], list[str]]:
    """Return names of the weights that ``convert`` converts, or has; and what it warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = convert(
            model,
            setup.recipe,
            skip_small=setup.skip_small,
            convert_head=setup.convert_head,
            dry_run=True,
        )
    names = {x.name for x in report.entries if x.converted or x.reason == ALREADY}
    if names:
        return names, []
    first = str(told[0].message).partition(". ")[0] if told else "no weight is converted to FP8"
    return names, [first]


def _is_matmul(matrix: Matrix) -> bool:
    """Return True for weights that a linear layer or experts multiply by."""
    return matrix.unconvertible is None or is_linear(matrix.module)


def _block_of(name: str) -> str:
    found = _BLOCK.match(name)
    return "" if found is None else found.group()


def _values(parameters: Iterable[Any], counted: set[int]) -> int:
    """Return the number of values of parameters that are not counted yet, and count them."""
    total = 0
    for parameter in parameters:
        if id(parameter) not in counted:
            counted.add(id(parameter))
            total += parameter.numel()
    return total


def _matmul(matrix: Matrix, block: str, in_fp8: set[str], role: Role, rows: float) -> Matmul:
    experts, n, k = matrix.sizes
    label = matrix.label[len(block) :].lstrip(".")
    parent = matrix.name if matrix.is_stack else matrix.name.rpartition(".")[0]
    return Matmul(
        label,
        parent[len(block) :].lstrip("."),
        role,
        n,
        k,
        1 if experts is None else experts,
        rows,
        matrix.label in in_fp8,
    )


def _last(matrix: Matrix) -> str:
    name = matrix.key if matrix.is_stack else matrix.name.rpartition(".")[2]
    return _SUFFIX.sub("", name)


def _rows(model: nn.Module, matrix: Matrix) -> float:
    """Return rows of a weight's input for each token."""
    if matrix.is_stack:
        chosen, experts = experts_per_token(matrix.module), len(matrix.parameter)
    elif match := _EXPERT.match(matrix.name):
        above = model.get_submodule(match.group(1))
        owner = model.get_submodule(match.group(1).rpartition(".")[0])
        chosen, experts = experts_per_token(owner), len(list(above.children()))
    else:
        return 1.0
    if chosen > experts:
        raise ValueError(
            f"{matrix.label!r}: {chosen} experts for each token, of {experts}: set "
            f"num_experts_per_tok (top_k) of the model's config to {experts} or less"
        )
    return float(chosen) if matrix.is_stack else chosen / experts


def _block(
    model: nn.Module, name: str, members: Sequence[Matrix], in_fp8: set[str], counted: set[int]
) -> Block:
    module = model.get_submodule(name)
    by_parent: dict[str, dict[str, Matrix]] = {}
    for matrix in members:
        parent = matrix.name if matrix.is_stack else matrix.name.rpartition(".")[0]
        by_parent.setdefault(parent, {})[_last(matrix)] = matrix
    roles: dict[Matrix, Role] = {}
    attention, mlps = None, []
    for parent, named in by_parent.items():
        own_attention = _attention(named, model)
        attention = own_attention or attention
        if own_attention is not None:
            roles |= {x: "attention output" for key, x in named.items() if key in OUTPUT}
        others = {k: x for k, x in named.items() if own_attention is None or k not in OUTPUT}
        down = next((x for key, x in others.items() if key in DOWN), None)
        if down is not None:
            roles[down] = "down"
            mlps.append(_mlp(parent[len(name) :].lstrip("."), others, down, _rows(model, down)))
    matmuls = tuple(
        _matmul(x, name, in_fp8, roles.get(x, "input"), _rows(model, x)) for x in members
    )
    norms = tuple(_norms(module, attention, matmuls))
    width = next((x.width for x in norms if not x.is_of_heads), matmuls[0].k)
    parameters = _values(module.parameters() if name else (x.parameter for x in members), counted)
    return Block(matmuls, attention, tuple(mlps), norms, width, parameters)


def _attention(named: dict[str, Matrix], model: nn.Module) -> Attention | None:
    """Return the attention of linear layers with these last names; None if they are of none."""

    def outputs(names: set[str]) -> int:
        return next((x.sizes.n for key, x in named.items() if key in names), 0)

    output = next((x.sizes.k for key, x in named.items() if key in OUTPUT), 0)
    queries, joint = outputs(QUERY), outputs(QKV)
    if not output or not (queries or joint):
        return None
    if joint:
        queries = output
        keys = values = (joint - output) // 2
    elif any(key in LATENT for key in named):  # keys of latent attention exist for every head
        keys, values = queries, output
    else:
        keys, values = outputs(KEY) or queries, outputs(VALUE) or outputs(KEY) or queries
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    return Attention(queries, keys, values, output, heads if isinstance(heads, int) else 0)


def _mlp(parent: str, named: dict[str, Matrix], down: Matrix, rows: float) -> Mlp:
    _, width, hidden = down.sizes
    keys = named.keys()
    is_gated = bool(keys & JOINT) or bool(keys & GATE and keys & UP)
    return Mlp(parent, hidden, width, rows, is_gated, down.is_stack)


def _norms(
    module: nn.Module, attention: Attention | None, matmuls: Sequence[Matmul]
) -> Iterable[Norm]:
    for name, norm in module.named_modules():
        weight: Any = norm._parameters.get("weight")
        if weight is None or weight.ndim != 1 or "norm" not in type(norm).__name__.lower():
            continue
        own = name.rpartition(".")[2]
        of_heads = HEAD_NORMS.get(own)
        width = weight.numel()
        if of_heads is not None and attention is not None:
            width = getattr(attention, of_heads)
        owner = module.get_submodule(name.rpartition(".")[0])
        readers = {f"{name.removesuffix(own)}{x}" for x in linears_of(own, owner)}
        feeds = any(m.in_fp8 for m in matmuls if m.name in readers)
        yield Norm(width, not isinstance(norm, _TORCH_NORMS), of_heads is not None, feeds)


def _head(
    model: nn.Module, members: Sequence[Matrix], in_fp8: set[str], counted: set[int]
) -> Block:
    """Return the head, and the norms outside of blocks."""
    matmuls = tuple(_matmul(x, "", in_fp8, "head", 1.0) for x in members)
    outside = [(n, m) for n, m in model.named_modules() if n and not _block_of(n)]
    norms = tuple(
        Norm(m.weight.numel(), not isinstance(m, _TORCH_NORMS))
        for _, m in outside
        if "norm" in type(m).__name__.lower() and m._parameters.get("weight") is not None
    )
    parameters = [x.parameter for x in members]
    return Block(matmuls, None, (), norms, matmuls[0].k, _values(parameters, counted))


def _notes(model: nn.Module, blocks: Sequence[Block]) -> list[str]:
    notes = []
    if not any(block.attention for block in blocks):
        notes.append("no attention found by the names of its linear layers: none is counted")
    unknown = Counter(m.name for m in matrices_of(model, {}) if m.is_unknown_stack)
    if unknown:
        notes.append(f"not counted: {next(iter(unknown))!r} may be experts, but nothing says so")
    return notes
