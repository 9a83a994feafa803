"""Adapters of peft on stacks of FP8 experts: ``target_parameters``."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    convert,
    freeze,
    fuse,
    to_blockwise_fp8_weights,
    unfreeze,
)
from blocktensor.autograd import any_linear
from blocktensor.patches import EXPERT_ADAPTERS
from blocktensor.tensor.adapted import AdaptedWeight, LowRank
from tests.support.asserts import assert_no_marked_product
from tests.support.compiling import fresh, graphs, instantiates, reads_grad
from tests.support.groups import ranges
from tests.support.models import FP8_TYPES
from tests.support.moe_models import TOKENS, transformers_moe
from tests.support.ranks import on_ranks

KINDS = ("qwen3", "mixtral", "deepseek", "glm4", "gpt_oss", "llama4")
every_kind = pytest.mark.parametrize("kind", KINDS)
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def base(
    kind: str = "qwen3", frozen: bool = True, implementation: str = "grouped_mm", **options: Any
) -> nn.Module:
    """A model of the same values whenever it is made, all its linear layers and experts in FP8."""
    torch.manual_seed(0)
    model: nn.Module = transformers_moe(kind, implementation, **options).bfloat16()
    convert(model.requires_grad_(not frozen), skip_small=False)
    return model


def adapted(model: nn.Module, **options: Any) -> PeftModel:
    """Adapters on the stacks, of the same random values whenever they are made."""
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": [], "target_parameters": STACKS, **options}
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))


def dequantized(model: nn.Module) -> nn.Module:
    """The same values in bf16."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, FP8_TYPES):
                module._parameters[name] = nn.Parameter(p.dequantize().detach().contiguous())
    return plain


def loss_of(model: Any) -> Tensor:
    tokens = TOKENS.to(next(model.parameters()).device)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def results(model: Any, run: Any = None) -> list[Tensor]:
    """The loss and the gradients of all that is trained."""
    model.zero_grad()
    loss = loss_of(model if run is None else run)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def assert_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def peft_alone() -> AbstractContextManager[Any]:
    """Run peft without the patch, as if it were imported after the model was converted."""
    assert EXPERT_ADAPTERS.apply()
    theirs = ParamWrapper._activate_lora.__wrapped__
    return mock.patch.object(ParamWrapper, "_activate_lora", theirs)


def of_the_sum(y: Tensor, x: Tensor, term: LowRank, offs: Tensor | None) -> Tensor:
    """Add ``x (s b a)ᵀ`` in fp32, of the product that no forward computes."""
    product = term.b.float() @ term.a.float() * term.scaling
    if offs is None:
        return (y.float() + x.float() @ product.t()).to(y.dtype)
    parts = [x[r].float() @ product[e].t() for e, r in enumerate(ranges(offs))]
    rest = y[int(offs[-1]) :].float() * 0
    return (y.float() + torch.cat([*parts, rest])).to(y.dtype)


