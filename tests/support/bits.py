"""Hashes of results through the public API: one file for each commit and machine, to compare.

    python -m tests.support.bits record FILE     write the hashes of this checkout
    python -m tests.support.bits check FILE      compare this checkout with them

Casts, products, linears, checkpoints and (on CPUs) FSDP2 gathers. Products on a CPU depend on its
BLAS: record and check on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import blocktensor
from blocktensor import BlockwiseFP8Tensor, Recipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = (Recipe(), Recipe(scale="power_of_two"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MATRICES = (
    (1, 1), (1, 128), (127, 129), (128, 128), (129, 127), (64, 576), (300, 200), (36, 10944),
    (0, 128), (128, 0), (256, 512), (1000, 72),
)  # fmt: skip
STACKS = ((3, 130, 260), (2, 128, 256), (4, 1, 127))
PRODUCTS = (
    (1, 1, 1), (16, 128, 128), (127, 129, 200), (128, 256, 384), (300, 576, 130), (64, 64, 2048),
    (257, 10944, 256), (512, 384, 576), (1024, 1024, 1024), (4, 16, 16),
)  # fmt: skip

Case = tuple[str, list[Tensor | None]]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers over many magnitudes, with a zero, an infinite and a NaN block if there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 6, shape, generator=generator).float())
    if len(shape) == 2 and shape[0] > 140 and shape[1] > 300:
        x[:130, :128] = 0
        x[3, 130] = float("inf")
        x[140, 299] = float("nan")
    return x.to(dtype).to(DEVICE)


def digest(tensors: list[Tensor | None]) -> str:
    """One hash of bytes, shapes and dtypes."""
    found = hashlib.sha256()
    for x in tensors:
        if x is None:
            found.update(b"none")
            continue
        plain = torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())
        found.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        found.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()[:16]


def held(q: BlockwiseFP8Tensor) -> list[Tensor | None]:
    """What a tensor holds, without the zeros after columnwise data."""
    col = q.columnwise_data
    if col is not None:
        col = col[..., : q.shape[-2]]
    return [q.rowwise_data, q.rowwise_scale, col, q.columnwise_scale]


def casts() -> Iterator[Case]:
    """Every cast, dequantize and transpose."""
    for dtype in DTYPES:
        for recipe in RECIPES:
            for shape in (*MATRICES, *STACKS):
                x = values(shape, dtype, len(shape) + shape[-1])
                name = f"{shape} {dtype} {recipe.scale}"
                for label, view in (("", x), (" strided", x.mT.contiguous().mT)):
                    if len(shape) == 2:
                        q = BlockwiseFP8Tensor.from_values(view, (1, 128), recipe)
                        yield f"cast 1x128 {name}{label}", [*held(q), q.dequantize()]
                    q = BlockwiseFP8Tensor.from_values(view, (128, 128), recipe)
                    row, col = q.rowwise(), q.columnwise()
                    wide = q.dequantize(torch.float32)
                    yield f"cast 128x128 {name}{label}", [*row[:2], *col[:2], wide]
                if len(shape) == 2:
                    for sides in ((True, False), (False, True)):
                        q = BlockwiseFP8Tensor.from_values(
                            x, (1, 128), recipe, rowwise=sides[0], columnwise=sides[1]
                        )
                        yield f"cast one side {sides} {name}", held(q)


def products() -> Iterator[Case]:
    """GEMMs of every pair of formats."""
    for m, n, k in PRODUCTS:
        for dtype in DTYPES:
            for recipe in RECIPES:
                name = f"{(m, n, k)} {dtype} {recipe.scale}"
                x, w = values((m, k), dtype, 1), values((n, k), dtype, 2)
                g, bias = values((m, n), dtype, 3), values((n,), dtype, 4)
                xq = BlockwiseFP8Tensor.from_values(x.nan_to_num(0, 1, 1), (1, 128), recipe)
                wq = BlockwiseFP8Tensor.from_values(w.nan_to_num(0, 1, 1), (128, 128), recipe)
                gq = BlockwiseFP8Tensor.from_values(g.nan_to_num(0, 1, 1), (1, 128), recipe)
                with torch.no_grad():
                    yield f"mm fprop {name}", [torch.mm(xq, wq.t())]
                    yield f"mm bias {name}", [torch.addmm(bias, xq, wq.t())]
                    yield f"mm dgrad {name}", [torch.mm(gq, wq)]
                    yield f"mm wgrad {name}", [torch.mm(gq.t(), xq)]


def linears() -> Iterator[Case]:
    """Forward and backward of converted linears, in every way a user may set them up."""
    ways = [("cached", {}), ("uncached", {"cache_weight": False})]
    for m, n, k in PRODUCTS:
        for dtype in DTYPES:
            for scale in ("fp32", "power_of_two"):
                for way, options in ways:
                    for bias in (False, True):
                        recipe = Recipe(scale=scale, **options)
                        yield (
                            f"linear {(m, n, k)} {dtype} {scale} {way} {bias}",
                            _steps((m, n, k), dtype, recipe, bias),
                        )
                yield f"frozen {(m, n, k)} {dtype} {scale}", _frozen((m, n, k), dtype, scale)


def _layer(n: int, k: int, dtype: torch.dtype, bias: bool, recipe: Recipe) -> nn.Linear:
    layer = nn.Linear(k, n, bias=bias, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(values(tuple(p.shape), dtype, 7 + i).nan_to_num(0, 1, 1))
    blocktensor.to_blockwise_fp8_weights(layer, recipe)
    return layer


def _steps(
    sizes: tuple[int, int, int], dtype: torch.dtype, recipe: Recipe, bias: bool
) -> list[Tensor | None]:
    m, n, k = sizes
    layer = _layer(n, k, dtype, bias, recipe)
    out: list[Tensor | None] = []
    for step in range(3):  # a second and third call of a kind take other ways than the first
        x = values((m, k), dtype, 20 + step).nan_to_num(0, 1, 1).requires_grad_()
        g = values((m, n), dtype, 30 + step).nan_to_num(0, 1, 1)
        shared = blocktensor.quantize(x, recipe) if step == 2 else x
        y = layer(shared)
        y.backward(g)
        out += [y, x.grad, layer.weight.grad]
    x = values((m, k), dtype, 40).nan_to_num(0, 1, 1)
    weight = values((n, k), dtype, 41).nan_to_num(0, 1, 1)
    out.append(blocktensor.functional.linear(x, weight, recipe=recipe))
    return out


def _frozen(sizes: tuple[int, int, int], dtype: torch.dtype, scale: Any) -> list[Tensor | None]:
    m, n, k = sizes
    layer = _layer(n, k, dtype, True, Recipe(scale=scale))
    blocktensor.freeze(layer)
    x = values((m, k), dtype, 50).nan_to_num(0, 1, 1).requires_grad_()
    y = layer(x)
    y.backward(values((m, n), dtype, 51).nan_to_num(0, 1, 1))
    return [y, x.grad]


def checkpoints() -> Iterator[Case]:
    """The files that save_fp8 writes."""
    for scale in ("fp32", "power_of_two"):
        model = nn.Sequential(
            _layer(200, 300, torch.bfloat16, True, Recipe(scale=scale)), nn.LayerNorm(200)
        ).to(DEVICE)
        with tempfile.TemporaryDirectory() as folder:
            path = blocktensor.save_fp8(model, Path(folder) / "x")
            for file in sorted(path.iterdir()):
                content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
                yield f"checkpoint {scale} deepseek {file.name}", [content]


def gathers() -> Iterator[Case]:
    """What two ranks gather under FSDP2, and three steps of training (gloo)."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (2, folder), nprocs=2)
        for rank in range(2):
            for name, tensors in torch.load(Path(folder) / f"{rank}.pt").items():
                yield f"fsdp rank {rank} {name}", tensors


