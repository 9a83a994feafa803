"""The context: gradients as in plain torch with rounded tensors; what is held, and for how long."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import convert, functional, fuse, monitor, saved_tensors_in_fp8
from blocktensor.autograd import saved_report
from blocktensor.autograd.packed_once import _shared
from tests.support.models import randn
from tests.support.saved import is_activation, rounding

T, K = 32, 512


class Block(nn.Module):
    """A norm, heads, an MLP and a residual, like a transformer's."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, dtype=dtype)
        self.qkv = nn.Linear(K, 3 * K, bias=False, dtype=dtype)
        self.out = nn.Linear(K, K, bias=False, dtype=dtype)
        self.up = nn.Linear(K, 2 * K, bias=False, dtype=dtype)
        self.down = nn.Linear(2 * K, K, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:-1], 4, 128).transpose(-2, -3)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        x = x + self.out(attended)
        return x + self.down(F.silu(self.up(x)))


def model(fp8: bool = False, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, K, dtype=dtype), *(Block(dtype) for _ in range(layers)))
    if fp8:
        convert(made, skip_small=False)
    return made


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(K, K), nn.SiLU(), nn.Linear(K, K)).bfloat16()


def data(dtype: torch.dtype = torch.bfloat16, device: Any = "cpu") -> Tensor:
    return randn(2, T, K, dtype=dtype, device=device)


def gradients(made: nn.Module, run: Callable[..., Tensor], context: Any) -> list[Tensor]:
    """The gradients of all parameters, after a forward in a context, with the loss outside."""
    made.zero_grad()
    first = next(made.parameters())
    with context:
        y = run(data(first.dtype, first.device))
    y.float().square().mean().backward()
    return [p.grad.clone() for p in made.parameters() if p.grad is not None]


def assert_bits(made: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(made) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_are_those_of_rounded_tensors(
    fp8: bool, dtype: torch.dtype, device: torch.device
) -> None:
    made = model(fp8, dtype=dtype).to(device)
    plain = gradients(made, made, nullcontext())
    saved = saved_tensors_in_fp8()
    packed = gradients(made, made, saved)
    assert_bits(packed, gradients(made, made, rounding()))
    assert not all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True))
    # norms on a GPU save no fp32 values, which shrink most
    assert saved.bytes_after < (0.9 if device.type == "cuda" else 0.75) * saved.bytes_before