@every_kind
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "with masters"])
def test_gradients_are_those_of_the_sum(
    kind: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of thin matrices in bf16, after which FP8 may round another way."""
    model = adapted(base(kind, frozen))
    got = results(model)
    monkeypatch.setattr(any_linear, "adapted_linear", lambda *_: None)
    monkeypatch.setattr(any_linear, "plus_low_rank", of_the_sum)
    want = results(model)
    assert len(got) >= 5
    assert max(map(relative, got, want)) < 0.1
    assert sum(map(relative, got, want)) / len(got) < 0.04


@every_kind
def test_a_forward_multiplies_by_what_would_be_merged(kind: str) -> None:
    wrappers = [x for x in adapted(base(kind)).modules() if isinstance(x, ParamWrapper)]
    assert len(wrappers) in (2, 4)
    for wrapper in wrappers:
        module, name = wrapper.get_base_layer(), wrapper.parameter_name
        values, delta = (
            wrapper.get_param().dequantize(torch.float32),
            wrapper.get_delta_weight("default").float(),  # rounded to bf16
        )
        with wrapper._activate_lora(["default"]):
            got = getattr(module, name).dequantize(torch.float32) - values
        assert relative(got, delta) < 2**-7


@every_kind
def test_adapters_are_named_and_begin_as_on_a_base_in_bf16(kind: str) -> None:
    model = base(kind)
    plain, made = adapted(dequantized(model)), adapted(model)
    wanted = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    assert len(wanted) >= 4
    assert [name for name, p in made.named_parameters() if p.requires_grad] == [*wanted]
    for name, p in wanted.items():
        assert p.dtype == torch.float32
        assert torch.equal(p, made.get_parameter(name))
    with torch.no_grad():
        assert abs(loss_of(made) - loss_of(plain)) < 0.02


@every_kind
def test_stacks_stay_in_fp8_and_adapters_train(kind: str) -> None:
    model = adapted(base(kind))
    bytes_before = [p.rowwise().data.clone() for p in model.parameters() if p.ndim == 3]
    assert_no_marked_product(model, input_ids=TOKENS, labels=TOKENS)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        losses.append(results(model)[0])
        optimizer.step()
    assert losses[-1] < losses[0]
    stacks = [p for p in model.parameters() if p.ndim == 3]
    assert len(stacks) in (2, 4)
    for stack, before in zip(stacks, bytes_before, strict=True):
        assert isinstance(stack, BlockwiseFP8Tensor)
        assert torch.equal(stack.rowwise().data.view(torch.uint8), before.view(torch.uint8))


class NoLargeTensors(TorchDispatchMode):
    """Refuses ops that make a tensor of some bytes or more, except in FP8.

    The transposed bytes of a stack are made by backwards without adapters too.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        views = {x.untyped_storage()._cdata for x in tree_leaves(args) if type(x) is Tensor}
        for x in tree_leaves(made):
            is_new = type(x) is Tensor and x.untyped_storage()._cdata not in views
            if is_new and x.itemsize > 1 and x.untyped_storage().nbytes() >= self.limit:
                raise MemoryError(f"{func} makes {x.dtype} {list(x.shape)}")
        return made


@pytest.mark.parametrize("adapters", [1, 2])
def test_nothing_of_the_size_of_a_stack_is_allocated(adapters: int) -> None:
    """The smallest stack in bf16 is larger than all that a training step allocates."""
    model = adapted(_many_experts())
    if adapters == 2:
        _with_second(model)
    smallest = min(2 * p.numel() for p in model.parameters() if p.ndim == 3)
    with NoLargeTensors(smallest):
        results(model)
    with peft_alone(), NoLargeTensors(smallest):
        if adapters == 2:  # peft adds their products
            with pytest.raises(MemoryError):
                results(model)
        with pytest.raises(MemoryError):
            loss_of(adapted(dequantized(model.unload())))


def _many_experts() -> nn.Module:
    """A model whose stacks are larger than its activations, head and attention."""
    torch.manual_seed(0)
    model: nn.Module = transformers_moe("qwen3", num_experts=64).bfloat16()
    convert(model.requires_grad_(False), skip_small=False)
    return model


def _with_second(model: PeftModel) -> None:
    """Add an adapter of another rank and scaling, and let both act."""
    torch.manual_seed(2)
    options: dict[str, Any] = {"target_modules": [], "target_parameters": STACKS}
    config = LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **options)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])


