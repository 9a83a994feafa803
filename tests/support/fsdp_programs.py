"""Random programs of FSDP2's events, and what one process computes.

A program runs on two sharded models with the same rows at all times: a converted model, and a plain
one, the control. The control shows what FSDP2 does: which values each module has gathered when it
runs. Two references that are not sharded, one converted and one plain, run with these values.

The converted model must have the bits of the converted reference, or raise on all ranks. It may
raise only where a weight was written between a forward and its backward. After a write that PyTorch
does not count it may compute NaN. The plain reference shows where FSDP2 itself loses gradients.

Inputs are the same on all ranks, of which there is a power of two: sums over ranks are exact.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support.fsdp_bodies import (
    BLOCKS,
    COUNTED,
    UNCOUNTED,
    Body,
    K,
    drop_gradients,
    rows_of,
    sharded_parameters,
    write,
)
from tests.support.fsdp_pairs import Pair
from tests.support.fsdp_references import Expected, Graph, Reference, Uses
from tests.support.models import randn

CHANGED = "FP8 weight that FSDP2 gathers was changed"
Event = Callable[[], None]


class Planned(Exception):
    """An error that a program raises in a forward."""


class Ended(Exception):
    """FSDP2 cannot go on after an error: before torch 2.13."""


class Action(NamedTuple):
    """What happens inside of a forward: to a module or a parameter, perhaps on some ranks alone."""

    kind: str = ""
    name: str = ""
    how: str = ""
    alone: int | None = None


class Program(Pair):
    """One random program.

    Attributes:
        counts: how many events of a kind there were; outputs and backwards that were compared.
    """

    def __init__(self, seed: int, mesh: DeviceMesh, how: str) -> None:
        torch.manual_seed(seed)
        super().__init__(random.Random(f"{seed} {how} {mesh.mesh.shape}"), mesh, how)
        self.counts: Counter[str] = Counter()
        self.has_run = self.has_gathered = False
        self.graphs: list[Graph] = []
        self.expected = Expected(), Expected()
        self.shards = range(1 if how == "replicate" else mesh.size(-1))
        self.alone = [None] * 8 + [*self.shards]  # whose parts are written
        # a step in backward would write NaN
        self.unseen = [] if self.steps_in_backward else [*UNCOUNTED]

    # Order

    def run(self) -> None:
        """Run the program; an error says which events there were."""
        try:
            if self.draw.random() < 0.3:
                self._some_of(self.events, 16)
            else:
                for _ in range(4):
                    self._train()
            self.do(self.backward)
            self.do(self.reshard_all)
            self.do(functools.partial(self.forward, is_last=True))
        except Ended:
            return
        except BaseException as error:
            said = f"{self.how} {self.mesh.mesh.shape}:\n  " + "\n  ".join(self.trace)
            raise AssertionError(said) from error

    @property
    def events(self) -> dict[Event, float]:
        """What may happen, and how often it does."""
        return {
            self.forward: 5,
            self.backward: 5,
            self.unshard: 6,
            self.write: 2,
            self.step: 2,
            self.reshard: 2,
            self.reshard_all: 1,
            self.settings: 1,
            self.wait: 1,
            self.load: 0.5,
            self.move: 0.3,
            self.forget: 0.3,
            self.read: 0.3,
            self.fail: 0.3,
        }

    def _train(self) -> None:
        """Make an ordinary step, of one or two microbatches, with other events in between."""
        draw, others = self.draw, self.events | {self.forward: 1, self.backward: 0, self.step: 0}
        self._some_of(others, draw.choice([0, 0, 1, 2, 3]))
        for _ in range(draw.choice([1, 1, 1, 2])):
            self.do(functools.partial(self.forward, grad=True))
            self._some_of(others, draw.choice([0, 0, 0, 1]))
        while self.graphs:
            self.do(functools.partial(self.backward, syncs=len(self.graphs) == 1))
            self._some_of(others, draw.choice([0, 0, 0, 1]))
        self._some_of(others, draw.choice([0, 0, 1]))
        self.do(self.step)

    def _some_of(self, events: dict[Event, float], count: int) -> None:
        for event in self.draw.choices([*events], [*events.values()], k=count):
            self.do(event)

    def do(self, event: Any) -> None:
        name = getattr(event, "func", event).__name__
        self.trace.append(name)
        self.counts[name] += 1
        event()

    # Forward and backward

    def forward(self, grad: bool | None = None, is_last: bool = False, fails: bool = False) -> None:
        """Run the root, or a block alone, and compare outputs."""
        draw = self.draw
        blocks = [name for name in self.names if name.count(".") == 1]
        is_root = is_last or not self.has_run or not blocks or draw.random() < 0.85
        part = "" if is_root else draw.choice(blocks)
        order = draw.choices(range(BLOCKS), k=draw.randint(1, 4))
        order = [*range(BLOCKS)] if is_last else order
        if grad is None:
            grad = not is_last and draw.random() < 0.7
        actions = {} if is_last or part else self._actions(len(order))
        if fails:
            actions[draw.randint(0, len(order))] = Action("raise")
        needs = grad and draw.random() < 0.5
        # what is gathered for the first time then is lost for training, in plain models too
        infers = not grad and not actions and self.has_gathered and draw.random() < 0.4
        mode = torch.inference_mode if infers else functools.partial(torch.set_grad_enabled, grad)
        self.say(repr(part), order, f"{grad=} {infers=}", actions)
        self.has_run = True
        gathers_all = is_root and {*order} == {*range(BLOCKS)}
        self.has_gathered |= gathers_all and not (infers or fails)

        x, uses = randn(6, K, seed=draw.randrange(10**6), dtype=torch.float32), Uses()
        inputs = [x.clone().requires_grad_(needs) for _ in range(4)]

        def run(model: Body, leaf: Tensor) -> Tensor:
            with mode():
                y: Tensor = model.get_submodule(part)(leaf) if part else model(leaf, order)
            return y

        made = []
        for model, leaf in zip(self.both, inputs, strict=False):
            self.uses = uses if model is self.control else None
            model.inside = functools.partial(self._act, model, actions)
            try:
                made.append(run(model, leaf))
            except Planned:
                continue
            finally:
                self.uses, model.inside = None, lambda place: None
        if fails:
            self.recover()
            return
        references = [Reference(model, uses) for model in (self.one, self.plain)]
        made += [run(each.model, leaf) for each, leaf in zip(references, inputs[2:], strict=True)]
        self._compare_outputs(made, uses, actions)
        if grad and not made[0].isnan().any():
            uses.values.clear()
            losses = [y.square().mean() for y in made]
            self.graphs.append(Graph(losses, inputs, references, uses))
            del self.graphs[:-3]

    def _compare_outputs(self, made: list[Tensor], uses: Uses, actions: dict[int, Action]) -> None:
        sharded, control, one, plain = made
        written = {action.how for action in actions.values() if action.kind == "write"}
        uses.is_changed, uses.is_unseen = bool(written), bool(written & UNCOUNTED.keys())
        assert one.isfinite().all()
        assert torch.equal(control, plain)
        if uses.is_unseen and sharded.isnan().any():  # then on all ranks
            self.counts["NaN"] += 1
            self.forget()
            self.reshard_all()  # what stays gathered stays NaN
            return
        assert torch.equal(sharded, one), (sharded - one).norm() / one.norm()
        self.counts["outputs"] += 1

    def _actions(self, blocks: int) -> dict[int, Action]:
        """Draw what happens inside of a forward, by place."""
        draw, actions = self.draw, {}
        for place in range(blocks + 1):
            if draw.random() < 0.12:
                kind = draw.choice(["write", "write", "unshard", "reshard"])
                names = [*sharded_parameters(self.sharded)] if kind == "write" else self.names
                if kind == "reshard":
                    names = [name for name in names if name]  # the root is about to run its head
                how = draw.choice([*COUNTED, *self.unseen])
                # a rank alone would raise if it counts
                alone = draw.choice(self.alone) if how in UNCOUNTED else None
                actions[place] = Action(kind, draw.choice(names), how, alone)
        return actions

    @torch.no_grad()
    def _act(self, model: Body, actions: dict[int, Action], place: int) -> None:
        kind, name, how, alone = actions.get(place, Action())
        if kind == "raise":
            raise Planned
        if kind == "write":
            if model is self.sharded:
                self.rows[name].append(self._write(name, how, alone))
            else:
                rows_of(sharded_parameters(model)[name]).copy_(self.rows[name].pop(0))
        elif kind:
            getattr(model.get_submodule(name), kind)()

    def backward(self, syncs: bool | None = None) -> None:
        """Run one of the backwards that wait, and compare gradients."""
        if not self.graphs:
            return
        draw, index = self.draw, self.draw.choice([0, -1])
        graph = self.graphs[index]
        is_once = self.checkpointed or self.steps_in_backward or draw.random() < 0.85
        if is_once:
            del self.graphs[index]
        if syncs is None:
            syncs = draw.random() < 0.75
        syncs = syncs or self.steps_in_backward
        is_last = syncs or draw.random() < 0.5
        self.say(f"{syncs=} {is_last=} {is_once=}")
        for model in self.both:
            model.set_requires_gradient_sync(syncs)
            model.set_is_last_backward(is_last)
        self.stepped = [{}, {}]
        run = [functools.partial(loss.backward, retain_graph=not is_once) for loss in graph.losses]
        error = None
        try:
            run[0]()
        except RuntimeError as found:
            if CHANGED not in str(found):
                raise
            error = found
        self.uses = graph.uses
        run[1]()
        self.uses = None
        if error is not None:
            assert graph.uses.is_changed, error
            self.counts["errors"] += 1
            self.recover()
        elif graph.uses.is_unseen or graph.uses.is_plain_changed:
            # FSDP2 reads the new values in backward; a converted weight is that, or NaN
            self.counts["changed by FSDP2"] += 1
            self.forget()
            if graph.uses.is_unseen:
                self.reshard_all()  # what stays gathered may stay NaN
        else:
            for each, expected, again in zip(graph.references, self.expected, run[2:], strict=True):
                for name, values in graph.uses.values.items():  # of blocks that ran again
                    each.given[name] += values
                again()
                expected.add(each.model, syncs)
            self._compare_gradients(graph)

    def _compare_gradients(self, graph: Graph) -> None:
        sharded, control, one, plain = [x.grad for x in graph.inputs]
        assert (sharded is None) == (one is None)
        if one is not None:
            assert torch.equal(sharded, one)
            assert graph.uses.is_changed or torch.equal(control, plain)
        found = self.stepped
        if not self.steps_in_backward:
            grads = (sharded_parameters(model) for model in self.both)
            found = [{name: p.grad for name, p in named.items()} for named in grads]
        pairs = zip(self.expected, found, strict=True)
        other, lost = [expected.difference(grads) for expected, grads in pairs]
        if lost is not None:  # FSDP2 loses gradients of what runs twice, first without a graph
            self.counts["lost by FSDP2"] += 1
            self.forget()
        else:
            assert other is None, other
        self.counts["backwards"] += 1
        if self.steps_in_backward:
            self.expected = Expected(), Expected()
            self._on_write()

    # Writes

    def _write(self, name: str, how: str, alone: int | None) -> Tensor:
        """Write to a weight, on all ranks or on those that hold one of its parts; its rows."""
        self._on_write(how in UNCOUNTED)
        self.uncounted |= {name} if how in UNCOUNTED else set()
        p = sharded_parameters(self.sharded)[name]
        if alone in (None, dist.get_rank() % len(self.shards)):
            write(p, how)
        return rows_of(p).clone()

    def _on_write(self, is_unseen: bool = False) -> None:
        for graph in self.graphs:
            graph.uses.is_changed = True
            graph.uses.is_unseen |= is_unseen

    @torch.no_grad()
    def _copy_rows(self) -> None:
        """Give the control the rows of the converted model."""
        rows = sharded_parameters(self.sharded)
        for name, p in sharded_parameters(self.control).items():
            rows_of(p).copy_(rows_of(rows[name]))

    @torch.no_grad()
    def write(self) -> None:
        name = self.draw.choice([*sharded_parameters(self.sharded)])
        alone = self.draw.choice(self.alone)
        how = self.draw.choice([*COUNTED, *UNCOUNTED])
        self.say(name, how, f"{alone=}")
        # the other ranks would wait for one that raises in a backward: also of a later forward, if
        # it uses what was gathered before
        raises_alone = how in COUNTED and alone is not None
        if raises_alone or (how in UNCOUNTED and not self.unseen):
            self.graphs.clear()
            self.reshard_all()
        self._write(name, how, alone)
        self._copy_rows()

    @torch.no_grad()
    def step(self) -> None:
        for p in sharded_parameters(self.sharded).values():
            if p.grad is not None:
                p.add_(p.grad.sign(), alpha=-0.02)
                p.grad = None
        for p in sharded_parameters(self.control).values():
            p.grad = None
        if self.expected[0].reduced:
            self._on_write()
        for expected in self.expected:
            expected.reduced = {}
        self._copy_rows()

    @torch.no_grad()
    def load(self) -> None:
        assign = not self.steps_in_backward and self.draw.random() < 0.5
        factor = self.draw.choice([1, 1.7, -0.6])
        self.say(f"{assign=} {factor=}")
        for model in self.both:
            state = {name: value.clone() * factor for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=assign)
        self._on_write()
        self._copy_rows()

    def move(self) -> None:
        if not self.offloads:
            self.reshard_all()
            for model in self.both:
                model.double().float()
            self._on_write()

    # Errors

    def fail(self) -> None:
        """Raise inside of a forward."""
        if self.has_run and hasattr(self.sharded, "reset_iter_state"):  # torch 2.13
            self.forward(fails=True)

    def recover(self) -> None:
        """Drop all that FSDP was doing before an error."""
        for model in self.both:
            if not hasattr(model, "reset_iter_state"):
                raise Ended
            model.reset_iter_state()
        self.handles.clear()
        self.rows.clear()
        self.forget()
        self.reshard_all()
        self._copy_rows()

    def forget(self) -> None:
        """Drop graphs that wait, and gradients."""
        self.graphs.clear()
        self.expected = Expected(), Expected()
        for model in self.both:
            drop_gradients(model)