def test_a_fused_mlp(device: torch.device) -> None:
    """Its function saves gate and up, which no graph of autograd has."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(LlamaConfig(hidden_size=K, intermediate_size=640)).bfloat16()
    made = nn.Sequential(nn.Linear(K, K, dtype=torch.bfloat16), mlp).to(device)
    convert(made, skip_small=False)
    fuse(made, recompute=True)
    saved = saved_tensors_in_fp8()
    packed = gradients(made, made, saved)
    in_fp8 = {(kind.shape, kind.tensors) for kind in saved.kinds if kind.kept_as == "FP8"}
    assert in_fp8 >= {((2 * T, 640), 2)}
    chosen = rounding(lambda x: is_activation(x) or (x.shape[-1], x.dtype) == (640, torch.bfloat16))
    assert_bits(packed, gradients(made, made, chosen))


def test_fused_experts() -> None:
    tokens, experts, width = 96, 3, 128
    torch.manual_seed(0)
    first = nn.Linear(K, K, dtype=torch.bfloat16)
    weights = [
        nn.Parameter(torch.randn(experts, *shape, dtype=torch.bfloat16) / 16)
        for shape in ((width, K), (width, K), (K, width))
    ]
    offs = torch.tensor([40, 40, 90], dtype=torch.int32)

    def step(context: Any) -> list[Tensor]:
        with context:
            y = functional.gated_experts(first(x), *weights, offs, recompute=True)
        return [*torch.autograd.grad(y.float().square().sum(), [*weights, *first.parameters()])]

    x, saved = randn(tokens, K), saved_tensors_in_fp8()
    packed = step(saved)
    in_fp8 = {(kind.shape, kind.tensors) for kind in saved.kinds if kind.kept_as == "FP8"}
    assert in_fp8 == {((tokens, width), 2)}
    assert_bits(packed, step(rounding(lambda x: x.shape == (tokens, width))))


def test_an_adapter() -> None:
    """With frozen FP8 weights and trained adapters."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(K, K, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            self.a = nn.Linear(K, 16, bias=False, dtype=torch.bfloat16)
            self.b = nn.Linear(16, K, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    made = nn.Sequential(Adapted(), nn.SiLU(), Adapted())
    convert(made, skip=["*a", "*b"], skip_small=False)
    assert_bits(gradients(made, made, saved_tensors_in_fp8()), gradients(made, made, rounding()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    """Inputs are packed, and nothing inside; forwards run again on the rounded inputs."""
    made = model(layers=3)

    def run(x: Tensor) -> Tensor:
        x = made[0](x)
        for block in made[1:]:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    saved = saved_tensors_in_fp8()
    packed = gradients(made, run, saved)
    assert_bits(packed, gradients(made, run, rounding()))
    assert [(kind.shape, kind.tensors) for kind in saved.kinds if kind.kept_as == "FP8"] == [
        ((2, T, K), 3)
    ]


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_context_inside_of_a_checkpoint(reentrant: bool, around: bool) -> None:
    """It leaves the hooks in place by which torch saves nothing; nor does it pack what runs again.

    ``around``: of the backward too.
    """
    made = model()
    twin = copy.deepcopy(made)
    saved = saved_tensors_in_fp8()
    for block in made[1:]:
        saved.register(block)

    def run(x: Tensor, blocks: Any) -> Tensor:
        x = blocks[0](x)
        for block in blocks[1:]:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    wanted = gradients(twin, lambda x: run(x, twin), nullcontext())
    with saved_tensors_in_fp8(enabled=False) if around else nullcontext():
        assert_bits(gradients(made, lambda x: run(x, made), nullcontext()), wanted)
    assert saved.kinds == ()


def test_a_context_around_the_backward() -> None:
    """What a backward saves is read soon."""
    made = model()

    def step(outside: bool) -> list[Tensor]:
        made.zero_grad()
        with (saved := saved_tensors_in_fp8()):
            loss = checkpoint(made[1], made[0](data()), use_reentrant=True).sum()
            if not outside:
                loss.backward()
                kept_as = {kind.kept_as for kind in saved.kinds}
                assert kept_as >= {"FP8", "saved in a backward"}
        if outside:
            loss.backward()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    assert_bits(step(False), step(True))


def test_a_graph_that_is_used_again() -> None:
    made = model()
    leaves = [*made.parameters()]
    with saved_tensors_in_fp8():
        loss = made(data()).float().square().mean()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    part = torch.autograd.grad(loss, leaves[3:5], retain_graph=True)
    assert_bits([*part], [*first[3:5]])
    assert_bits([*torch.autograd.grad(loss, leaves)], [*first])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_second_derivatives() -> None:
    """They are those of plain torch with rounded tensors, whose rounding has gradient one."""
    w = nn.Parameter(randn(K, K, dtype=torch.float32) / 16)
    x = randn(T, K, dtype=torch.float32)

    def second(context: Any) -> list[Tensor]:
        with context:
            loss = (x @ w).tanh().square().sum()
        (dw,) = torch.autograd.grad(loss, w, create_graph=True)
        return [dw.detach(), *torch.autograd.grad(dw.square().sum(), w)]

    assert_bits(second(saved_tensors_in_fp8()), second(rounding()))


def test_autocast() -> None:
    """Weights that autocast has cast are no activations."""
    made = nn.Sequential(nn.Linear(K, 640), nn.SiLU(), nn.Linear(640, K), nn.SiLU())

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made(x)

    cast_weights = {(p.shape[1], p.shape[0]) for p in made.parameters() if p.ndim == 2}
    chosen = rounding(lambda x: is_activation(x) and tuple(x.shape) not in cast_weights)
    saved = saved_tensors_in_fp8()
    packed = gradients(made, run, saved)
    assert {kind.shape for kind in saved.kinds if kind.kept_as == "FP8"}.isdisjoint(cast_weights)
    assert_bits(packed, gradients(made, run, chosen))


def test_contexts_in_each_other() -> None:
    """The innermost one applies, as with all saved-tensor hooks of torch."""
    x = model(layers=0)(data())
    outer, inner = saved_tensors_in_fp8(), saved_tensors_in_fp8(enabled=False)
    with outer:
        with inner:
            x.exp()
        with save_on_cpu():
            x.exp()
        with outer:
            x.exp()
        x.sin()
    assert [kind.kept_as for kind in inner.kinds] == ["not enabled"]
    assert sum(kind.tensors for kind in outer.kinds) == 2
    assert {kind.kept_as for kind in outer.kinds} == {"FP8"}
    with save_on_cpu(), outer:
        x.cos()
    assert [kind.tensors for kind in outer.kinds] == [1]
    with outer, torch.no_grad():
        x.exp()
    assert outer.kinds == ()
    assert str(outer) == "nothing was saved"


def test_memory_is_packed_once() -> None:
    """Also for views of all shapes; other versions and other memory are packed anew."""
    x = model(layers=0)(data())
    with saved_tensors_in_fp8() as saved:
        kept = [
            x.sin(),
            x.cos(),
            x.view(-1, 1, K).transpose(0, 1).sin(),
            x[:].sin(),
            x.view(-1).sin(),
        ]
        assert [kind.tensors for kind in saved.kinds] == [1]
        x.view(-1)[:4096].square()  # other memory
        assert [kind.tensors for kind in saved.kinds] == [1, 1]
        with torch.no_grad():
            x += 1
        kept.append(x.sin())
        assert [kind.tensors for kind in saved.kinds] == [2, 1]
        x.data = x.data + 1  # other memory at the same version
        kept.append(x.sin())
        assert sum(kind.tensors for kind in saved.kinds) == 4
    with saved_tensors_in_fp8() as other:
        kept.append(x.cos())  # found, though another context has packed it
    assert other.kinds == ()
    assert saved.bytes_before == 3 * x.nbytes + 2 * 4096


def test_the_values_at_the_time_of_saving_are_packed() -> None:
    w = nn.Parameter(torch.eye(K))
    x = randn(T, K, dtype=torch.float32)
    with saved_tensors_in_fp8():
        a = x @ w
        first = a.sin()
        b = a.detach()  # counts changes with a, but has no view of it
        b.mul_(2)
        second = a.sin()
    with pytest.raises(RuntimeError, match=r"\[32, 512\], saved in FP8, is at version 1; expected"):
        first.sum().backward(retain_graph=True)
    second.sum().backward()
    with rounding():
        wanted = torch.autograd.grad((x @ w).mul(2).sin().sum() / 2, w)
    assert w.grad is not None
    assert torch.equal(w.grad, wanted[0])


def test_counters_of_changes_are_not_mixed_up() -> None:
    """Two tensors in one memory that do not count changes together: no version tells values."""

    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.data

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    w = nn.Parameter(torch.eye(K))
    x = randn(T, K, dtype=torch.float32)

    def run() -> list[Tensor]:
        a = (x @ w).mul_(1)
        first = a.sin()
        b = Alias.apply(a).mul_(3)
        assert a._version == b._version == 1
        return [*torch.autograd.grad(b.sin().sum(), w, retain_graph=True), first.detach()]

    with saved_tensors_in_fp8():
        packed = run()
    with rounding():
        assert_bits(packed, run())


def test_memory_is_freed_and_found_no_more() -> None:
    """A tensor that gets the memory or the id of a freed one has a cast of its own."""
    w = nn.Parameter(torch.eye(K))
    before = len(_shared)
    with saved_tensors_in_fp8():
        for i in range(20):
            x = randn(T, K, seed=i, dtype=torch.float32)
            a = x @ w
            y, storage = a.sin(), weakref.ref(a.untyped_storage())
            del a
            assert storage() is None  # autograd holds the cast alone
            (dw,) = torch.autograd.grad(y.sum(), w)
            with rounding():
                wanted = torch.autograd.grad((x @ w).sin().sum(), w)
            assert torch.equal(dw, wanted[0])
    del y
    gc.collect()
    assert len(_shared) == before


def test_casts_are_freed_with_their_graph() -> None:
    x = model(layers=0)(data()) * 1  # stays alive
    with saved_tensors_in_fp8():
        y = x.sin()
    (entry,) = [entry for entry in _shared.values() if entry.base() is x]
    assert entry.packed() is not None
    y.sum().backward()
    assert entry.packed() is None


def test_what_a_report_shows() -> None:
    made = model(layers=1)
    with saved_tensors_in_fp8() as saved:
        y = made(data())
    text = str(saved)
    ratio = f"({saved.bytes_after / saved.bytes_before:.2f}x)"
    assert text.endswith(ratio)
    assert "as it is: needs no gradient" in text
    assert "in FP8" in text
    assert json.loads(json.dumps(saved.to_dict()))["bytes_after"] == saved.bytes_after
    assert sum(kind.bytes_after for kind in saved.kinds) == saved.bytes_after
    with saved:
        pass
    assert saved.bytes_before == 0
    del y


def test_a_registered_module() -> None:
    made = model()
    saved = saved_tensors_in_fp8()
    handle = saved.register(made)
    packed = gradients(made, made, nullcontext())
    assert saved.bytes_before > 0
    handle.remove()
    assert_bits(packed, gradients(made, made, rounding()))
    plain = gradients(made, made, nullcontext())
    assert not all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True))


def test_a_module_that_is_left_out() -> None:
    made = model()
    saved_tensors_in_fp8().register(made)
    saved_tensors_in_fp8(enabled=False).register(made[2])
    packed = gradients(made, made, nullcontext())
    inside = False

    def outside(x: Tensor) -> bool:
        return not inside and is_activation(x)

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = not inside

    twin = model()
    twin[2].register_forward_pre_hook(enter)
    twin[2].register_forward_hook(enter)
    assert_bits(packed, gradients(twin, twin, rounding(outside)))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_registered_module(way: Any) -> None:
    made = model()
    saved = saved_tensors_in_fp8()
    handle = saved.register(made)
    twin = way(made)
    handle.remove()
    packed = gradients(twin, twin, nullcontext())
    assert_bits(packed, gradients(made, made, rounding()))
    assert saved.bytes_before == 0  # the copy has a context of its own


def test_forwards_that_fail() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, error: Any) -> Tensor:
            if error is not None:
                raise error
            return x.exp()

    x = model(layers=0)(data())
    made, saved = Fails(), saved_tensors_in_fp8()
    saved.register(made)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with pytest.raises(ValueError, match="none"):
        made(x, ValueError("none"))
    assert top(False) is None
    with pytest.raises(KeyboardInterrupt):
        made(x, KeyboardInterrupt())  # no hook of the module runs
    assert top(False) is not None
    made(x, None)
    assert top(False) is None
    with saved_tensors_in_fp8(), pytest.raises(KeyboardInterrupt):
        made(x, KeyboardInterrupt())
    assert top(False) is None
    refuses = made.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        made(x, None)  # fails before it enters
    refuses.remove()
    assert top(False) is None