def test_a_late_import_of_peft_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One adapter runs as thin matmuls without the patch too: peft adds it by ``baddbmm``.

    The gradients of A and B pass through peft's conversion to bf16.
    """
    model = adapted(base())
    want = results(model)
    made: list[Any] = []
    register = nn.utils.parametrize.register_parametrization

    def watched(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return register(*args, **kwargs)

    monkeypatch.setattr(nn.utils.parametrize, "register_parametrization", watched)
    with peft_alone():
        got = results(model)
    assert torch.equal(got[0], want[0])
    assert max(map(relative, got, want)) < 2**-8
    assert len(made) == 4


def test_several_adapters_and_none() -> None:
    model = adapted(base())
    one = results(model)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(base()))
    _with_second(model)
    both = results(model)
    assert len(both) == 1 + 2 * (len(one) - 1)
    assert not torch.equal(both[0], one[0])
    model.base_model.set_adapter("second")
    only = results(model)
    model.base_model.set_adapter("default")
    assert_bits(results(model), one)
    assert len({float(x[0]) for x in (one, both, only)}) == 3


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_parameters_are_in_their_places_after_a_forward(implementation: str) -> None:
    model = adapted(base(implementation=implementation))
    held = dict(model.named_parameters())
    wrapper = next(x for x in model.modules() if isinstance(x, ParamWrapper))
    assert results(model)[0].isfinite()
    with suppress(KeyError), wrapper._activate_lora(["default"]):
        assert isinstance(getattr(wrapper.get_base_layer(), wrapper.parameter_name), AdaptedWeight)
        raise KeyError
    now = dict(model.named_parameters())
    assert now.keys() == held.keys()
    assert all(now[name] is held[name] for name in held)


def test_experts_one_by_one_compute_nearly_the_same() -> None:
    """Groups add the adapter before they round, single matrices after; then FP8 rounds."""
    got, want = (results(adapted(base(implementation=x))) for x in ("eager", "grouped_mm"))
    assert max(map(relative, got, want)) < 0.1
    assert sum(map(relative, got, want)) / len(got) < 0.04


def test_fused_experts_and_checkpointing_compute_the_same() -> None:
    want = results(adapted(base()))
    model = base()
    report = fuse(model)
    assert any("Experts" in str(row) for row in str(report).splitlines())
    assert_bits(results(adapted(model)), want)
    for reentrant in (False, True):
        model = adapted(base()).train()
        model.enable_input_require_grads()
        how = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        assert_bits(results(model), want)


def test_under_autocast() -> None:
    """A base that advertises fp32: matmuls and adapters compute in bf16."""
    torch.manual_seed(0)
    model = transformers_moe("qwen3").requires_grad_(False)
    convert(model, skip_small=False)
    plain, made = adapted(dequantized(model)), adapted(model)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = results(made), results(plain)
    assert max(map(relative, got, want)) < 0.35


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_model_has_one_graph_and_the_same_bits() -> None:
    with fresh():
        model = adapted(base())
        _with_second(model)
        want = results(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert_bits(results(model, compiled), want)
        assert graphs() == 1


class BreakingSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return nn.functional.silu(x)


@pytest.mark.slow
@instantiates
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@reads_grad
@pytest.mark.parametrize("inner", [False, True], ids=["a break in the experts", "experts alone"])
def test_gradients_pass_between_graphs(inner: bool) -> None:
    """The adapted stack is an input of the graph of the experts, and must not be an output."""
    with fresh():
        model = adapted(base(num_hidden_layers=1))
        want = results(model)
        compiled = "Qwen3MoeExperts" if inner else "Qwen3MoeSparseMoeBlock"
        for module in model.modules():
            if type(module).__name__ == "Qwen3MoeExperts":
                module.act_fn = BreakingSiLU()
            if type(module).__name__ == compiled:
                module.compile(backend="aot_eager")
        for _ in range(2):
            assert_bits(results(model), want)
        assert counters["graph_break"]


@pytest.mark.slow
@instantiates
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@reads_grad
def test_experts_one_by_one_run_between_graphs() -> None:
    with fresh():
        model = adapted(base(implementation="eager", num_hidden_layers=1))
        want = results(model)
        assert_bits(results(model, torch.compile(model, backend="aot_eager")), want)
        assert counters["graph_break"]


@pytest.mark.slow
@instantiates
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@reads_grad
def test_compiling_after_a_late_import_of_peft_says_what_to_import() -> None:
    """Peft's parametrization breaks the graph between the adapted stack and its matmul."""
    converted = base(num_hidden_layers=1)
    with fresh(), peft_alone():
        model = adapted(converted)
        with pytest.raises(RuntimeError, match=r"import blocktensor\.integrations\.peft"):
            results(model, torch.compile(model, backend="aot_eager"))


@instantiates
def test_adapters_of_ones_own_in_a_graph() -> None:
    """They are no result of a graph, and torch compiles no grouped matmul in fp32."""
    with fresh():
        w = BlockwiseFP8Tensor.from_values(torch.randn(3, 256, 128), (128, 128))
        shapes = (6, 128), (3, 256, 8), (3, 8, 128)
        fp32 = [torch.randn(*shape, requires_grad=True) for shape in shapes]
        offs = torch.tensor([2, 2, 6], dtype=torch.int32)

        def run(w: Tensor, x: Tensor, b: Tensor, a: Tensor) -> Tensor:
            return nn.functional.grouped_mm(x, torch.baddbmm(w, b, a).mT, offs=offs)

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        remedy = "convert the model to bf16, or run it under"  # before 2.13 torch alone speaks
        expected = "Expected inputs of BF16" if torch.__version__ < (2, 13) else remedy
        with pytest.raises(RuntimeError, match=expected):
            compiled(w, *fp32)
        w, *inputs = w.bfloat16(), *(x.detach().bfloat16().requires_grad_() for x in fp32)
        got, want = (
            list(torch.autograd.grad(each(w, *inputs).sum(), inputs)) for each in (compiled, run)
        )
        assert_bits(got, want)
        with pytest.raises(RuntimeError, match="compile its matmuls in the same graph"):
            torch.compile(torch.baddbmm, backend="aot_eager")(w, *inputs[1:])


