"""What ran in FP8 and what did not, in one forward and backward of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import audit, audit_step, convert, freeze, share_inputs
from tests.support import sharded, siblings
from tests.support.asserts import assert_no_marked_product
from tests.support.compiling import afresh as afresh
from tests.support.compiling import graphs, reads_grad
from tests.support.models import TOKENS, Model, randn
from tests.support.ranks import on_ranks


def converted(model: nn.Module) -> nn.Module:
    convert(model, skip_small=False)
    return model


class Calls(nn.Module):
    """Runs ``function(module, x)``, in which a linear ``lin`` may be used in any way."""

    def __init__(self, function: Callable[[Any, Tensor], Any], n: int = 48, k: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(k, n, bias=False)
        self.function = function
        converted(self)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.function(self, x, **kwargs)


X = randn(6, 32, dtype=torch.float32)


def test_table(device: torch.device) -> None:
    report = assert_no_marked_product(converted(Model()).to(device), TOKENS.to(device))
    assert_expected_inline(
        str(report).partition("\n\n")[0],
        """\
module             matmul    M x N x K      precision  FLOPs
-----------------  --------  -------------  ---------  -----
blocks.*.up (2)    fprop     12 x 192 x 64  FP8        15.6%
blocks.*.up (2)    dgrad     12 x 64 x 192  FP8        15.6%
blocks.*.up (2)    wgrad     192 x 64 x 12  FP8        15.6%
blocks.*.down (2)  fprop     12 x 64 x 192  FP8        15.6%
blocks.*.down (2)  dgrad     12 x 192 x 64  FP8        15.6%
blocks.*.down (2)  wgrad     64 x 192 x 12  FP8        15.6%
lm_head            forward   12 x 50 x 64   fp32       2.0%
lm_head            backward  50 x 64 x 12   fp32       2.0%
lm_head            backward  12 x 64 x 50   fp32       2.0%
FP8: 93.9% of FLOPs; fp32: lm_head 6.1%""",
    )


def test_shares_and_totals_are_those_of_torchs_counter() -> None:
    model = converted(Model())
    tokens = TOKENS.repeat(16, 1)  # a multiple of 64: torch counts the tokens that casts add
    report = audit(model, tokens)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    ours = sum(n for op, n in counted.items() if str(op).startswith("blocktensor"))
    assert report.flops == counter.get_total_flops()
    assert report.fp8_share == ours / report.flops
    assert list(report.by_precision()) == ["FP8", "fp32"]
    assert sum(report.by_precision().values()) == pytest.approx(1)


@pytest.mark.parametrize("tokens", [1, 8, 130])
def test_tokens_that_casts_add_are_not_counted(tokens: int) -> None:
    model = converted(nn.Sequential(nn.Linear(64, 192, bias=False)))
    report = audit(model, randn(tokens, 64, dtype=torch.float32).requires_grad_())
    assert [e.flops for e in report.entries] == [2 * tokens * 64 * 192] * 3


@pytest.mark.parametrize("frozen", [False, True])
def test_bits_are_those_of_a_run_without_audit(frozen: bool, device: torch.device) -> None:
    models = [converted(Model()).to(device) for _ in range(2)]
    if frozen:
        [freeze(model) for model in models]
    seen: list[list[Tensor]] = []

    def step(model: nn.Module) -> None:
        y = model(TOKENS.to(device))
        y.square().sum().backward()
        seen.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])

    report = audit_step(models[0], lambda: step(models[0]))
    step(models[1])
    assert len(seen[0]) == len(seen[1]) > 2
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert all(p.grad is None for p in models[0].parameters())
    kinds = [e.kind for e in report.entries if e.precision == "FP8"]
    assert kinds == ["fprop"] * 4 + (["dgrad"] * 4 if frozen else ["dgrad", "wgrad"] * 4)


def test_shared_inputs_stay_shared_afterwards() -> None:
    model, by_hand = (siblings.converted(siblings.Qkv(by_hand=hand)) for hand in (False, True))
    (group,) = share_inputs(model).groups
    siblings.results(model, siblings.X)
    before = group.casts
    audit(model, siblings.X)
    assert group.casts == before
    shared = siblings.results(model, siblings.X)
    siblings.assert_same(shared, siblings.results(by_hand, siblings.X))


def test_no_backward_without_gradients() -> None:
    def kinds() -> set[str]:
        return {e.kind for e in audit(model, TOKENS).entries}

    model = converted(Model())
    assert kinds() == {"fprop", "dgrad", "wgrad", "forward", "backward"}
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert len(audit(model, TOKENS).entries) == 5
            assert kinds() == {"fprop", "forward"}
    model.requires_grad_(False)
    assert kinds() == {"fprop", "forward"}


def test_inference_mode_draws_random_numbers_once() -> None:
    seen: list[Tensor] = []
    model = Calls(lambda m, x: seen.append(F.dropout(F.dropout(x), training=True)) or m.lin(x))
    with torch.inference_mode():
        audit(model, X)
        model(X)
    assert torch.equal(*seen)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, y: Output(loss, y),
        lambda loss, y: {"loss": loss, "logits": y},
        lambda loss, y: Output(None, loss),
        lambda loss, y: {"loss": None, "logits": (loss, [3])},
        lambda loss, y: (loss, TOKENS),
    ],
)
def test_backward_begins_at_the_loss(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    seen: list[Tensor] = []

    def run(model: nn.Module, x: Tensor) -> Any:
        y = model.lin(x)
        y.register_hook(seen.append)
        return wrap((y * 3).sum(), y.detach())

    assert len(audit(Calls(run), X).entries) == 2
    assert torch.equal(seen[0], torch.full((6, 48), 3.0))


def test_outputs_without_a_loss_and_keywords_of_the_model() -> None:
    model = Calls(lambda m, x: {"a": m.lin(x), "b": (m.lin(x + 1), TOKENS, None, 1j * m.lin(x))})
    assert [e.kind for e in audit(model, X).entries] == ["fprop"] * 3 + ["wgrad"] * 2
    given: dict[str, Any] = {}
    model = Calls(lambda m, x, **kwargs: given.update(kwargs) or m.lin(x))
    audit(model, x=X, loss=1, backward=2, step=3, args=4)
    assert given == {"loss": 1, "backward": 2, "step": 3, "args": 4}


def test_the_graph_behind_an_input_is_left_alone() -> None:
    leaf = X.clone().requires_grad_()
    x = leaf.exp()
    report = audit(Calls(lambda m, x: m.lin(x["x"][0])), {"x": [x]})
    assert [e.kind for e in report.entries] == ["fprop", "dgrad", "wgrad"]
    assert leaf.grad is None and x.grad_fn is not None
    x.sum().backward()  # its graph is not freed
    assert leaf.grad is not None


def test_a_step_of_ones_own() -> None:
    model = converted(Model())

    def step() -> None:
        for scale in (1, 2):
            F.cross_entropy(scale * model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()

    assert len(audit_step(model, step).entries) == 30


def test_matrices_as_thin_as_adapters_are_to_be_left() -> None:
    """Adapters of one's own: convert does not know them, as it knows peft's."""
    model = nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 256))
    told = {
        entry.weight: entry.remedy
        for entry in audit(model, randn(4, 256, dtype=torch.float32)).entries
    }
    assert all("as thin as an adapter: leave it" in told[f"{i}.weight"] for i in range(2)), told


def test_no_products() -> None:
    report = audit(nn.ReLU(), X)
    assert str(report) == "no matmul ran"
    assert (report.entries, report.fp8_share, report.flops) == ((), 0, 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
def test_recomputed_products_are_labelled(reentrant: bool, as_function: bool) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        function = (lambda x: F.linear(x, m.lin.weight)) if as_function else m.lin
        y = checkpoint(lambda x: torch.mm(function(x), x.t()), x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y.relu()

    name = "(model)" if as_function else "lin"
    wanted = [
        f"{name}: fprop FP8",
        "(model): forward fp32",
        f"{name}: fprop again FP8",
        # the other one stops at the last tensor that is saved
        *(["(model): forward again fp32"] if reentrant else []),
        *["(model): backward fp32"] * 2,
        f"{name}: dgrad FP8",
        f"{name}: wgrad FP8",
    ]
    entries = audit(Calls(run, 32), X.clone().requires_grad_()).entries
    ran = [f"{e.module}: {e.kind}{' again' * e.recomputed} {e.precision}" for e in entries]
    assert ran == wanted


@reads_grad
def test_compiled_regions_run_in_eager_mode_and_stay_compiled() -> None:
    model, eager = converted(Model()), converted(Model())
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
    model.blocks[1].compile(backend="aot_eager")
    wanted = audit(eager, TOKENS)
    assert audit(model, TOKENS) == wanted  # before anything is compiled
    assert graphs() == 0
    y = model(TOKENS)
    y.sum().backward()
    compiled = graphs()
    assert compiled > 0
    assert audit(model, TOKENS) == wanted
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(model(TOKENS), y)
    assert graphs() == compiled
    assert audit(torch.compile(eager, backend="aot_eager"), TOKENS) == wanted


@on_ranks(2)
def test_sharded_model(world: int, device: str) -> None:
    model, single = sharded.twins(device)
    sharded.shard(model, sharded.mesh_of(world, device))
    x = sharded.batch(0, device)

    def fails_outside() -> None:
        with pytest.raises(ZeroDivisionError):
            audit_step(model, lambda: 1 / 0)

    fails_outside()  # before FSDP knows the root
    wanted = audit(single, x)
    assert audit(model, x) == wanted
    assert wanted.fp8_share == 1
    with torch.no_grad():
        assert [e.kind for e in audit(model, x).entries] == ["fprop"] * 3
    assert all(p.grad is None for p in model.parameters())
    if hasattr(model, "reset_iter_state"):  # torch 2.13: FSDP can forget a forward that raised
        handle = model.mid.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            audit(model, x)
        fails_outside()
        handle.remove()
    assert all(hasattr(p, "full_tensor") for p in model.parameters())  # sharded again
    sharded.assert_trains_as(single, model, device, steps=2)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_llama_of_transformers(reentrant: bool | None) -> None:
    llama = pytest.importorskip("tests.support.pretrained").llama
    model = converted(llama(use_cache=reentrant is None).bfloat16())
    if reentrant is not None:
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # 5.23, older
        next(getattr(model, n) for n in names if hasattr(model, n))({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
    report = assert_no_marked_product(model, input_ids=TOKENS, labels=TOKENS)
    assert sum(e.recomputed for e in report.entries) == (0 if reentrant is None else 2 * 8)
    assert {e.precision for e in report.entries if ".layers." in e.module} == {"FP8", "bf16"}
    attention = {e.module for e in report.entries if e.attention}
    assert attention == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert report.fp8_share > 0.9
    report.assert_fp8(["lm_head"])


@pytest.mark.usefixtures("group")
def test_dtensors_multiply_once() -> None:
    """DTensor runs each new op on fake tensors first, to find the shape of its result."""
    mesh, w = init_device_mesh("cpu", (1,)), randn(37, 32, dtype=torch.float32)
    x, w = (distribute_tensor(each, mesh, [Replicate()]) for each in (X, w))
    report = audit_step(nn.Module(), lambda: x @ w.t())
    assert [(e.m, e.n, e.k) for e in report.entries] == [(6, 37, 32)]
    assert report.notes == ()


def test_a_step_is_a_function() -> None:
    model = converted(Model())
    with pytest.raises(TypeError, match=r"^audit_step takes a function .*: got a NoneType$"):
        audit_step(model, model(torch.arange(8)[None]).sum().backward())  # type: ignore[arg-type]