def test_threads() -> None:
    x = model(layers=0)(data())
    found = []
    with saved_tensors_in_fp8() as saved:
        thread = threading.Thread(target=lambda: found.append(x.exp()))
        thread.start()
        thread.join()
        assert saved.kinds == ()
        x.exp()
    assert [kind.tensors for kind in saved.kinds] == [1]


def test_memory_that_is_kept_anyway() -> None:
    """The output of attention is kept; a view of it, which a linear layer saves, is too."""
    x = model(layers=0)(data())
    with saved_tensors_in_fp8() as saved:
        y = x.view(2, T, 4, 128).exp()  # saves its output, in heads
        z = y.flatten(2).sin()
        assert {kind.kept_as for kind in saved.kinds} == {"in heads, for attention"}
        assert saved.bytes_after == y.nbytes
        del y, z
        x.view(2, T, 4, 128).exp().flatten(2).sin()
    assert saved.bytes_after == 2 * x.nbytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "nested", "jagged"])
def test_tensors_without_strides(layout: str) -> None:
    def run() -> Tensor:
        x = randn(64, 256, dtype=torch.float32).requires_grad_()
        if layout in ("coo", "csr"):
            y = x.to_sparse() if layout == "coo" else x.to_sparse_csr()
            torch.mm(y * 1, x.detach().t() @ x).sum().backward()
        else:
            kind = torch.strided if layout == "nested" else torch.jagged
            parts = torch.nested.as_nested_tensor([x[:20], x[20:]], layout=kind)
            ((parts * 1).sin() * 1).to_padded_tensor(0.0).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = run()
    with saved_tensors_in_fp8():
        made = run()
    assert (made - wanted).square().sum() < 0.01 * wanted.square().sum()


