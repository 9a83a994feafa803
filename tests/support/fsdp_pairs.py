"""A converted and a plain model that FSDP2 distributes alike, and models of one process."""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from blocktensor import BlockwiseFP8Weight, Recipe, convert
from tests.support.fsdp_bodies import BLOCKS, Body, Dense, Experts, rows_of
from tests.support.fsdp_references import Uses


class Pair:
    """A converted model and a plain one, distributed alike, with the same rows at all times.

    Attributes:
        sharded, control: the converted model and the plain one.
        one, plain: the same before they were distributed.
        names: of their modules that FSDP2 gathers.
        converted: names of weights.
        uses: where the control notes what it has gathered, while it runs.
        rows: what the control has to copy, by name.
        stepped: gradients by which a backward has stepped, of both.
        uncounted: names of weights that were written, and PyTorch did not count it.
        handles: of gathers that were begun.
        trace: what was done.
    """

    def __init__(self, draw: random.Random, mesh: DeviceMesh, how: str) -> None:
        """Draw blocks, options, and how they are distributed: "shard", or "replicate"."""
        self.draw, self.mesh, self.how = draw, mesh, how
        self.offloads, self.checkpointed = draw.random() < 0.1, draw.random() < 0.2
        self.steps_in_backward = draw.random() < 0.15
        self.uses: Uses | None = None
        self.rows: dict[str, list[Tensor]] = defaultdict(list)
        self.stepped: list[dict[str, Any]] = [{}, {}]
        self.uncounted: set[str] = set()
        self.handles: list[Any] = []
        self.trace: list[str] = []
        kinds = [draw.choice([Dense, Dense, Experts]) for _ in range(BLOCKS)]
        self.plain = Body([kind() for kind in kinds], self.checkpointed)
        self.one = copy.deepcopy(self.plain)
        recipe = Recipe(scale=draw.choice(["fp32", "power_of_two"]))
        skip = ["*.gate"] * (Experts in kinds)
        convert(self.one, recipe, skip=skip, skip_small=False, convert_head=True)
        named = self.one.named_parameters()
        self.converted = {name for name, p in named if isinstance(p, BlockwiseFP8Weight)}
        self.sharded, self.control = copy.deepcopy(self.one), copy.deepcopy(self.plain)
        self.both = self.sharded, self.control
        self._distribute()
        self.early = {  # what is gathered after the step of a parameter in backward
            name: draw.choice(self.names)
            for name, _ in self.plain.named_parameters()
            if draw.random() < 0.1
        }
        self._watch()

    def _distribute(self) -> None:
        """Shard both models alike."""
        draw, wrap = self.draw, replicate if self.how == "replicate" else fully_shard
        options: dict[str, Any] = {"mesh": self.mesh}
        if self.offloads:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if self.how != "replicate":
            dim = draw.choice([0, 1])
            options["shard_placement_fn"] = lambda p: Shard(dim if p.ndim == 3 else 0)
        for index in range(BLOCKS):
            stays = draw.choice([None, None, False, True])
            own = {"reshard_after_forward": stays}
            own = {} if stays is None or self.how == "replicate" else own
            alone, whole = draw.random() < 0.5, draw.random() < 0.9
            for model in self.both:
                block: Any = model.blocks[index]
                for module in [block.inner] * alone + [block] * whole:
                    wrap(module, **options, **own)
        for model in self.both:
            wrap(model, **options)
        found = self.control.named_modules()
        self.names = [name for name, module in found if isinstance(module, FSDPModule)]
        for direction in ("forward", "backward"):
            for name in self.names if draw.random() < 0.3 else []:
                ahead = draw.choice(self.names)
                for model in self.both:
                    set_ahead = f"set_modules_to_{direction}_prefetch"
                    getattr(model.get_submodule(name), set_ahead)([model.get_submodule(ahead)])
        if draw.random() < 0.1:
            for model in self.both:
                model._set_unshard_async_op(True)

    def _watch(self) -> None:
        """Note what modules of the control have gathered; step in backward."""
        for name, module in self.control.named_modules():
            if [*module.parameters(recurse=False)]:
                module.register_forward_pre_hook(functools.partial(self._note, name))
                module.register_forward_hook(functools.partial(self._compare_in_backward, name))
        for model, hook in zip(self.both, (self._step, self._follow), strict=True):
            for name, p in model.named_parameters() if self.steps_in_backward else []:
                p.register_post_accumulate_grad_hook(functools.partial(hook, name))

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        if self.uses is not None:
            held = {key: p for key, p in module._parameters.items() if p is not None}
            assert not any(isinstance(p, DTensor) for p in held.values()), name
            self.uses.values[name].append({key: p.detach().clone() for key, p in held.items()})

    def _compare_in_backward(self, name: str, module: nn.Module, args: Any, y: Tensor) -> None:
        uses = self.uses
        if uses is None or not y.requires_grad:
            return
        before = uses.values[name][-1]

        def compare(grad: Tensor) -> None:
            for key, was in before.items():
                p = module._parameters[key]
                if isinstance(p, DTensor) or not torch.equal(p, was):
                    uses.is_changed = True
                    uses.is_plain_changed |= f"{name}.{key}" not in self.converted
                    uses.is_unseen |= f"{name}.{key}" in self.uncounted

        y.register_hook(compare)

    def _step(self, name: str, p: Any) -> None:
        self.stepped[0][name] = p.grad
        with torch.no_grad():
            p.add_(p.grad.sign(), alpha=-0.02)
        self.rows[name].append(rows_of(p).clone())
        p.grad = None
        if name in self.early:
            self.sharded.get_submodule(self.early[name]).unshard()

    def _follow(self, name: str, p: Any) -> None:
        self.stepped[1][name] = p.grad
        if self.rows[name]:  # none where the converted model has raised
            with torch.no_grad():
                rows_of(p).copy_(self.rows[name].pop(0))
        p.grad = None
        if name in self.early:
            self.control.get_submodule(self.early[name]).unshard()

    def say(self, *what: object) -> None:
        self.trace[-1] += " " + " ".join(map(str, what))

    # What FSDP2 is asked for

    def unshard(self) -> None:
        name = self.draw.choice(self.names)
        is_async, waits = self.draw.random() < 0.5, self.draw.random() < 0.5
        self.say(repr(name), f"{is_async=} {waits=}")
        for model in self.both:
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
        self.say(repr(name))
        for model in self.both:
            model.get_submodule(name).reshard()

    def reshard_all(self) -> None:
        self.wait()
        for model in self.both:
            for name in self.names:
                model.get_submodule(name).reshard()

    def settings(self) -> None:
        kinds = ["set_reshard_after_backward", "set_reshard_after_forward"]
        what = self.draw.choice(kinds[: 1 if self.how == "replicate" else 2])
        name, value = self.draw.choice(self.names), self.draw.random() < 0.6
        self.say(what, repr(name), value)
        for model in self.both:
            getattr(model.get_submodule(name), what)(value, recurse=False)

    def read(self) -> None:
        for model in self.both:
            model.state_dict()
