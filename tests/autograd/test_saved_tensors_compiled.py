"""Activations saved in FP8: by compiled graphs too, or the context is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from blocktensor import saved_tensors_in_fp8
from tests.support.compiling import reads_grad
from tests.support.models import randn
from tests.support.numeric import relative_error
from tests.support.saved import K, T, assert_bits, data, gradients, model, rounding, small_model


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_report_counts_compiled_graphs(dynamic: bool) -> None:
    """A graph counts where it was compiled, in every forward."""
    made, x, saved = small_model(), data().requires_grad_(), saved_tensors_in_fp8()
    run = compiled(lambda x: made(x.exp()).sin(), fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        with saved:
            by_graph = saved_by_graph(run(x), x, *made.parameters())
        assert sum(kind.tensors for kind in saved.kinds) == 4
        assert saved.bytes_after == sum(t.nbytes for t in by_graph)
        assert saved.bytes_after == pytest.approx(saved.bytes_before * (1 + 4 / 128) / 2)
    assert "packed by a compiled graph" in str(saved)
    with saved_tensors_in_fp8() as other:
        run(x)
    assert other.bytes_before == 0


@pytest.mark.parametrize("fp8", [False, True])
def test_a_compiled_model(fp8: bool) -> None:
    made, x = model(fp8, layers=1), data()
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
            assert len(of_heads) >= 3, "queries, keys and values"
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


EXACT: dict[str, Any] = {
    "logcumsumexp": lambda h: torch.logcumsumexp(h - 100, -1),
    "a threshold": lambda h: h.masked_fill(h < h.topk(8)[0][..., -1:], 0) ** 2,
    "product": lambda h: (h / 3).prod(-1),
    "largest": lambda h: h.amax(-1),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_compiled_graph_keeps_what_rounding_would_change(backend: str, name: str) -> None:
    """Eager contexts keep it, or save a mask."""
    w = nn.Parameter(randn(K, K, seed=1) / 16)
    torch._dynamo.reset()
    made = torch.compile(lambda x: EXACT[name](x @ w.t()), backend=backend, fullgraph=True)
    found = []
    for context in (nullcontext(), saved_tensors_in_fp8()):
        x = data().requires_grad_()
        with context:
            y = made(x)
        found.append(torch.autograd.grad(y.float().sum(), [x, w]))
    for got, want in zip(*reversed(found), strict=True):
        assert relative_error(got, want) <= 0.04  # of results, which may be packed


@pytest.mark.parametrize(
    "activation",
    [F.silu, F.gelu, F.relu, F.hardswish, F.softplus, lambda h: F.silu(h.clamp(max=7))],
)
def test_a_compiled_graph_packs_inputs_of_activations(activation: Any) -> None:
    """Decomposed, they compute exponentials, and compare with numbers."""
    w = nn.Parameter(randn(K, K, seed=1) / 16)
    torch._dynamo.reset()
    backend = "aot_eager_decomp_partition"
    made = torch.compile(lambda x: activation(x @ w.t()).square(), backend=backend)
    x = data().requires_grad_()
    with saved_tensors_in_fp8():
        saved = saved_by_graph(made(x), x, w)
    assert [t.numel() for t in saved if t.dtype == torch.float8_e4m3fn] == [2 * T * K]


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_saves_repeated_heads_once(dynamic: bool) -> None:
    """Keys of groups of queries are saved before they repeat, exactly."""

    def function(x: Tensor) -> Tensor:
        q, k = x.view(2, -1, 8, 64).transpose(1, 2), x.view(2, -1, 8, 64)[:, :, :2].transpose(1, 2)
        k = k.exp()[:, :, None].expand(-1, -1, 4, -1, -1).reshape(q.shape)
        return F.scaled_dot_product_attention(q, k, k)

    made, gradients_of, bytes_of = compiled(function, fullgraph=True, dynamic=dynamic), [], []
    for context in (nullcontext(), saved_tensors_in_fp8()):
        x = data().requires_grad_()
        with context:
            y = made(x)
        bytes_of.append(sum(t.nbytes for t in saved_by_graph(y, x)))
        gradients_of.append(torch.autograd.grad(y.float().square().sum(), x))
    assert_bits(*map(list, gradients_of))
    assert bytes_of[0] - bytes_of[1] == 3 / 4 * 2 * T * K * 2


class Measured(fx.Interpreter):
    """A graph that measures how many bytes of what it computes exist at once."""

    def __init__(self, graph: fx.GraphModule, peaks: list[int]) -> None:
        super().__init__(graph)
        self.peaks, self.made = peaks, {}

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op == "call_function":
            for tensor in tree_leaves(made):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: each for key, each in self.made.items() if not each[0].expired()}
        self.peaks[-1] = max(self.peaks[-1], sum(nbytes for _, nbytes in self.made.values()))
        return made

    def run(self, *args: Any, **options: Any) -> Any:
        self.peaks.append(0)
        return super().run(*args, **options)


def test_compiled_graphs_pack_tensors_one_after_the_other() -> None:
    """Neither graph has all tensors in high precision at once."""
    made, x = model(fp8=True, layers=4).requires_grad_(False), data().requires_grad_()
    peaks_of = []
    for context in (nullcontext(), saved_tensors_in_fp8()):
        peaks: list[int] = []

        def measured(graph: fx.GraphModule, _: Any, peaks: list[int] = peaks) -> Any:
            return make_boxed_func(Measured(graph, peaks).run)

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=measured, partition_fn=min_cut_rematerialization_partition
        )
        with context:
            y = torch.compile(made, backend=backend, fullgraph=True)(x)
        y.float().square().sum().backward()
        peaks_of.append(peaks)
    forward, backward = (after / before for before, after in zip(*peaks_of, strict=True))
    assert forward < 0.9
    assert backward < 0.65


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


@reads_grad
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