def test_a_context_around_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_report, "_MAX_KEPT", 20)
    x = model(layers=0)(data())
    with saved_tensors_in_fp8() as saved:
        for _ in range(30):
            y = x.exp() * x.view(2, T, 4, 128).exp().flatten(2)
        assert len(saved._kept) <= 21
        assert not saved.holds(y)
    assert saved._kept == {}


def test_memory_in_no_rows_of_blocks() -> None:
    x = model(layers=0)(data()).view(-1, K)
    with saved_tensors_in_fp8() as saved:
        x[:1].expand(T, K).exp()  # the result is packed
        x[:1].expand(T, K).sin()
        (x * 1)[:, ::2].sin()
    assert [kind.kept_as for kind in saved.kinds if kind.kept_as != "FP8"] == [
        "less than 4096 elements",
        "not in rows of 128 elements",
    ]


def test_a_monitor_does_not_measure_packing() -> None:
    made = model(True)

    def figures(context: Any) -> dict[str, float]:
        health = monitor(made, every=1)
        with health, context:
            made(data()).sum().backward()
        return health.scalars()

    assert figures(saved_tensors_in_fp8()).keys() == figures(nullcontext()).keys()
    outside = {name: x for name, x in figures(nullcontext()).items() if "/x/" in name}
    packing = figures(saved_tensors_in_fp8())
    assert {name: packing[name] for name in outside} == outside


