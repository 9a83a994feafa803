"""What is gathered: its bytes, and what goes over the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from blocktensor import BlockwiseFP8Tensor, convert
from blocktensor.ops import reference
from tests.distributed.nets import (
    RECIPES,
    deep,
    mesh_of,
    reductions,
)
from tests.support.numeric import assert_same

ROWS = (1, 64, 127, 128, 192, 576, 1000, 4096, 10944)
COLUMNS = 240  # 2, 3 and 4 ranks share them evenly, in parts of blocks


class Once(nn.Module):
    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.a = nn.Linear(COLUMNS, rows, bias=False)
        self.b = nn.Linear(COLUMNS, rows, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.a(x) + self.b(x)
        return made


def gathered_bytes(rank: int, world: int, device: str, rows: tuple[int, ...]) -> int:
    """How many combinations were gathered as one process casts."""
    mesh, done = mesh_of(world, device), 0
    for n in rows:
        for recipe in RECIPES:
            for tied, dim in ((False, 0), (True, 0), (False, 1)):
                if n > 1000 and (tied or recipe.power_of_two):
                    continue  # large ones take their time
                torch.manual_seed(n)
                model = Once(n, tied).to(device, torch.bfloat16)
                with torch.no_grad():
                    model.a.weight[n // 2, 5] = 300.0  # a block's maximum on one rank
                convert(model, recipe, auto_filter_small_kn=False)
                masters = [m.weight.master.clone() for m in (model.a, model.b)]
                place = None if dim == 0 else (lambda p: Shard(1))
                fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=False)
                with torch.no_grad():
                    y = model(torch.ones(2, COLUMNS, device=device, dtype=torch.bfloat16))
                assert y.shape == (2, n)
                for module, master in zip((model.a, model.b), masters, strict=True):
                    weight = module.weight
                    assert isinstance(weight, BlockwiseFP8Tensor)
                    assert weight.columnwise_data is None
                    wanted = reference.quantize_square(master, recipe.power_of_two)
                    for got, want in zip(weight.rowwise(), wanted, strict=True):
                        assert_same(got, want)
                model.reshard()
                # rows that some rank has none of are reduced by themselves
                alone = dim == 0 and -(-n // world) * (world - 1) >= n
                assert reductions(model) == (2 if alone and not tied else 1)
                done += 1
    return done


class Wire(TorchDispatchMode):
    """Every collective: its name, and the bytes and dtypes of what each rank brings."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and "gather" in str(func):
            self.sent.append(("gather", args[1].nbytes, str(args[1].dtype)))
        elif func.namespace == "c10d" and "allreduce" in str(func):
            (tensor,) = args[0]
            self.sent.append(("reduce", tensor.nbytes, str(tensor.dtype)))
        return func(*args, **(kwargs or {}))


def wire(
    rank: int, world: int, device: str, layers: int, fp8: bool, micro: int
) -> list[list[tuple[str, int, str]]]:
    """What is gathered and all-reduced in each of three steps."""
    model = deep(layers).to(device)
    if fp8:
        convert(model, auto_filter_small_kn=False)
    mesh = mesh_of(world, device)
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(3):
        with Wire() as seen:
            for _ in range(micro):
                x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
                model(x.to(device, torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(seen.sent)
    return steps
