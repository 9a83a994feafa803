"""Ways to cut a model that has adapters of experts between ranks, for tests."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor.distributed import RowwiseParallel
from tests.support.published import expert_parallel, tensor_parallel
from tests.support.ranks import shared_mesh

STACKS = ["experts.gate_up_proj", "experts.down_proj"]


class Layout(NamedTuple):
    """How ranks share a model.

    Attributes:
        cut: before peft adds adapters: "EP", by an all-reduce of outputs; "EP, sent", by sending
            tokens; "TP"; or "".
        wrapped: afterwards: "FSDP", "FSDP, kept" (not resharded after forward), "FSDP, root" (one
            unit), "HSDP", "FSDP around" (all but the experts), "DDP", or "".
        recomputed: activation checkpointing.
    """

    cut: str = ""
    wrapped: str = ""
    recomputed: bool = False

    def __str__(self) -> str:
        words = (self.cut, self.wrapped, "recomputed" * self.recomputed)
        return " + ".join(word for word in words if word)

    @property
    def is_two_dims(self) -> bool:
        """Return True if FSDP2 cuts what another dimension of the mesh has cut."""
        over = self.wrapped.startswith("FSDP") and self.wrapped != "FSDP around"
        return self.wrapped == "HSDP" or (bool(self.cut) and over)


OF_TWO = (
    Layout("", "FSDP"),
    Layout("", "FSDP, kept"),
    Layout("", "FSDP, root"),
    Layout("", "FSDP", recomputed=True),
    Layout("", "DDP"),
    Layout("EP"),
    Layout("EP", recomputed=True),
    Layout("EP", "FSDP around"),
    Layout("EP, sent", "FSDP around"),
    Layout("TP"),
)
OF_FOUR = (
    Layout("", "FSDP"),
    Layout("", "HSDP"),
    Layout("", "FSDP", recomputed=True),
    Layout("", "DDP"),
    Layout("EP"),
    Layout("EP", "FSDP"),
    Layout("EP", "FSDP, kept"),
    Layout("EP", "FSDP", recomputed=True),
    Layout("EP, sent", "FSDP around"),
    Layout("TP", "FSDP"),
)


def adapted(base: Any, cut: str = "") -> Any:
    """Add adapters of random values, the same on every rank, to experts.

    Outputs of attention have adapters too, unless tensor parallelism cuts them.
    """
    modules = [] if cut == "TP" else ["o_proj"]
    config = peft.LoraConfig(r=4, target_modules=modules, target_parameters=STACKS)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                x: Any = part.weight
                values = torch.randn(x.shape) / 20
                if isinstance(x, DTensor):
                    place = x.device_mesh, x.placements
                    values = distribute_tensor(values, *place, src_data_rank=None)
                part.weight = nn.Parameter(values)
    return model


def cut_before(base: Any, layout: Layout, mesh: DeviceMesh) -> None:
    """Cut a base without adapters."""
    if layout.cut == "EP":
        expert_parallel(base, mesh)
    elif layout.cut == "EP, sent":
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        alone = shared_mesh("cpu", mesh.size(), 1, names=("all", "alone"))["alone"]
        plan = base._expand_parallel_plan(base.ep_plan)
        apply_expert_parallelism(base, mesh, alone, plan, ep_implementation="all_to_all")
    elif layout.cut == "TP" and hasattr(base.model.layers[0].self_attn, "sinks"):
        _cut_outputs(base, mesh)  # sinks, one for each head, are not cut
    elif layout.cut == "TP" and type(base).__name__.startswith("MiniMax"):
        _cut_outputs(base, mesh)  # its norms are of all heads
    elif layout.cut == "TP":
        tensor_parallel(base, mesh)


def _cut_outputs(base: Any, mesh: DeviceMesh) -> None:
    for layer in base.model.layers:
        style = RowwiseParallel(input_layouts=Replicate(), reduce_dtype=torch.float32)
        parallelize_module(layer, mesh, {"self_attn.o_proj": style})


class _AllGradients(torch.autograd.Function):
    """The identity, whose gradients of all uses add before they pass on, as those of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def add_by_ranks(model: nn.Module, ranks: int) -> None:
    """Let one process add the outputs of experts in the order of ``ranks`` ranks."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and not isinstance(module.gate_up_proj, nn.Module):
            module._is_expert_parallel = True
            module.forward = functools.partial(_in_turns, module.forward, module, ranks)


def _in_turns(forward: Any, module: Any, ranks: int, x: Tensor, index: Tensor, by: Tensor) -> Any:
    x, by = _AllGradients.apply(x), _AllGradients.apply(by)
    made: Any = None
    for r in range(ranks):
        others = index // (module.num_experts // ranks) != r
        own = torch.where(others, module.num_experts, index)
        y = forward(x, own, by.masked_fill(others, 0))
        made = y if made is None else made + y
    return made


def wrap(model: Any, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard peft's model by FSDP2, over the ranks of ``mesh``."""
    base = model.get_base_model()
    how: dict[str, Any] = {"mesh": mesh}
    if layout.wrapped == "FSDP around":
        ranks = mesh.size()
        how["ignored_params"] = experts = {x for x in base.parameters() if isinstance(x, DTensor)}
        for x in experts:
            if x.requires_grad and layout.cut == "EP, sent":
                x.register_hook(lambda grad: grad / ranks)
    if layout.wrapped == "FSDP, kept":
        how["reshard_after_forward"] = False
    if layout.wrapped != "FSDP, root":
        for layer in base.model.layers:
            fully_shard(layer, **how)
    fully_shard(base, **how)


def meshes(layout: Layout, world: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of the cut, and that of FSDP2."""
    everyone = shared_mesh("cpu", world, names=("all",))
    if not layout.is_two_dims:
        return everyone, everyone
    square = shared_mesh("cpu", 2, world // 2, names=("a", "b"))
    return (everyone, square) if layout.wrapped == "HSDP" else (square["b"], square["a"])


def recompute(model: Any) -> None:
    """Checkpoint the activations of each layer, without the deprecated names of transformers."""
    from torch.utils.checkpoint import checkpoint

    base = model.get_base_model()
    base.config.use_cache = False  # a second forward would add to it
    for layer in base.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of all that is trained, by name."""
    found = {}
    for name, x in model.named_parameters():
        if x.requires_grad:
            grad: Any = x.grad
            assert grad is not None, name
            whole: Tensor = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name.removeprefix("module.")] = whole
    return found
