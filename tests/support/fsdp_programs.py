"""Random programs of FSDP2's events, beside the same events of a plain model.

A program runs on two sharded models with the same rows at all times: a converted one, and a plain
one, the control. The control says what FSDP2 does: which values each module had gathered when it
ran. A third model, converted and not sharded, runs with these values. So what the converted model
computes must have the bits of one process, whatever the order of events, or it raises on all ranks.
An error is allowed only where a weight was written to between its gather and a backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, convert
from blocktensor.sharding.fsdp import fsdp_internals
from tests.support.models import randn
from tests.support.moe_models import TitanMoE

K, HIDDEN, EXPERTS = 72, 150, 152  # rows and blocks that ranks share, unevenly
BLOCKS = 3


class Planned(Exception):
    """An error that a program raises in a forward."""


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, HIDDEN)
        self.down = nn.Linear(HIDDEN, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(F.layer_norm(x, (K,))).relu()) + x


class Experts(TitanMoE):
    def __init__(self) -> None:
        super().__init__(3, K, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.layer_norm(x, (K,))) + x


class Body(nn.Module):
    """Blocks of equal width, which run in any order, some twice; a head in the root's group.

    Attributes:
        inside: is called before each block and before the head.
        checkpointed: True if blocks run again in backward.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(K, K, bias=False)
        self.inside: Callable[[int], None] = lambda position: None
        self.checkpointed = False

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for position, index in enumerate(order):
            self.inside(position)
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        self.inside(len(order))
        return self.head(F.layer_norm(x, (K,)))


Write = Callable[[Any], Any]
COUNTED: dict[str, Write] = {
    "mul_": lambda p: p.mul_(1.7),
    "smaller": lambda p: p.mul_(0.6),
    "data.mul_": lambda p: p.data.mul_(2.9),
    "detach.mul_": lambda p: p.detach().mul_(-1.3),
    "lerp_": lambda p: p.lerp_(torch.full_like(p, 0.01), 0.5),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 1.7),
    "to_local.mul_": lambda p: p.to_local().mul_(1.7),
    "to_local.data.mul_": lambda p: p.to_local().data.mul_(0.3),
    "rows": lambda p: p.to_local()[:3].mul_(2.9),
    "local copy_": lambda p: p.to_local().copy_(1.7 * p.to_local().detach()),
    "zero_": lambda p: p.zero_(),
}
UNCOUNTED: dict[str, Write] = {
    "to_local.view.data": lambda p: p.to_local().view(-1).data.mul_(2.9),
    "data of a view": lambda p: p.to_local().view(-1).data[-99:].mul_(7.1),
    "numpy": lambda p: rows_of(p).numpy().__imul__(1.7),
}


def rows_of(p: Any) -> Tensor:
    """The high-precision rows of a sharded parameter, converted or not."""
    local = p._local_tensor
    return getattr(local, "master", local).detach()


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """The sharded parameters, also of modules that are gathered now."""
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for state in fsdp_internals._states():
        for owner, _ in fsdp_internals._params(state):
            info = owner._module_info
            if info.module in names:
                found[f"{names[info.module]}.{info.param_name}"] = owner.sharded_param
    return found