def test_dispatch_modes() -> None:
    made = model()
    with FlopCounterMode(display=False) as counter:
        packed = gradients(made, made, saved_tensors_in_fp8())
        assert_bits(packed, gradients(made, made, rounding()))
    assert counter.get_total_flops() > 0


def saved_by_graph(y: Tensor, *owned: Tensor) -> list[Tensor]:
    """Return the intermediates that the compiled function of ``y`` saves.

    ``owned``: the parameters, and other tensors that it only reads.
    """
    addresses = {getattr(x, "master", x).data_ptr() for x in owned}
    return [x for x in y.grad_fn.saved_tensors if x.data_ptr() not in addresses]


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend="aot_eager", **options)


def test_a_compiled_graph_packs_its_intermediates() -> None:
    w = nn.Parameter(randn(K, K, seed=1))
    function = compiled(lambda x: F.silu(x @ w), fullgraph=True)
    gradients_of = []
    for run in (function, lambda x: F.silu(x @ w)):
        x = data().requires_grad_()
        with saved_tensors_in_fp8():
            y = run(x)
        gradients_of.append(torch.autograd.grad(y.float().square().sum(), [x, w]))
    assert_bits(*gradients_of)
    with saved_tensors_in_fp8():
        saved = saved_by_graph(function(x), x, w)
    assert [x.dtype for x in saved if x.numel() >= K] == [torch.float8_e4m3fn]


@pytest.mark.parametrize("fp8", [False, True])
def test_a_compiled_model(fp8: bool) -> None:
    made, x = model(fp8), data()
    function = compiled(made, fullgraph=True)
    bytes_of, found = {}, {}
    for _ in range(2):  # a graph for each way, found again
        for way, context in (
            ("plain", nullcontext()),
            ("packed", saved_tensors_in_fp8()),
            ("not enabled", saved_tensors_in_fp8(enabled=False)),
        ):
            with context:
                saved = saved_by_graph(function(x), x, *made.parameters())
            bytes_of[way] = sum(t.nbytes for t in saved)
            found[way] = gradients(made, function, context)
            of_heads = [t for t in saved if t.ndim == 4 and t.dtype == torch.bfloat16]
            assert len(of_heads) >= 6, "queries, keys and values of two layers"
    assert bytes_of["packed"] < (0.9 if fp8 else 0.75) * bytes_of["plain"]
    assert bytes_of["not enabled"] == bytes_of["plain"]
    assert_bits(found["not enabled"], found["plain"])
    pairs = zip(found["packed"], found["plain"], strict=True)
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    assert 0.01 < max(errors) < 0.15
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_compiled_graph_keeps_values_of_parameters() -> None:
    w = nn.Parameter(randn(K, K, dtype=torch.float32))

    def function(x: Tensor) -> Tensor:
        return (x @ (w * w).bfloat16().exp()).sin().cos()

    made, x = compiled(function, fullgraph=True), data().requires_grad_()
    with saved_tensors_in_fp8():
        saved = saved_by_graph(made(x), x, w)
    assert [t.numel() for t in saved if t.dtype == torch.float8_e4m3fn] == [2 * T * K]
    assert [t.shape for t in saved if t.dtype == torch.bfloat16] == [(K, K)]


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_compiled_graph_keeps_logits(backend: str) -> None:
    """Decomposed, backward computes probabilities again from the logits."""
    head, words = nn.Parameter(randn(2 * K, K, seed=1)), torch.arange(2 * T)

    def function(x: Tensor) -> Tensor:
        return F.cross_entropy((x.flatten(0, 1) @ head.t()).float(), words)

    torch._dynamo.reset()
    made, gradients_of = torch.compile(function, backend=backend, fullgraph=True), []
    for context in (nullcontext(), saved_tensors_in_fp8()):
        x = data().requires_grad_()
        with context:
            loss = made(x)
        gradients_of.append(torch.autograd.grad(loss, [x, head]))
    assert_bits(*gradients_of)


