"""Ways to write to the weight of a linear: those that PyTorch counts, and the others."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight
from tests.support.models import randn

Write = Callable[[nn.Linear], Any]
ROW = torch.tensor([1])


def new(module: nn.Linear) -> Tensor:
    """Values of the weight's shape, dtype and device."""
    weight = module.weight
    return randn(*weight.shape, seed=11, dtype=weight.dtype, device=weight.device)


def no_grad(change: Write, mode: Callable[[], Any] = torch.no_grad) -> Write:
    """Change under ``mode``."""

    def run(module: nn.Linear) -> None:
        with mode():
            change(module)

    return run


inference = partial(no_grad, mode=torch.inference_mode)


def held(view: Callable[[Tensor], Tensor]) -> Write:
    """Change through a view taken before the forward that fills the cache."""

    def run(module: nn.Linear) -> None:
        taken = view(module.weight)
        module(module.weight.new_ones(1, module.in_features))
        with torch.no_grad():
            taken.mul_(2)

    return run


def in_thread(module: nn.Linear) -> None:
    thread = threading.Thread(target=lambda: module.weight.data.mul_(2))
    thread.start()
    thread.join()


def as_vector(module: nn.Linear) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(2 * vector, module.parameters())


def swap_with_average(module: nn.Linear) -> None:
    average = (module.weight.detach() + new(module)) / 2
    module.weight.data, average = average, module.weight.data


def by_sgd(module: nn.Linear) -> None:
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.SGD([module.weight], lr=1.0).step()


def swap(module: nn.Linear) -> None:
    values, recipe = new(module), getattr(module.weight, "recipe", None)
    if recipe is not None:
        values = BlockwiseFP8Weight(values, recipe)
    torch.utils.swap_tensors(module.weight, nn.Parameter(values))


COUNTED: dict[str, Write] = {
    "copy_": no_grad(lambda m: m.weight.copy_(new(m))),
    "mul_": no_grad(lambda m: m.weight.mul_(2)),
    "data.mul_": lambda m: m.weight.data.mul_(2),
    "data.copy_": lambda m: m.weight.data.copy_(new(m)),
    "data =": lambda m: setattr(m.weight, "data", new(m)),
    "detach().mul_": lambda m: m.weight.detach().mul_(2),
    "view(-1).mul_": no_grad(lambda m: m.weight.view(-1).mul_(2)),
    "[:3].zero_": no_grad(lambda m: m.weight[:3].zero_()),
    "[0].zero_": no_grad(lambda m: m.weight[0].zero_()),
    "[0] = 0": no_grad(lambda m: m.weight.__setitem__(0, 0.0)),
    "[:, 3:5] = 1": no_grad(lambda m: m.weight.__setitem__(slice(3, 5), 1.0)),
    "t().mul_": no_grad(lambda m: m.weight.t().mul_(2)),
    "t()[3].mul_": no_grad(lambda m: m.weight.t()[3].mul_(2)),
    "t().data.mul_": lambda m: m.weight.t().data.mul_(2),
    "T.copy_": no_grad(lambda m: m.weight.T.copy_(new(m).t())),
    "rows": no_grad(lambda m: [row.mul_(2) for row in m.weight]),
    "diagonal": no_grad(lambda m: m.weight.diagonal().fill_(9)),
    "as_strided": no_grad(lambda m: m.weight.as_strided((3, 3), (m.in_features, 1)).zero_()),
    "fill_diagonal_": no_grad(lambda m: m.weight.fill_diagonal_(9)),
    "index_put_": no_grad(
        lambda m: m.weight.index_put_((ROW.to(m.weight.device),), m.weight.new_ones(()))
    ),
    "masked_fill_": no_grad(lambda m: m.weight.masked_fill_(new(m) > 0, 3)),
    "lerp_": no_grad(lambda m: m.weight.lerp_(new(m), 0.5)),
    "addcmul_": no_grad(lambda m: m.weight.addcmul_(new(m), new(m))),
    "clamp_": no_grad(lambda m: m.weight.clamp_(-0.01, 0.01)),
    "out=": no_grad(lambda m: torch.mul(new(m), 2, out=m.weight)),
    "data = of the master": lambda m: setattr(
        getattr(m.weight, "master", m.weight), "data", new(m)
    ),
    "set_": no_grad(lambda m: m.weight.set_(new(m))),
    "optimizer": by_sgd,
    "state_dict": lambda m: m.state_dict()["weight"].mul_(2),
    "view of state_dict": lambda m: m.state_dict()["weight"].view(-1).mul_(2),
    "_foreach_mul_": no_grad(lambda m: torch._foreach_mul_([m.weight], 2)),
    "_foreach_lerp_": no_grad(lambda m: torch._foreach_lerp_([m.weight], [new(m)], 0.5)),
    "_foreach_copy_": no_grad(lambda m: torch._foreach_copy_([m.weight], [new(m)])),
    "vector_to_parameters": as_vector,
    "swap_tensors": swap,
    "swap with an average": swap_with_average,
    "of the master": lambda m: getattr(m.weight, "master", m.weight.detach()).mul_(2),
    "in a thread": in_thread,
    "reset_parameters": lambda m: (torch.manual_seed(5), m.reset_parameters()),
    "load_state_dict": lambda m: m.load_state_dict({"weight": new(m)}),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict({"weight": new(m)}, assign=True),
    "to and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "half and back": lambda m: m.half().float(),
    "_apply": lambda m: m._apply(lambda t: t * 2),
    "held view": held(lambda w: w.detach().view(-1)),
    "held data": held(lambda w: w.data),
    "held view of data": held(lambda w: w.data.view(-1)),
    "held row": held(lambda w: w.detach()[3]),
    "held transpose": held(lambda w: w.detach().t()),
    "held chunk": held(lambda w: w.data.chunk(2)[1]),
    "inference mul_": inference(lambda m: m.weight.mul_(2)),
    "inference data.mul_": inference(lambda m: m.weight.data.mul_(2)),
    "inference detach().mul_": inference(lambda m: m.weight.detach().mul_(2)),
    "inference view.mul_": inference(lambda m: m.weight.view(-1).mul_(2)),
}


SWAPS = {"swap_tensors"}
"""Routes that torch refuses while a graph holds the parameter."""


def flattened(module: nn.Linear) -> None:
    """As an optimizer that keeps all parameters in one buffer."""
    flat = module.weight.detach().clone().view(-1)
    module.weight.data = flat.view_as(module.weight)
    flat.data.mul_(2)


UNCOUNTED: dict[str, Write] = {
    "data of a flat view": lambda m: m.weight.detach().view(-1).data.mul_(2),
    "data of a part": lambda m: m.weight[3:].data.mul_(2),
    "data of a row": lambda m: m.weight.detach()[3].data.zero_(),
    "data of state_dict": lambda m: m.state_dict()["weight"].data.mul_(2),
    "data of the flat buffer": flattened,
    "data of the master": lambda m: getattr(m.weight, "master", m.weight).data.mul_(2),
    "numpy": lambda m: m.state_dict()["weight"].numpy().__imul__(2),
    "dlpack": lambda m: torch.from_dlpack(m.state_dict()["weight"]).mul_(2),
    "storage": lambda m: m.state_dict()["weight"].untyped_storage().fill_(1),
    "pointer": lambda m: ctypes.memset(m.state_dict()["weight"].data_ptr(), 0, m.weight.nbytes),
}
"""Plain PyTorch does not count them, but for 'data of a part' of ours."""
