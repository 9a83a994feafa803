"""Events of a model, and of a plain mirror of it, in an order that a seed draws."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import blocktensor
from blocktensor import BlockwiseFP8Tensor, Recipe
from tests.support.fused_kinds import COPIES
from tests.support.mlps import X
from tests.support.model_changes import CHANGES, CLASS_FORWARDS, Model, layers
from tests.support.models import SQUARE, randn
from tests.support.moe_models import GroupedExperts

_RECIPES = (
    None,
    None,
    Recipe(),
    Recipe(scale="power_of_two"),
    Recipe(cache_weight=False),
    Recipe.deepseek(),
    Recipe(wgrad_input="high_precision"),
)


class Expected(NamedTuple):
    """The recipe and state that an FP8 weight has to have, as an attribute of its mirror's weight.

    The mirror has the values that were cast, also of a frozen weight.
    """

    recipe: Recipe
    frozen: bool


def expected(parameter: Any) -> Expected | None:
    """Return what is expected of the weight that this one mirrors; None if that is plain."""
    return getattr(parameter, "expected", None)


def is_frozen(parameter: Any) -> bool:
    return (expected(parameter) or Expected(Recipe(), False)).frozen


def weights(model: nn.Module, below: str = "") -> Iterator[tuple[str, nn.Module, str]]:
    """The name, the module and the key of each weight that conversion is about."""
    for name, module in model.named_modules():
        keys = list(module._parameters) if isinstance(module, GroupedExperts) else ["weight"]
        for key in keys if isinstance(module, (nn.Linear, GroupedExperts)) else ():
            if not below or f"{name}.".startswith(f"{below}."):
                yield f"{name}.{key}", module, key


def copied(mirror: Model) -> Model:
    """A copy with the hooks and the attributes of parameters too."""
    other = copy.deepcopy(mirror)
    for old, new in zip(mirror.parameters(), other.parameters(), strict=True):
        vars(new).update(vars(old))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(old, hooks) is not None:
                setattr(new, hooks, getattr(old, hooks))
    return other


def converted(mirror: Model) -> Model:
    """A mirror, converted and frozen as is expected of its model."""
    wanted = {
        name.removesuffix(".weight"): expected(module._parameters[key])
        for name, module, key in weights(mirror)
    }
    grads = [(p, p.requires_grad) for p in mirror.parameters()]
    for p, _ in grads:
        p.requires_grad_(not is_frozen(p))
    for recipe in {each.recipe for each in wanted.values() if each}:
        chosen = {name for name, each in wanted.items() if each and each.recipe == recipe}
        blocktensor.convert(
            mirror,
            recipe,
            filter=lambda _, name, chosen=chosen: name in chosen,
            skip_small=False,
            convert_head=True,
        )
    for p, requires_grad in grads:
        p.requires_grad_(requires_grad)
    return mirror


class History:
    """A model and its plain mirror, and what may happen to them.

    Attributes:
        log: what was done.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.drawn = seed, 0
        self.kind = draw.choice(("block", "blocks", "experts")) if seed % 8 else "llama"
        self.dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
        self.autocast, self.checkpointed = draw.random() < 0.15, draw.random() < 0.15
        self.mirror = layers(self.kind, self.checkpointed).to(self.dtype)
        for p in self.mirror.parameters():
            p.data = self.values(p)
        self.model = copy.deepcopy(self.mirror)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.handles: list[tuple[Any, Any]] = []
        self.log = [f"{seed}: {self.kind} {self.dtype} {self.autocast=} {self.checkpointed=}"]
        self.patches = ExitStack()

    def values(self, like: Tensor) -> Tensor:
        """Other values for a parameter."""
        self.drawn += 1
        x = randn(*like.shape, seed=1000 * self.seed + self.drawn, dtype=like.dtype)
        return x / like.shape[-1] ** 0.5 if like.ndim > 1 else 1 + x / 8

    def say(self, what: Any = "nothing") -> Any:
        """Add to the log, and return that."""
        self.log[-1] += f" {what!r}"
        return what

    def module(self, *kinds: type[nn.Module]) -> str:
        """The name of a module, more often one that ``fuse`` may know; "" is the model."""
        names = [name for name, x in self.mirror.named_modules() if isinstance(x, kinds)]
        known = [name for name in names if any(x in name for x in ("mlp", "norm", "experts"))]
        return self.say(self.draw.choice(known if known and self.draw.random() < 0.5 else names))

    def part(self) -> tuple[str, Model]:
        """The name of a module that is given to the library, and the module."""
        parents = [n for n, x in self.mirror.named_modules() if any(x.children())]
        name = self.say(self.draw.choice(parents) if self.draw.random() < 0.3 else "")
        return name, self.model.get_submodule(name)

    def weight(self) -> tuple[str, str, Any]:
        """A weight: its module, its key and what the mirror has there."""
        name, module, key = self.draw.choice(list(weights(self.mirror)))
        return self.say(name).rpartition(".")[0], key, module._parameters[key]

    def expecting(self, below: str) -> Iterator[Any]:
        """The mirror's weights that mirror FP8 ones."""
        held = (module._parameters[key] for _, module, key in weights(self.mirror, below))
        return filter(expected, held)

    def both(self, act: Callable[[Model], Any]) -> tuple[Any, Any]:
        """Do the same to the model and to its mirror."""
        return act(self.model), act(self.mirror)

    # events of the library

    def fuse(self) -> None:
        recompute = self.draw.random() < 0.25
        blocktensor.fuse(self.part()[1], recompute=self.say(recompute))

    def unfuse(self) -> None:
        blocktensor.unfuse(self.part()[1])

    def share(self) -> None:
        blocktensor.share_inputs(self.part()[1])

    def unshare(self) -> None:
        blocktensor.unshare_inputs(self.part()[1])

    def convert(self) -> None:
        name, part = self.part()
        recipe = self.say(self.draw.choice(_RECIPES))
        named = {each.rpartition(".")[0] for each, *_ in weights(part)} - {""}
        skip = self.say([x for x in sorted(named) if self.draw.random() < 0.04])
        blocktensor.convert(part, recipe, skip=skip, skip_small=False)
        skipped = {n for x in skip for n, *_ in weights(self.mirror, f"{name}.{x}".lstrip("."))}
        tied: dict[Any, list[str]] = defaultdict(list)
        for each, module, key in weights(self.mirror, name):
            tied[module._parameters[key]].append(each)
        for p, names in tied.items():
            is_head = "lm_head.weight" in names and name == "" and not expected(p)
            if not is_head and not skipped.intersection(names) and (recipe or not expected(p)):
                frozen = is_frozen(p) if expected(p) else not p.requires_grad
                p.expected = Expected(recipe or Recipe(), frozen)

    def freeze(self) -> None:
        name, part = self.part()
        blocktensor.freeze(part)
        for p in self.expecting(name):
            p.requires_grad_(False).expected = p.expected._replace(frozen=True)

    def unfreeze(self) -> None:
        name, part = self.part()
        blocktensor.unfreeze(part)
        for p in filter(is_frozen, self.expecting(name)):
            fp8 = BlockwiseFP8Tensor.from_values(p.detach(), SQUARE, recipe=p.expected.recipe)
            p.data = fp8.dequantize()
            p.requires_grad_().expected = p.expected._replace(frozen=False)

    # events of users

    def change(self) -> None:
        kinds, act = CHANGES[self.say(self.draw.choice(list(CHANGES)))]
        name = self.module(*kinds)
        self.handles.append(self.both(lambda model: act(model, name)))

    def unhook(self) -> None:
        for handle in self.handles.pop() if self.handles else ():
            if handle is not None and hasattr(handle, "remove"):
                handle.remove()

    def class_forward(self) -> None:
        if any("forward" in vars(x) for x in self.mirror.modules()):
            return  # wrapped: plain ones keep the forward that their class had
        kind = self.say(self.draw.choice(list(CLASS_FORWARDS)))
        self.patches.enter_context(mock.patch.object(kind, "forward", CLASS_FORWARDS[kind]))

    def requires_grad(self) -> None:
        name, key, p = self.weight()
        if not is_frozen(p):
            on = self.say(not p.requires_grad)
            self.both(lambda model: getattr(model.get_submodule(name), key).requires_grad_(on))

    def set_values(self) -> None:
        """Set the data of a weight, or another weight."""
        name, key, p = self.weight()
        new, is_data = self.values(p), self.say(self.draw.random() < 0.5)

        def act(model: Model) -> None:
            module = model.get_submodule(name)
            if is_data:
                getattr(module, key).data = new.clone()
            else:
                setattr(module, key, nn.Parameter(new.clone()))

        self.both(act)

    def exchange(self) -> None:
        """Exchange two weights, or tie them."""
        (name, key, p), (other, other_key, q) = self.weight(), self.weight()
        tie = self.say(self.draw.random() < 0.5)

        def act(model: Model) -> None:
            a, b = model.get_submodule(name), model.get_submodule(other)
            old, new = getattr(a, key), getattr(b, other_key)
            setattr(a, key, new)
            setattr(b, other_key, new if tie else old)

        if p.shape == q.shape:
            self.both(act)

    def exchange_modules(self) -> None:
        name = self.say(self.draw.choice(("mlp", "self_attn", "input_layernorm")))

        def act(model: Model) -> None:
            a, b = (model.get_submodule(f"layers.{i}") for i in range(2))
            of_a, of_b = getattr(a, name), getattr(b, name)
            setattr(a, name, of_b)
            setattr(b, name, of_a)

        if self.kind == "blocks":
            self.both(act)

    def load(self) -> None:
        """Load plain values, those of a converted twin, or of a frozen one."""
        assign = self.say(self.draw.random() < 0.3)
        of = self.say(self.draw.choice(("plain", "trainable", "trainable" if assign else "frozen")))
        twin = copied(self.mirror)
        old = [(name, m, key, m._parameters[key]) for name, m, key in weights(self.mirror)]
        for p in twin.parameters():
            p.data = self.values(p)
        plain = {name: x.clone() for name, x in twin.state_dict().items()}
        if of != "plain":
            converted(twin)
        if of == "frozen":
            blocktensor.freeze(twin)
        state = {name: x.clone() for name, x in twin.state_dict().items()}
        self.model.load_state_dict(state, assign=assign)
        for name, _, _, p in old:
            if isinstance(state[name], BlockwiseFP8Tensor) and not is_frozen(p):
                plain[name] = state[name].dequantize()
        self.mirror.load_state_dict(plain, assign=assign)
        for _, module, key, p in old:
            vars(module._parameters[key])["expected"] = expected(p)

    def duplicate(self) -> None:
        how = self.say(self.draw.choice(list(COPIES)))
        old = list(self.mirror.parameters())
        self.model, self.mirror = self.both(COPIES[how])
        for a, b in zip(old, self.mirror.parameters(), strict=True):
            b.expected = expected(a)
        self.optimizers, self.handles = [], []

    def step(self) -> None:
        if not self.optimizers:
            kind = self.say(self.draw.choice((torch.optim.SGD, torch.optim.AdamW)))
            self.optimizers += self.both(lambda model: kind(model.parameters(), lr=0.01))
        for p, q in zip(self.model.parameters(), self.mirror.parameters(), strict=True):
            if q.requires_grad:
                q.grad = self.values(q)
                p.grad = q.grad.clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def look(self) -> None:
        how = self.say(self.draw.choice(("audit", "explain", "repr")))
        if how == "audit":
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                blocktensor.audit(self.model, self.input())
        else:
            str(repr(self.model) if how == "repr" else getattr(blocktensor, how)(self.model))

    def input(self) -> Tensor:
        """Return the input of the model."""
        if self.kind == "llama":
            return torch.arange(6).view(2, 3)
        return X.to(self.dtype).clone().requires_grad_()

    def results(self, model: Model, between: Callable[[], Any] = lambda: None) -> dict[str, Tensor]:
        """The output and all gradients of a model; ``between`` runs before its backward."""
        x = self.input()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            y = model(x)
        y = y if isinstance(y, Tensor) else y.logits
        between()
        if y.requires_grad:
            y.backward(randn(*y.shape, seed=9, dtype=y.dtype))
        named = {"x": x, **dict(model.named_parameters())}
        grads = {f"grad {n}": p.grad for n, p in named.items() if p.grad is not None}
        model.zero_grad()
        return {"y": y.detach(), **grads}