def test_a_compiled_graph_keeps_what_attention_reads() -> None:
    """The graph saves the outputs of matmuls, and computes q, k and v of them again."""
    weights = [nn.Parameter(randn(K, K, seed=seed) / 16) for seed in range(3)]

    def function(x: Tensor) -> Tensor:
        q, k, v = (((x @ w.t()).float() * 2).view(2, T, 4, 128).transpose(1, 2) for w in weights)
        return F.scaled_dot_product_attention(q, k, v)

    torch._dynamo.reset()
    made = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    gradients_of = []
    for context in (nullcontext(), saved_tensors_in_fp8()):
        x = data().requires_grad_()
        with context, torch._functorch.config.patch(aggressive_recomputation=True):
            y = made(x)
        gradients_of.append(torch.autograd.grad(y.float().square().sum(), [x, *weights]))
    assert_bits(*gradients_of)


def test_intermediates_of_others_functions() -> None:
    """They are not taken for those of a compiled graph."""

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.rand(x.shape))
            return x * 1

    with saved_tensors_in_fp8() as saved:
        Masked.apply(model(layers=0)(data()))
    assert {kind.kept_as for kind in saved.kinds} == {"needs no gradient"}


def test_a_compiled_module_with_hooks() -> None:
    torch._dynamo.reset()
    made = small_model()
    plain = gradients(made, torch.compile(made, backend="aot_eager"), nullcontext())
    torch._dynamo.reset()
    saved = saved_tensors_in_fp8()
    saved.register(made)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="what this compiled graph saves"):
        assert_bits(gradients(made, compiled, nullcontext()), plain)


def test_a_context_in_a_compiled_function() -> None:
    made = model(layers=0)

    def run(x: Tensor) -> Tensor:
        with saved_tensors_in_fp8():
            return made(x).exp()

    with pytest.raises(Exception, match="saved_tensors_in_fp8 in a compiled function"):
        torch.compile(run, backend="eager", fullgraph=True)(data())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_function_that_runs_eagerly() -> None:
    """Dynamo gives up at the context, and must not trace what enters it and what packs."""
    torch._dynamo.reset()
    made, saved = model(layers=1), saved_tensors_in_fp8()

    def run(x: Tensor) -> Tensor:
        with saved:
            return made(x)

    assert_bits(
        gradients(made, torch.compile(run, backend="eager"), nullcontext()),
        gradients(made, made, rounding()),
    )
    assert "FP8" in {kind.kept_as for kind in saved.kinds}


def test_compiled_autograd_is_refused() -> None:
    from torch._dynamo.utils import maybe_enable_compiled_autograd

    made = small_model()
    with saved_tensors_in_fp8():
        y = made(data())
    with (
        pytest.raises(Exception, match="compiled autograd cannot unpack what saved_tensors_in_fp8"),
        maybe_enable_compiled_autograd(True),
    ):
        y.sum().backward()


def test_wrong_arguments() -> None:
    made: Any = nn.Linear(8, 8)
    with pytest.raises(
        TypeError, match=r"got a Linear: expected enabled=True or False; .*register"
    ):
        saved_tensors_in_fp8(made)
    with pytest.raises(TypeError, match="register got a function: expected a module"):
        saved_tensors_in_fp8().register(made.forward.__func__)
