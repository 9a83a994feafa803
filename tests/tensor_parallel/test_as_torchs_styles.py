"""Our styles compared with the styles of torch: options, arguments, collectives, errors."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.numeric import assert_same
from tests.support.parallel_linears import (
    BF16,
    DIM,
    Mlp,
    batch,
    batches,
    converted,
    drawn,
    local,
    plain,
    tokens_of,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import Wire


@on_ranks(2, gpus=())
def test_styles_of_torch_name_ours(mesh: DeviceMesh) -> None:
    for style in (torch_styles.ColwiseParallel(), torch_styles.RowwiseParallel()):
        module = converted(bias=True)
        with pytest.raises(NotImplementedError, match="ColwiseParallel or RowwiseParallel of"):
            parallelize_module(module, mesh, style)
        assert module(drawn((128, 256), BF16, 1)).shape == (128, 256)  # as it was
        module = parallelize_module(plain(256, 256, True, BF16), mesh, style)
        with pytest.raises(NotImplementedError, match="ColwiseParallel or RowwiseParallel of"):
            convert(module, skip_small=False)
        assert type(module.weight.to_local()) is Tensor


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel, PrepareModuleInput])
def test_options_and_their_defaults_are_those_of_torchs_style(style: Any) -> None:
    own, torchs = (
        {name: (x.kind, x.default) for name, x in inspect.signature(kind).parameters.items()}
        for kind in (style, getattr(torch_styles, style.__name__))
    )
    more = {"reduce_dtype": None, "in_rank_order": False}
    assert own == torchs | {name: (inspect.Parameter.KEYWORD_ONLY, x) for name, x in more.items()}


class Seen(nn.Module):
    """Returns its arguments, which a linear layer could read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, dtype=BF16)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [*args, *kwargs.values()]


@pytest.mark.parametrize("by_keyword", [False, True])
@on_ranks(2, gpus=())
def test_arguments_that_are_not_cast_are_those_of_torchs_style(
    mesh: DeviceMesh, by_keyword: bool
) -> None:
    """If a linear layer is not converted, there is none, or its input is not gathered."""
    x, mask = tokens_of(mesh, batch(1)), torch.ones(3)
    ways = itertools.product((False, True), (Replicate(), Shard(2), Shard(1)), ("", "fp8", "none"))
    for is_local, layout, linear in ways:
        if linear == "fp8" and layout == Replicate():
            continue
        found = []
        for kind in (PrepareModuleInput, torch_styles.PrepareModuleInput):
            module = Seen()
            if linear == "none":
                del module.linear
            else:
                parallelize_module(module.linear, mesh, ColwiseParallel())
            if linear == "fp8":
                convert(module, skip_small=False)
            given: Any = {"x": Shard(1)} if by_keyword else (Shard(1), None)
            wanted: Any = {"x": layout} if by_keyword else (layout, None)
            infix = "_kwarg" if by_keyword else ""
            layouts = {f"input{infix}_layouts": given, f"desired_input{infix}_layouts": wanted}
            parallelize_module(module, mesh, kind(**layouts, use_local_output=is_local))
            found.append(module(x=x, mask=mask) if by_keyword else module(x, mask))
        (got, other), (want, _) = found
        assert other is mask
        assert type(got) is type(want) is (Tensor if is_local else DTensor)
        assert getattr(got, "placements", None) == getattr(want, "placements", None)
        assert_same(local(got), local(want))


@on_ranks(2, gpus=())
def test_unconverted_linears_send_what_torchs_do(mesh: DeviceMesh) -> None:
    sent: list[Any] = []
    ours = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    torchs = tuple(getattr(torch_styles, style.__name__) for style in ours)
    for colwise, rowwise, prepare in (ours, torchs):
        torch.manual_seed(0)
        plan = {
            "gate": colwise(),
            "up": colwise(),
            "down": rowwise(output_layouts=Shard(1)),
            "": prepare(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        model = parallelize_module(Mlp(512).bfloat16(), mesh, plan)
        x = batches(mesh)[0].requires_grad_()
        model(x)  # ranks compare
        with Wire() as wire:
            y = model(x)
            y.sum().backward()
        kinds = (wire.gathered, wire.reduced, wire.scattered)
        sent.append(([sorted(t.nbytes for t in kind) for kind in kinds], y.detach(), x.grad))
    assert sent[0][0] == sent[1][0]
    assert sum(map(len, sent[0][0])) == 4
    for got, want in zip(sent[0][1:], sent[1][1:], strict=True):
        assert_same(got, want)