@pytest.mark.parametrize("safe", [False, True])
def test_merging(safe: bool) -> None:
    model = adapted(base()).eval()
    wrappers = {x.parameter_name: x for x in model.modules() if isinstance(x, ParamWrapper)}
    with torch.no_grad():
        before = loss_of(model)
        exact = {
            name: x.get_param().dequantize(torch.float32) + x.get_delta_weight("default").float()
            for name, x in wrappers.items()
        }
        with pytest.raises(NotImplementedError, match=r"merge an adapter.* blocktensor\.unfreeze"):
            model.merge_adapter(safe_merge=safe)
        assert torch.equal(loss_of(model), before)
        unfreeze(model)
        assert abs(loss_of(model) - before) < 0.005  # adds the adapter to the rounded output
        kept = {name: x.get_param().master.clone() for name, x in wrappers.items()}
        model.merge_adapter(safe_merge=safe)
        for name, x in wrappers.items():
            assert isinstance(x.get_param(), BlockwiseFP8Weight)
            assert relative(x.get_param().master, exact[name]) < 2**-8
        assert abs(loss_of(model) - before) < 0.05
        model.unmerge_adapter()
        for name, x in wrappers.items():
            assert relative(x.get_param().master, kept[name]) < 2**-6
        merged = model.merge_and_unload(safe_merge=safe)
    assert not any(isinstance(x, ParamWrapper) for x in merged.modules())
    assert freeze(merged)
    with torch.no_grad():
        assert abs(loss_of(merged) - before) < 0.05


def test_adapters_are_stored_as_those_of_other_bases(tmp_path: Path) -> None:
    model = base()
    stored = []
    for folder, each in (("fp8", model), ("bf16", dequantized(model))):
        made = adapted(each)
        made.save_pretrained(tmp_path / folder)
        stored.append(load_file(tmp_path / folder / "adapter_model.safetensors"))
    fp8, bf16 = stored
    assert fp8.keys() == bf16.keys()
    for name, x in fp8.items():
        assert x.dtype == bf16[name].dtype
        assert torch.equal(x, bf16[name])
    want = results(adapted(base()))
    loaded = PeftModel.from_pretrained(base(), tmp_path / "bf16", is_trainable=True)
    assert_bits(results(loaded), want)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_names_of_single_experts_become_parameters_of_stacks() -> None:
    """Peft translates the linear layers of transformers 4, and doubles the rank of gate and up."""
    modules = ["gate_proj", "up_proj", "down_proj"]
    model = adapted(base(), target_modules=modules, target_parameters=None)
    ranks = {
        x.parameter_name: x.r["default"] for x in model.modules() if isinstance(x, ParamWrapper)
    }
    assert ranks == {"gate_up_proj": 8, "down_proj": 4}
    assert results(model)[0].isfinite()


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}]
)
def test_peft_refuses_what_has_no_thin_form(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not work with"):
        adapted(base(), **options)


def test_a_copy_of_single_experts_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="experts_implementation='grouped_mm'"):
        loss_of(adapted(base(implementation="batched_mm")))


def test_a_conversion_leaves_adapters_of_stacks_alone() -> None:
    torch.manual_seed(0)
    model = adapted(transformers_moe("qwen3").bfloat16())
    report = convert(model, skip_small=False)
    assert "adapter of peft: stays in high precision" in str(report)
    assert_bits(results(model), results(adapted(base())))


def test_adapters_in_fp8_are_refused() -> None:
    model = adapted(base())
    model.apply(to_blockwise_fp8_weights)
    with pytest.raises(NotImplementedError, match="convert the model before get_peft_model"):
        loss_of(model)


@on_ranks(2, gpus=[2])
def test_sharded_by_fsdp2_as_in_one_process(mesh: DeviceMesh, device: str) -> None:
    """FSDP2 gathers the stacks in FP8 and the adapters in high precision, around the wrappers."""
    model = adapted(base()).to(device)
    want = results(model)
    sharded = adapted(base()).to(device)
    for layer in sharded.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    loss = loss_of(sharded)
    loss.backward()
    got = [p.grad.full_tensor() for p in sharded.parameters() if p.requires_grad]
    assert_bits([loss.detach(), *got], want)