class Uses:
    """What the control's modules had gathered when they ran in one graph.

    Attributes:
        values: of the parameters of each module, in the order in which it ran.
        is_changed: True if the control's backward read other values than its forward.
        is_plain_changed: True if these were of parameters that are not converted.
        is_unseen: True if a weight was written to, uncounted, since it was gathered.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self.is_changed = self.is_plain_changed = self.is_unseen = False


class Graph(NamedTuple):
    """A forward that waits for its backward.

    Attributes:
        losses, inputs: of the sharded models, and of the two references.
        references: copies of the models of one process, with the values that were gathered.
        uses: of the control.
    """

    losses: list[Tensor]
    inputs: list[Tensor]
    references: list[nn.Module]
    uses: Uses


class Expected:
    """The gradients of a model, as FSDP2 adds them up."""

    def __init__(self) -> None:
        self.reduced: dict[str, Tensor] = {}
        self.waiting: dict[str, Tensor] = {}

    def add(self, reference: nn.Module, syncs: bool) -> None:
        """Add the gradients of a backward, which FSDP2 keeps for the next one unless it ``syncs``."""
        for name, p in reference.named_parameters():
            if p.grad is not None:
                _add(self.waiting, name, getattr(p.grad, "master", p.grad).detach())
        if syncs:
            for name, grad in self.waiting.items():
                _add(self.reduced, name, grad)
            self.waiting = {}

    def difference(self, found: dict[str, Any]) -> str | None:
        """Return the name of a gradient that differs."""
        for name, wanted in self.reduced.items():
            got = found.get(name)
            got = None if got is None else got.full_tensor()
            if got is None or not torch.equal(getattr(got, "master", got), wanted):
                return name
        return None


def _add(sums: dict[str, Tensor], name: str, grad: Tensor) -> None:
    sums[name] = sums[name] + grad if name in sums else grad


class Action(NamedTuple):
    """What happens inside of a forward."""

    kind: str
    name: str
    how: str
    alone: int | None


class Program:
    """One random program.

    Attributes:
        trace: the events so far.
        counts: how many events of a kind there were, forwards and backwards that were compared, and
            errors that were expected.
    """

    def __init__(self, seed: int, mesh: DeviceMesh, how: str) -> None:
        self.draw = draw = random.Random(f"{seed} {how} {mesh.size()}")
        self.how, self.mesh = how, mesh
        self.trace: list[str] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.offload = draw.random() < 0.1
        self.steps_in_backward = draw.random() < 0.15
        self.checkpointed = draw.random() < 0.2
        self.has_run = False
        self.shards = range(1 if how == "replicate" else mesh.size(-1))
        self.alone = [None] * 8 + [*self.shards]  # the ranks that write
        # a step in backward would write NaN
        self.unseen = [] if self.steps_in_backward else [*UNCOUNTED]
        self.graphs: list[Graph] = []
        self.handles: list[Any] = []
        self.uses: Uses | None = None
        self.rows: dict[str, list[Tensor]] = defaultdict(list)  # for the control to copy
        self.expected = Expected(), Expected()
        self.stepped: list[dict[str, Any]] = [{}, {}]  # gradients by which a backward has stepped
        torch.manual_seed(seed)
        kinds = [draw.choice([Dense, Dense, Experts]) for _ in range(BLOCKS)]
        self.control = Body([kind() for kind in kinds])
        self.plain = copy.deepcopy(self.control)
        self.one = copy.deepcopy(self.control)
        recipe = Recipe(scale=draw.choice(["fp32", "power_of_two"]))
        convert(self.one, recipe, skip=["*.gate"] * (Experts in kinds), skip_small=False, convert_head=True)
        self.sharded = copy.deepcopy(self.one)
        named = self.one.named_parameters()
        self.converted = {name for name, p in named if isinstance(p, BlockwiseFP8Weight)}
        for model in (self.control, self.one, self.plain, self.sharded):
            model.checkpointed = self.checkpointed
        choices = random.Random(draw.random())
        state = choices.getstate()
        for model in (self.sharded, self.control):
            choices.setstate(state)
            self._shard(model, choices)
        self._watch()

    # How the models are made

    def _shard(self, model: Body, draw: random.Random) -> None:
        wrap = replicate if self.how == "replicate" else fully_shard
        options: dict[str, Any] = {"mesh": self.mesh}
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if self.how != "replicate":
            dim = draw.choice([0, 1]) if EXPERTS % (4 * self.mesh.size()) == 0 else 0
            options["shard_placement_fn"] = lambda p: Shard(dim if p.ndim == 3 else 0)
        for block in model.blocks:
            inner = block.experts if isinstance(block, Experts) else block.up
            stays = draw.choice([None, None, False, True])
            own = {} if stays is None or self.how == "replicate" else {"reshard_after_forward": stays}
            if draw.random() < 0.5:
                wrap(inner, **options, **own)
            if draw.random() < 0.9:
                wrap(block, **options, **own)
        wrap(model, **options)
        self.names = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
        parts = [model.get_submodule(name) for name in self.names]
        if draw.random() < 0.3:
            for part in parts[: draw.randint(1, len(parts))]:
                part.set_modules_to_forward_prefetch(draw.sample(parts, 1))
        if draw.random() < 0.3:
            for part in parts[: draw.randint(1, len(parts))]:
                part.set_modules_to_backward_prefetch(draw.sample(parts, 1))
        if draw.random() < 0.1:
            model._set_unshard_async_op(True)

    def _watch(self) -> None:
        """Note what modules of the control have gathered, and let ``one`` run with that."""
        for name, module in self.control.named_modules():
            if not [*module.parameters(recurse=False)]:
                continue
            module.register_forward_pre_hook(functools.partial(self._note, name))
            module.register_forward_hook(functools.partial(self._compare_in_backward, name))
        for name, p in self.sharded.named_parameters():
            if self.steps_in_backward:
                p.register_post_accumulate_grad_hook(functools.partial(self._step_one, name))
        for name, p in self.control.named_parameters():
            if self.steps_in_backward:
                p.register_post_accumulate_grad_hook(functools.partial(self._follow, name))

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        if self.uses is not None:
            found = {key: p.detach().clone() for key, p in module._parameters.items() if p is not None}
            assert not any(isinstance(p, DTensor) for p in found.values()), name
            self.uses.values[name].append(found)

    def _compare_in_backward(self, name: str, module: nn.Module, args: Any, y: Tensor) -> None:
        uses = self.uses
        if uses is None or not y.requires_grad:
            return
        was = uses.values[name][-1]

        def compare(grad: Tensor) -> None:
            for key, p in module._parameters.items():
                if p is not None and (isinstance(p, DTensor) or not torch.equal(p, was[key])):
                    uses.is_changed = True
                    uses.is_plain_changed |= f"{name}.{key}" not in self.converted

        y.register_hook(compare)

    @torch.no_grad()
    def _take(self, uses: Uses, name: str, module: nn.Module, args: Any) -> None:
        """Give a module of ``one`` the values that the control's had when it ran."""
        if not uses.values[name]:
            return
        for key, value in uses.values[name].pop(0).items():
            p = module._parameters[key]
            own = p.master if isinstance(p, BlockwiseFP8Weight) else p
            if not torch.equal(own, value):
                own.copy_(value)

    # Events

    def run(self) -> None:
        """Run the program; an error says which events there were."""
        try:
            if self.draw.random() < 0.3:
                self._some_of(self.kinds, 16)
            else:
                for _ in range(4):
                    self._train()
            self.do(self.backward)
            self.do(self.reshard_all)
            self.do(functools.partial(self.forward, plain=True))
        except BaseException as error:
            said = f"{self.how} {self.mesh.size()}: " + "\n  ".join(self.trace)
            raise AssertionError(said) from error

    def _train(self) -> None:
        """Make an ordinary step with some other events in between."""
        draw, others = self.draw, self.kinds | {self.forward: 1, self.backward: 0, self.step: 0}
        self._some_of(others, draw.choice([0, 0, 1, 2, 3]))
        for _ in range(draw.choice([1, 1, 1, 2])):
            self.do(functools.partial(self.forward, grad=True))
            self._some_of(others, draw.choice([0, 0, 0, 1]))
        while self.graphs:
            self.do(functools.partial(self.backward, syncs=len(self.graphs) == 1))
            self._some_of(others, draw.choice([0, 0, 0, 1]))
        self._some_of(others, draw.choice([0, 0, 1]))
        self.do(self.step)

    @property
    def kinds(self) -> dict[Any, float]:
        """How often each event happens."""
        return {
            self.forward: 5, self.backward: 5, self.write: 2, self.step: 2, self.unshard: 4,
            self.reshard: 2, self.reshard_all: 1, self.load: 0.5, self.move: 0.3, self.forget: 0.3,
            self.settings: 1, self.wait: 1, self.read: 0.3, self.fail: 0.3,
        }  # fmt: skip

    def _some_of(self, kinds: dict[Any, float], count: int) -> None:
        for kind in self.draw.choices([*kinds], [*kinds.values()], k=count):
            self.do(kind)

    def do(self, event: Any) -> None:
        name = getattr(event, "func", event).__name__
        self.say(name)
        self.counts[name] += 1
        event()

    def say(self, what: str) -> None:
        self.trace.append(what)

    def add(self, what: object) -> None:
        self.trace[-1] += f" {what}"

    def both(self) -> tuple[Body, Body]:
        return self.sharded, self.control

    def forward(self, plain: bool = False, fails: bool = False, grad: bool | None = None) -> None:
        draw = self.draw
        alone = [name for name in self.names if name.count(".") == 1]  # blocks
        is_root = plain or not self.has_run or not alone or draw.random() < 0.85
        part = "" if is_root else draw.choice(alone)
        order = [*range(BLOCKS)] if plain else draw.choices(range(BLOCKS), k=draw.randint(1, 4))
        if grad is None:
            grad = not plain and draw.random() < 0.7
        actions = {} if plain or part else self._actions(len(order))
        if fails:
            actions[draw.randint(0, len(order))] = Action("raise", "", "", None)
        self.add(f"{part!r} {order} {grad=} {actions}")
        x = randn(6, K, seed=draw.randrange(10**6), dtype=torch.float32)
        needs = grad and draw.random() < 0.5
        self.has_run = True
        leaves, made = [], []
        uses = Uses()
        for model in self.both():
            self.uses = uses if model is self.control else None
            leaf = x.clone().requires_grad_(needs)
            model.inside = functools.partial(self._inside, actions, model)
            try:
                with torch.set_grad_enabled(grad):
                    made.append(self._run(model, part, leaf, order))
            except Planned:
                continue
            finally:
                self.uses, model.inside = None, lambda position: None
            leaves.append(leaf)
        if fails:
            self.recover()
            return
        references = [copy.deepcopy(self.one), copy.deepcopy(self.plain)]
        for reference in references:
            given = copy.deepcopy(uses)
            for name, module in reference.named_modules():
                module.register_forward_pre_hook(functools.partial(self._take, given, name))
            leaves.append(x.clone().requires_grad_(needs))
            with torch.set_grad_enabled(grad):
                made.append(self._run(reference, part, leaves[-1], order))
            reference.given = given
        sharded, control, one, plain = made
        assert one.isfinite().all()
        how = {how for kind, _, how, _ in actions.values() if kind == "write"}
        uses.is_changed, uses.is_unseen = bool(how), bool(how & UNCOUNTED.keys())
        if uses.is_unseen and sharded.isnan().any():  # so on all ranks
            self.counts["nan"] += 1
            self.forget()
            self.reshard_all()  # what stays gathered stays NaN
            return
        assert torch.equal(sharded, one), (sharded - one).norm() / one.norm()
        assert torch.equal(control, plain)
        self.counts["outputs"] += 1
        if grad:
            losses = [y.square().mean() for y in made]
            uses.values.clear()
            self.graphs.append(Graph(losses, leaves, references, uses))
        del self.graphs[:-3]

    def _run(self, model: Body, part: str, x: Tensor, order: list[int]) -> Tensor:
        return model.get_submodule(part)(x) if part else model(x, order)

    def _actions(self, blocks: int) -> dict[int, Action]:
        """What happens inside of a forward, by place."""
        draw, actions = self.draw, {}
        for position in range(blocks + 1):
            if draw.random() < 0.12:
                kind = draw.choice(["write", "write", "unshard", "reshard"])
                names = list(sharded_parameters(self.sharded)) if kind == "write" else self.names
                how = draw.choice([*COUNTED, *self.unseen])
                alone = draw.choice(self.alone) if how in UNCOUNTED else None
                actions[position] = Action(kind, draw.choice(names), how, alone)
        return actions

    def _inside(self, actions: dict[int, Action], model: Body, position: int) -> None:
        kind, name, how, alone = actions.get(position, Action("", "", "", None))
        if kind == "raise":
            raise Planned
        if kind == "write":
            with torch.no_grad():
                p = sharded_parameters(model)[name]
                if model is self.control:
                    rows_of(p).copy_(self.rows[name].pop(0))
                else:
                    self._write(p, how, alone)
                    self.rows[name].append(rows_of(p).clone())
        elif kind == "unshard":
            model.get_submodule(name).unshard()
        elif kind == "reshard":
            model.get_submodule(name).reshard()

    def backward(self, syncs: bool | None = None) -> None:
        if not self.graphs:
            return
        graph = self.graphs.pop(self.draw.choice([0, -1]))
        if syncs is None:
            syncs = self.draw.random() < 0.75
        syncs = syncs or self.steps_in_backward
        self.add(f"{syncs=}")
        for model in self.both():
            model.set_requires_gradient_sync(syncs)
        self.stepped = [{}, {}]
        error = None
        try:
            graph.losses[0].backward()
        except RuntimeError as found:
            if "FP8 weight that FSDP2 gathers was changed" not in str(found):
                raise
            error = found
        self.uses = graph.uses
        graph.losses[1].backward()
        self.uses = None
        if error is not None:
            self.add("raises")
            assert graph.uses.is_changed, error
            self.counts["errors"] += 1
            self.recover()
            return
        if graph.uses.is_unseen or graph.uses.is_plain_changed:
            # FSDP2 reads the new values in backward; converted weights are that, or NaN
            self.counts["changed by FSDP2"] += 1
            self.forget()
            return
        for index, reference in enumerate(graph.references):
            for name, values in graph.uses.values.items():
                reference.given.values[name] += values  # blocks that ran again
            graph.losses[2 + index].backward()
            self.expected[index].add(reference, syncs)
        sharded, control, one, plain = [x.grad for x in graph.inputs]
        if one is None:
            assert sharded is None
        else:
            assert torch.equal(sharded, one)
            assert graph.uses.is_changed or torch.equal(control, plain)
        self._compare_gradients()
        self.counts["backwards"] += 1

    def _compare_gradients(self) -> None:
        found = [
            {name: p.grad for name, p in sharded_parameters(model).items()} for model in self.both()
        ]
        if self.steps_in_backward:
            found = self.stepped
        differences = [
            expected.difference(grads)
            for expected, grads in zip(self.expected, found, strict=True)
        ]
        if differences[1]:  # FSDP2 itself loses gradients
            self.counts["lost by FSDP2"] += 1
            self.forget()
        else:
            assert differences[0] is None, differences[0]
        if self.steps_in_backward:
            self.expected = Expected(), Expected()
            self.on_write()

    def _step_one(self, name: str, p: Any) -> None:
        self.stepped[0][name] = p.grad
        with torch.no_grad():
            p.add_(p.grad.sign(), alpha=-0.02)
        self.rows[name].append(rows_of(p).clone())
        p.grad = None

    def _follow(self, name: str, p: Any) -> None:
        self.stepped[1][name] = p.grad
        if self.rows[name]:  # none where the converted model has raised
            with torch.no_grad():
                rows_of(p).copy_(self.rows[name].pop(0))
        p.grad = None

    def on_write(self, is_unseen: bool = False) -> None:
        for graph in self.graphs:
            graph.uses.is_changed = True
            graph.uses.is_unseen |= is_unseen

    def _write(self, p: Any, how: str, alone: int | None) -> None:
        """Write to a weight on all ranks, or on those that hold one of its parts."""
        self.on_write(how in UNCOUNTED)
        if alone not in (None, dist.get_rank() % len(self.shards)):
            return
        (COUNTED | UNCOUNTED)[how](p)
        values = rows_of(p).data
        values.copy_(values.nan_to_num(1, 1, 1).clamp(-2, 2))

    @torch.no_grad()
    def write(self) -> None:
        found = sharded_parameters(self.sharded)
        name = self.draw.choice([*found])
        how = self.draw.choice([*COUNTED, *UNCOUNTED])
        alone = self.draw.choice(self.alone)
        self.add(f"{name} {how} {alone=}")
        if how in UNCOUNTED and not self.unseen or how in COUNTED and alone is not None:
            self.graphs.clear()  # one rank alone would raise
        self._write(found[name], how, alone)
        self.copy_rows()

    @torch.no_grad()
    def copy_rows(self) -> None:
        """Give the control the rows of the converted model."""
        for name, p in sharded_parameters(self.control).items():
            rows_of(p).copy_(rows_of(sharded_parameters(self.sharded)[name]))

    @torch.no_grad()
    def step(self) -> None:
        for p in sharded_parameters(self.sharded).values():
            if p.grad is not None:
                p.add_(p.grad.sign(), alpha=-0.02)
                p.grad = None
        for p in sharded_parameters(self.control).values():
            p.grad = None
        if self.expected[0].reduced:
            self.on_write()
        for expected in self.expected:
            expected.reduced = {}
        self.copy_rows()

    def unshard(self) -> None:
        name = self.draw.choice(self.names)
        is_async, waits = self.draw.random() < 0.5, self.draw.random() < 0.5
        self.add(f"{name!r} {is_async=} {waits=}")
        for model in self.both():
            handle = model.get_submodule(name).unshard(async_op=is_async)
            if is_async and waits:
                handle.wait()
            elif is_async:
                self.handles.append(handle)

    def wait(self) -> None:
        while self.handles:
            self.handles.pop().wait()

    def reshard(self) -> None:
        name = self.draw.choice(self.names)
        self.add(f"{name!r}")
        for model in self.both():
            model.get_submodule(name).reshard()

    def reshard_all(self) -> None:
        self.wait()
        for model in self.both():
            for name in self.names:
                model.get_submodule(name).reshard()

    def settings(self) -> None:
        kinds = ["set_reshard_after_backward", "set_reshard_after_forward"]
        what = self.draw.choice(kinds[: 1 if self.how == "replicate" else 2])
        value = self.draw.random() < 0.6
        name = self.draw.choice(self.names)
        self.add(f"{what} {name!r} {value}")
        for model in self.both():
            getattr(model.get_submodule(name), what)(value, recurse=False)

    @torch.no_grad()
    def load(self) -> None:
        assign = not self.steps_in_backward and self.draw.random() < 0.5
        factor = self.draw.choice([1, 2, -0.5])
        self.add(f"{assign=} {factor=}")
        for model in self.both():
            state = {name: value.clone() * factor for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=assign)
        self.on_write()
        self.copy_rows()

    def read(self) -> None:
        for model in self.both():
            model.state_dict()

    def move(self) -> None:
        if self.offload:
            return
        self.reshard_all()
        for model in self.both():
            model.double().float()
        self.on_write()

    def forget(self) -> None:
        """Drop graphs that wait, and gradients."""
        self.graphs.clear()
        for model in self.both():
            for p in sharded_parameters(model).values():
                p.grad = None
            for name in self.names:
                for group in fsdp_groups(model.get_submodule(name)):
                    for owner in group.fsdp_params:
                        owner.unsharded_accumulated_grad = None
                        if hasattr(owner, "_unsharded_param"):
                            owner._unsharded_param.grad = None
        self.expected = Expected(), Expected()

    def fail(self) -> None:
        """Raise inside of a forward; torch 2.13 recovers from that."""
        if hasattr(self.sharded, "reset_iter_state") and self.has_run:
            self.forward(fails=True)

    def recover(self) -> None:
        """After an error: FSDP drops what it was doing."""
        for model in self.both():
            model.reset_iter_state()
        self.handles.clear()
        self.rows.clear()
        self.forget()
        self.reshard_all()
        self.copy_rows()


def fsdp_groups(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    yield from [state._fsdp_param_group] if groups is None else groups
