"""No product with an FP8 weight runs in high precision unless the user asked for it.

Every way to use a weight is audited, forward and backward. A way is
in FP8, raises an error that names a remedy, or is in the list of docs/guides/limits.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils.checkpoint import checkpoint

from blocktensor import audit_step
from blocktensor.reports import AuditReport
from tests.support.groups import ends
from tests.support.models import Rounded, in_a_layer, linear, randn

N = K = 256
X = randn(6, K, dtype=torch.float32)
Way = Callable[[nn.Linear, Tensor], Any]


def delta() -> Tensor:
    return randn(N, K, seed=1, dtype=torch.float32, grad=True)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:2], x[2:]])


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def stacked(m: nn.Linear, x: Tensor) -> Tensor:
    state, _ = stack_module_state([m, copy.deepcopy(m)])  # type: ignore[list-item]
    return vmap(lambda p: functional_call(m, p, (x,)))(state)


def parameters_of(m: nn.Linear) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def no_grad(way: Way, mode: Callable[[], Any] = torch.no_grad) -> Way:
    """Without gradients, in a layer."""
    way = in_a_layer(way)

    def run(m: nn.Linear, x: Tensor) -> None:
        with mode():
            way(m, x.detach())

    return run


def autocast(m: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m(x)


class Tied(nn.Module):
    def __init__(self, m: nn.Linear) -> None:
        super().__init__()
        self.a, self.b = m, nn.Linear(K, N, bias=False)
        self.b.weight = m.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


FP8: dict[str, Way] = {
    "mv": lambda m, x: torch.mv(m.weight, x[0]),
    "call": lambda m, x: m(x),
    "functional": lambda m, x: F.linear(x, m.weight),
    "matmul": lambda m, x: x @ m.weight.t(),
    "left": lambda m, x: (m.weight @ x.t()).t(),
    "x @ w": lambda m, x: x @ m.weight,
    "addmm": lambda m, x: torch.addmm(x.new_zeros(N), x, m.weight.t()),
    "w[:]": lambda m, x: F.linear(x, m.weight[:]),
    "w[...]": lambda m, x: F.linear(x, m.weight[...]),
    "view": lambda m, x: F.linear(x, m.weight.view(N, K)),
    "reshape": lambda m, x: F.linear(x, m.weight.reshape(-1, K)),
    "view_as": lambda m, x: F.linear(x, m.weight.view_as(m.weight)),
    "flatten": lambda m, x: F.linear(x, m.weight.flatten(1)),
    "unflatten": lambda m, x: F.linear(x, m.weight.unflatten(0, (2, 128)).flatten(0, 1)),
    "squeeze": lambda m, x: F.linear(x, m.weight[None].squeeze(0)),
    "heads by bmm": lambda m, x: torch.bmm(x.expand(2, 6, K), m.weight.view(2, 128, K).mT),
    "grouped_mm": lambda m, x: F.grouped_mm(x, m.weight.view(2, 128, K).mT, offs=ends(2, 3)),
    "stack of one": lambda m, x: F.linear(x, m.weight[None][0]),
    "unbind": lambda m, x: F.linear(x, m.weight[None].unbind()[0]),
    "expand": lambda m, x: F.linear(x, m.weight.expand(N, K)),
    "rows": lambda m, x: F.linear(x, m.weight[:64]),
    "rows off the grid": lambda m, x: F.linear(x, m.weight[5:250]),
    "columns": lambda m, x: F.linear(x[:, :130], m.weight[:, :130]),
    "every second row": lambda m, x: F.linear(x, m.weight[::2]),
    "chunk": lambda m, x: [F.linear(x, w) for w in m.weight.chunk(3)],
    "split": lambda m, x: [F.linear(x, w) for w in m.weight.split([100, 156])],
    "tensor_split": lambda m, x: F.linear(x, m.weight.tensor_split(2)[1]),
    "narrow": lambda m, x: F.linear(x, m.weight.narrow(0, 3, 70)),
    "part of the transpose": lambda m, x: x[:, :64] @ m.weight.t()[:64],
    "as_strided": lambda m, x: F.linear(x, m.weight.as_strided((128, K), (K, 1), 128 * K)),
    "contiguous": lambda m, x: F.linear(x, m.weight.t().contiguous().t()),
    "clone": lambda m, x: F.linear(x, m.weight.clone()),
    "bfloat16": lambda m, x: F.linear(x.bfloat16(), m.weight.bfloat16()),
    "type_as": lambda m, x: F.linear(x.half(), m.weight.type_as(x.half())),
    "detach": lambda m, x: F.linear(x, m.weight.detach()),
    "data": lambda m, x: F.linear(x, m.weight.data),
    "requires no grad": lambda m, x: m.requires_grad_(False)(x),
    "W + delta": lambda m, x: F.linear(x, m.weight + delta()),
    "delta + W": lambda m, x: F.linear(x, delta() + m.weight),
    "scaled": lambda m, x: F.linear(x, m.weight * 0.5),
    "masked": lambda m, x: F.linear(x, m.weight * (m.weight > 0)),
    "where": lambda m, x: F.linear(x, torch.where(m.weight > 0, m.weight, 0.0)),
    "dropout": lambda m, x: F.linear(x, F.dropout(m.weight, 0.5)),
    "normalised": lambda m, x: F.linear(x, F.normalize(m.weight, dim=1)),
    "centred": lambda m, x: F.linear(x, m.weight - m.weight.mean(1, keepdim=True)),
    "standardised": lambda m, x: F.linear(x, F.layer_norm(m.weight, (K,))),
    "straight through": lambda m, x: F.linear(x, m.weight + (m.weight.sign() - m.weight).detach()),
    "no_grad: straight through": no_grad(lambda m, x: F.linear(x, Rounded.apply(m.weight))),
    "autograd function": lambda m, x: F.linear(x, Rounded.apply(m.weight)),
    "autograd function of a part": lambda m, x: F.linear(x, Rounded.apply(m.weight[:64])),
    "reentrant, computed": lambda m, x: checkpoint(
        lambda x: F.linear(x, m.weight * 2), x, use_reentrant=True
    ),
    "autograd function, computed again": lambda m, x: checkpoint(
        lambda x: F.linear(x, Rounded.apply(m.weight)), x, use_reentrant=False
    ),
    "reentrant, autograd function": lambda m, x: checkpoint(
        lambda x: F.linear(x, Rounded.apply(m.weight)), x, use_reentrant=True
    ),
    "flipped": lambda m, x: F.linear(x, m.weight.flip(0)),
    "rolled": lambda m, x: F.linear(x, m.weight.roll(1, 0)),
    "cat": lambda m, x: F.linear(x, torch.cat([m.weight, m.weight])),
    "cat of parts": lambda m, x: F.linear(x, torch.cat(m.weight.chunk(2))),
    "stack": lambda m, x: F.linear(x, torch.stack([m.weight, m.weight])[1]),
    "weight_norm": lambda m, x: parametrizations.weight_norm(m)(x),
    "weight_norm of old": lambda m, x: weight_norm(m)(x),
    "prune": lambda m, x: prune.l1_unstructured(m, "weight", 0.5)(x),
    "symmetric": lambda m, x: parametrize.register_parametrization(m, "weight", Symmetric())(x),
    "tied": lambda m, x: Tied(m)(x),
    "weight as input": lambda m, x: F.linear(m.weight, linear(N, K, dtype=torch.float32).weight),
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "autocast": autocast,
    "functional_call": lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)),
    "functional_call, detached": lambda m, x: functional_call(m, parameters_of(m), (x,)),
    "deepcopy": lambda m, x: copy.deepcopy(m)(x),
    "3-D input": lambda m, x: m(x[None]),
    "vector input": lambda m, x: m(x[0]),
    "no_grad": no_grad(lambda m, x: m(x)),
    "no_grad: w[:]": no_grad(lambda m, x: F.linear(x, m.weight[:].detach())),
    "no_grad: aten.mm": no_grad(lambda m, x: torch.ops.aten.mm(x, m.weight.t())),
    "no_grad: aten.linear": no_grad(lambda m, x: torch.ops.aten.linear(x, m.weight)),
    "inference: aten.linear": no_grad(
        lambda m, x: torch.ops.aten.linear(x[None], m.weight), torch.inference_mode
    ),
    "inference: aten.matmul": no_grad(
        lambda m, x: torch.ops.aten.matmul(x[None], m.weight), torch.inference_mode
    ),
    "inference: aten.addmm": no_grad(
        lambda m, x: torch.ops.aten.addmm(x[0], x, m.weight), torch.inference_mode
    ),
    "inference: parts": no_grad(lambda m, x: F.linear(x, m.weight[5:]), torch.inference_mode),
    "no_grad: jagged": no_grad(lambda m, x: m(jagged(x))),
}
FROZEN = ("call", "matmul", "left", "x @ w", "w[:]", "view", "reshape", "detach")

ERRORS: dict[str, Way] = {
    "jagged": lambda m, x: m(jagged(x)),
    "nested": lambda m, x: m(nested(x.detach())),
    "jit.trace": lambda m, x: torch.jit.trace(m, x),
    "aten.linear": lambda m, x: torch.ops.aten.linear(x, m.weight),
    "aten.mm": lambda m, x: torch.ops.aten.mm(x, m.weight),
    "aten.mm, detached": lambda m, x: torch.ops.aten.mm(x, m.weight.detach()),
    "no_grad: aten.mm.out": no_grad(
        lambda m, x: torch.ops.aten.mm.out(x, m.weight, out=torch.empty(6, N))
    ),
    "inference: aten.einsum": no_grad(
        lambda m, x: torch.ops.aten.einsum("ij,kj->ik", [x, m.weight]), torch.inference_mode
    ),
    "einsum": lambda m, x: torch.einsum("ij,kj->ik", x, m.weight),
    "heads by einsum": lambda m, x: torch.einsum("ij,hkj->ihk", x, m.weight.view(4, 64, K)),
    "heads by matmul": lambda m, x: x @ m.weight.view(4, 64, K).mT,
    "cdist": lambda m, x: torch.cdist(m.weight, m.weight + 1),
    "corrcoef": lambda m, x: torch.corrcoef(m.weight),
    "no_grad: einsum": no_grad(lambda m, x: torch.einsum("ij,kj->ik", x, m.weight)),
    "matrix_power": lambda m, x: F.linear(x, torch.linalg.matrix_power(m.weight, 2)),
    "conv": lambda m, x: F.conv1d(x[:, :, None], m.weight[:, :, None]),
    **{
        f"orthogonal, {way}": lambda m, x, way=way: parametrizations.orthogonal(  # type: ignore[misc]
            m, orthogonal_map=way
        )(x)
        for way in ("cayley", "matrix_exp", "householder")
    },
    "vmap": lambda m, x: vmap(m)(x),
    "torch.func.grad": lambda m, x: grad(lambda t: m(t).sum())(x),
    "torch.func.grad of weights": lambda m, x: grad(lambda p: functional_call(m, p, (x,)).sum())(
        parameters_of(m)
    ),
    "jacrev": lambda m, x: jacrev(m)(x),
    "jvp": lambda m, x: jvp(m, (x,), (x,)),
    "stack_module_state": stacked,
    "no_grad: torch.func.grad of weights": no_grad(
        lambda m, x: grad(lambda p: functional_call(m, p, (x,)).sum())(parameters_of(m))
    ),
    "no_grad: vjp": no_grad(lambda m, x: vjp(lambda w: F.linear(x, w), m.weight.detach())),
    "no_grad: jvp of weights": no_grad(
        lambda m, x: jvp(lambda w: F.linear(x, w), (m.weight.detach(),), (torch.ones(N, K),))
    ),
}

DOCUMENTED: dict[str, Way] = {
    "master": lambda m, x: F.linear(x, m.weight.master),
    "high_precision": lambda m, x: F.linear(x, m.weight.high_precision()),
    "state_dict": lambda m, x: F.linear(x, m.state_dict()["weight"]),
    "functional_call with plain tensors": lambda m, x: functional_call(m, m.state_dict(), (x,)),
    "float64": lambda m, x: F.linear(x.double(), m.weight.double()),
    "flattened": lambda m, x: F.linear(x, m.weight.view(-1).view(N, K)),
    "rows by an index": lambda m, x: F.linear(x, m.weight[torch.randperm(N)]),
    "a row": lambda m, x: x @ m.weight[0],
    "no_grad: outside of layers": torch.no_grad()(lambda m, x: x @ m.weight),
    "no_grad: W + delta": no_grad(lambda m, x: F.linear(x, m.weight + 1)),
    "no_grad: of weights alone": no_grad(lambda m, x: m.weight @ m.weight.t()),
    "no_grad: corrcoef": no_grad(lambda m, x: torch.corrcoef(m.weight)),
    "no_grad: cov": no_grad(lambda m, x: torch.cov(m.weight)),
    "of a detached weight, outside of layers": lambda m, x: x @ m.weight.detach(),
}


def audited(way: Way, frozen: bool = False) -> AuditReport:
    module = linear(N, K, dtype=torch.float32, frozen=frozen)

    def step() -> None:
        out = way(module, X.clone().requires_grad_())
        for y in out if isinstance(out, list) else [out]:
            if isinstance(y, Tensor) and y.requires_grad:
                y.sum().backward()

    return audit_step(module, step)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("name", "frozen"), [*((name, False) for name in FP8), *((name, True) for name in FROZEN)]
)
def test_in_fp8(name: str, frozen: bool) -> None:
    report = audited(FP8[name], frozen)
    assert report.entries
    assert {entry.precision for entry in report.entries} == {"FP8"}, report
    assert not report.marked
    assert not report.notes


@pytest.mark.parametrize("name", ["rows", "chunk"])
def test_parts_off_the_grid_of_frozen_weights_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="dequantize"):
        audited(FP8[name], frozen=True)


@pytest.mark.filterwarnings("ignore")  # prototypes, and what is deprecated
@pytest.mark.parametrize("name", ERRORS)
def test_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"FP8"):
        audited(ERRORS[name])


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented(name: str) -> None:
    report = audited(DOCUMENTED[name])
    assert any(entry.precision != "FP8" for entry in report.entries) or report.notes