def _rank(rank: int, world: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    found: dict[str, list[Tensor | None]] = {}
    for scale in ("fp32", "power_of_two"):
        for n, k in ((256, 128), (200, 300), (130, 64), (576, 1000)):
            for dtype in (torch.bfloat16, torch.float32):
                model = nn.Sequential(
                    _layer(n, k, dtype, True, Recipe(scale=scale)),
                    _layer(k, n, dtype, False, Recipe(scale=scale)),
                )
                fully_shard(model, reshard_after_forward=False)  # its weights can be read after it
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                results: list[Tensor | None] = []
                for step in range(3):
                    x = values((33, k), dtype, 60 + step + rank).nan_to_num(0, 1, 1)
                    y = model(x)
                    for layer in model:
                        w: Any = layer.weight
                        results += [w.rowwise_data.clone(), w.rowwise_scale.clone()]
                    y.float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    results.append(y.detach())
                found[f"{(n, k)} {dtype} {scale}"] = results
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def hashes() -> dict[str, str]:
    """All cases by name."""
    sources = [casts(), products(), linears(), checkpoints()]
    if DEVICE == "cpu":
        sources.append(gathers())
    return {name: digest(tensors) for source in sources for name, tensors in source}


def main(verb: str, file: str) -> int:
    """Record or check; the exit status."""
    torch.manual_seed(0)
    found = hashes()
    if verb == "record":
        Path(file).write_text(json.dumps(found, indent=0))
        print(f"{len(found)} cases recorded")
        return 0
    known = json.loads(Path(file).read_text())
    wrong = [name for name in known.keys() | found.keys() if known.get(name) != found.get(name)]
    print(f"{len(found)} cases, {len(wrong)} differ from {os.path.basename(file)}")
    for name in sorted(wrong)[:40]:
        print("  ", name)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
