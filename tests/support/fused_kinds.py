"""A model of every kind that ``fuse`` fuses, its twin that is not, and what ran fused."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from blocktensor import convert, fuse
from blocktensor.fusion.experts import Experts, RoutedExperts
from blocktensor.fusion.fused_class import fused_modules
from blocktensor.fusion.mlp import MLP
from blocktensor.fusion.norm import Norm
from tests.support import fused_experts, mlps, norms
from tests.support.models import plain, randn
from tests.support.moe_models import transformers_moe
from tests.support.steps import step


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

    def fused(self, dtype: torch.dtype = torch.bfloat16, recompute: bool = False) -> Any:
        """A fused model, and its twin that is not: copies of what is made once."""
        return copy.deepcopy(_fused(self, dtype, recompute))

    def args(self, model: nn.Module, grad: bool = True) -> tuple[Tensor, ...]:
        """The arguments of a forward of the model."""
        p = next(model.parameters())
        if isinstance(model, fused_experts.Sizes):  # which multiply in bf16
            x = self.x.to(p.device, copy=True).requires_grad_(grad)
            return x, fused_experts.groups_for(model).to(p.device)
        return (self.x.to(p.device, p.dtype, copy=True).requires_grad_(grad),)

    def results(self, model: nn.Module, run: Any = None) -> list[Tensor | None]:
        """The output, and the gradients of x and of all parameters, from scratch."""
        return step(model if run is None else run, *self.args(model), of=[model])

    def fused_runs(self, model: nn.Module) -> int:
        """How many modules run fused in a forward."""
        return count_runs(model, *self.args(model, grad=False))


@functools.cache
def _fused(kind: Kind, dtype: torch.dtype, recompute: bool) -> tuple[nn.Module, nn.Module]:
    model = kind.make(dtype)
    twin = copy.deepcopy(model)
    kind.fuse(model, recompute=recompute)
    return model, twin


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
}


def count_runs(run: Callable[..., Any], *args: Any) -> int:
    """How many modules run fused in ``run(*args)``, without gradients."""
    with ExitStack() as patches, torch.no_grad():
        runs = [
            patches.enter_context(
                mock.patch.object(pattern, "run", autospec=True, side_effect=pattern.run)
            )
            for pattern in (MLP, Experts, RoutedExperts, Norm)
        ]
        run(*args)
    return sum(each.call_count for each in runs)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Check that random numbers and all that a model holds stay as they are."""
    before = [(p, plain(p), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    buffers = [x.clone() for x in model.buffers()]
    training = [each.training for each in model.modules()]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)
    assert [each.training for each in model.modules()] == training
    assert all(map(torch.equal, model.buffers(), buffers))
    for p, (same, values, grad) in zip(model.parameters(), before, strict=True):
        assert p is same
        assert torch.equal(plain(p), values)
        assert p.grad is grad or torch.equal(p.grad, grad)


def why_left_alone(model: nn.Module, name: str = "") -> str:
    """The reason for which ``fuse`` leaves a module alone, and as it was."""
    with unchanged(model):
        report = fuse(model)
    assert name not in dict(fused_modules(model))
    (entry,) = [x for x in report.left_alone if x.name == name]
    return entry.reason


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
    "experts": Kind(lambda dtype: fused_experts.converted(fused_experts.Sizes().to(dtype)),
                    randn(fused_experts.ROWS, fused_experts.K), "", 1, 1),
    "routed": Kind(_routed, randn(2, 12, 128), "experts", 1, 1),
}  # fmt: skip
"""MLPs; MLPs and norms, also of torch; experts; and experts of transformers."""
