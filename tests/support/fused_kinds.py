"""A model of every kind that ``fuse`` fuses, its twin that is not, and what ran fused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from blocktensor import convert, fuse
from blocktensor.fusion.experts import Experts, RoutedExperts
from blocktensor.fusion.mlp import MLP
from blocktensor.fusion.norm import Norm
from tests.support import fused_experts, mlps, norms
from tests.support.models import randn
from tests.support.moe_models import transformers_moe


class Kind(NamedTuple):
    """A model of one kind of patterns.

    Attributes:
        make: the converted model, of a dtype.
        x: its input.
        module: the name of one of its modules that are fused.
        alike: the number of its modules of this class.
        runs: the number of modules that run fused.
        in_bf16: how many of those run as written in fp32, under autocast and in graphs.
        others: the number of modules that look like a pattern and are left alone.
    """

    make: Callable[[torch.dtype], nn.Module]
    x: Tensor
    module: str
    alike: int
    runs: int
    in_bf16: int = 0
    others: int = 0

    def fuse(self, model: nn.Module, **options: Any) -> None:
        """Fuse it, and check that this leaves alone what it should."""
        report = fuse(model, **options)
        assert (len(report.fused), len(report.left_alone)) == (self.runs, self.others)

    def fused(self, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Any, Any]:
        """A fused model, and its twin that is not."""
        model = self.make(dtype)
        twin = copy.deepcopy(model)
        self.fuse(model, **options)
        return model, twin

    def args(self, model: nn.Module, grad: bool = True) -> tuple[Tensor, ...]:
        """The arguments of a forward of the model."""
        p = next(model.parameters())
        if isinstance(model, fused_experts.Sizes):  # which multiply in bf16
            x = self.x.to(p.device, copy=True).requires_grad_(grad)
            return x, fused_experts.groups_of().to(p.device)
        return (self.x.to(p.device, p.dtype, copy=True).requires_grad_(grad),)

    def results(self, model: nn.Module, run: Any = None) -> list[Tensor | None]:
        """The output, and the gradients of x and of all parameters, from scratch."""
        for p in model.parameters():
            p.grad = None
        args = self.args(model)
        y = (model if run is None else run)(*args)
        y.backward(randn(*y.shape, seed=7, dtype=y.dtype, device=y.device))
        return [y.detach(), args[0].grad, *(p.grad for p in model.parameters())]

    def fused_runs(self, model: nn.Module) -> int:
        """How many modules run fused in a forward."""
        with watched_runs() as seen, torch.no_grad():
            model(*self.args(model, grad=False))
        return len(seen)


@contextmanager
def watched_runs() -> Iterator[list[str]]:
    """The patterns that run until the end."""
    seen: list[str] = []

    def watched(run: Any) -> Any:
        def and_run(self: Any, *args: Any) -> Any:
            seen.append(type(self).__name__)
            return run(self, *args)

        return and_run

    with ExitStack() as patches:
        for kind in (MLP, Experts, RoutedExperts, Norm):
            patches.enter_context(mock.patch.object(kind, "run", watched(kind.run)))
        yield seen


def _experts(dtype: torch.dtype) -> nn.Module:
    model = fused_experts.Sizes().to(dtype)
    convert(model, skip_small=False, stacks={"*": ("w1", "w3", "w2")})
    return model


def _routed(dtype: torch.dtype) -> nn.Module:
    block: nn.Module = transformers_moe("qwen3").model.layers[0].mlp.to(dtype)
    convert(block, skip_small=False)
    return block


KINDS = {
    "mlp": Kind(lambda dtype: mlps.converted(mlps.Model(), dtype=dtype), mlps.X, "layers.0.mlp",
                2, 2),
    "norm": Kind(lambda dtype: norms.blocks(dtype=dtype), mlps.X, "layers.0.input_layernorm",
                 4, 6, 4),
    "torch's norm": Kind(lambda dtype: norms.blocks(norms.OfTorch, dtype=dtype), mlps.X,
                         "layers.0.mlp", 2, 2, others=4),
    "experts": Kind(_experts, randn(fused_experts.ROWS, fused_experts.K), "", 1, 1),
    "routed": Kind(_routed, randn(2, 12, 128), "experts", 1, 1),
}  # fmt: skip
"""MLPs; MLPs and norms, also of torch; experts; and experts of transformers."""
