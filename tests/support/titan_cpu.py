"""torchtitan on a CPU: its debug models, with data of their own, and what has to be patched.

Runs change the state of their process (default backends, seeds, modules of torch), so tests start
them on processes of their own: ``tests.support.ranks.run``.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from blocktensor.patches import SET_TIMEOUT

Losses = list[tuple[float, float]]
"""Loss and norm of the gradient of every step."""

MODELS = {
    "llama3": {"wqkv", "wo", "w1", "w2", "w3"},
    "deepseek_v3": {"wq", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3", "inner_experts"},
}
"""The linears that are in FP8."""


def skip_without_torchtitan() -> None:
    """Skip a module of tests where torchtitan 0.3 is not installed, or torch is too old for it."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed (Python 3.11 or later)")
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        pytest.skip("torchtitan 0.3 needs torch 2.13", allow_module_level=True)


def patch_torchtitan() -> None:
    """Let torchtitan 0.3.0 run on a CPU, with torch 2.13.

    It takes "cuda" for the device where there is none, and asks the device's module for memory and
    names, which ``torch.cpu`` lacks. FSDP2 multiplies gradients by one while it reduces them, which
    gloo cannot. It passes microbatches to pipeline schedules, which torch 2.13's take whole.
    """
    import torchtitan.tools.utils as utils

    if isinstance(utils.device_module, types.SimpleNamespace):
        return
    assert "torchtitan.trainer" not in sys.modules, "import torchtitan's trainer after the patch"
    device = types.SimpleNamespace(
        set_device=lambda device: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**34, name="cpu"),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )
    utils.device_type, utils.device_module = "cpu", device  # type: ignore[assignment]
    with warnings.catch_warnings():  # of what torchtitan imports
        warnings.simplefilter("ignore")
        import torchtitan.distributed.fsdp as fsdp
        import torchtitan.models.deepseek_v3.config_registry
        import torchtitan.models.llama3.config_registry  # noqa: F401
        import torchtitan.trainer as trainer

        import blocktensor.integrations.torchtitan  # noqa: F401

    if not hasattr(torch.distributed, "set_timeout"):
        SET_TIMEOUT.apply()  # for runs in high precision, too
    trainer.time = types.SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)

    def without_division(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = without_division
    if "arg_mbs" not in inspect.signature(schedules.PipelineScheduleSingle.step).parameters:
        for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            schedule.step = _of_microbatches(schedule.step)  # type: ignore[method-assign]


def _of_microbatches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``step`` of a pipeline schedule take microbatches, as torch after 2.13 does."""

    def of_microbatches(self: Any, *args: Any, **options: Any) -> Any:
        if "arg_mbs" not in options:  # a call that is not torchtitan's
            return step(self, *args, **options)
        given = options.pop("arg_mbs"), options.pop("kwarg_mbs")
        self._split_inputs = lambda args, kwargs: given
        targets = options.pop("target_mbs")
        return step(self, target=None if targets is None else torch.cat(targets), **options)

    return of_microbatches


class _Unread(types.ModuleType):
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def start() -> None:
    """What torchtitan expects of its launcher, and no warnings; for processes of their own.

    The variable would tell other libraries that theirs has started this process. The modules take
    seconds to import, and no run reads them.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    for name in ("datasets", "datasets.distributed"):
        sys.modules[name] = _Unread(name)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def debug_config(model: str, folder: str, steps: int) -> Any:
    """A short run of a debug model of torchtitan, "llama3" or "deepseek_v3", on made-up text.

    It has two layers. Attention is SDPA, because a CPU compiles FlexAttention for a minute.
    ``folder``: where checkpoints go.
    """
    patch_torchtitan()
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = {"llama3": llama3_debugmodel, "deepseek_v3": deepseek_v3_debugmodel}[model]()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for _, _, parent, attribute in config.model_spec.model.traverse(FlexAttention.Config):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    data, tokenizer = made_up_data()
    config.dataloader, config.tokenizer = data.Config(), tokenizer.Config()
    training = config.training
    training.steps, training.local_batch_size, training.seq_len = steps, 2, 64
    training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.lr_scheduler.warmup_steps = 0
    config.metrics.log_freq = 1
    config.debug.seed = 0
    config.dump_folder = folder
    return config


def in_fp8(config: Any, **options: Any) -> Any:
    """The run in blockwise FP8, with small layers too."""
    from blocktensor.integrations.torchtitan import with_blockwise_fp8

    return with_blockwise_fp8(config, **{"skip_small": False, **options})


def train(config: Any, look: Callable[[Any], Any] | None = None) -> tuple[Losses, Any]:
    """Train; what each step logged, and what ``look`` finds in the trainer afterwards."""
    patch_torchtitan()
    from torchtitan.components import metrics

    logged: Losses = []

    class Logged(metrics.MetricsProcessor):
        def log(self, step: int, loss: float, *rest: Any, **others: Any) -> None:
            logged.append((loss, rest[1]))

    trainer = config.build()
    trainer.metrics_processor.__class__ = Logged
    try:
        trainer.train()
        return logged, None if look is None else look(trainer)
    finally:
        trainer.close()


def compiled(config: Any) -> Any:
    config.compile.enable, config.compile.backend = True, "aot_eager"
    config.compile.components = ["model"]
    return config


def parallel(config: Any, **degrees: Any) -> Any:
    for name, value in degrees.items():
        setattr(config.parallelism, name, value)
    return config


def saved(config: Any, folder: str, steps: int) -> Any:
    """With a checkpoint after every second step, of a schedule that ends after four."""
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.dump_folder, config.training.steps = folder, steps
    config.lr_scheduler.total_steps = 4
    return config


def error_of(config: Any) -> str:
    try:
        train(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def one_step(trainer: Any) -> None:
    """Forward and backward of the batches of a step, without an update."""
    batches, pipelined = iter(trainer.dataloader), trainer.parallel_dims.pp_enabled
    microbatches = trainer.num_pipeline_parallel_microbatches
    for _ in range(trainer.gradient_accumulation_steps):
        inputs, labels = zip(*(next(batches) for _ in range(microbatches)), strict=True)
        tokens = torch.tensor(sum(each.numel() for each in labels))
        trainer.forward_backward_step(
            input_dict=list(inputs) if pipelined else inputs[0],
            labels=list(labels) if pipelined else labels[0],
            global_valid_tokens=tokens * trainer.gradient_accumulation_steps,
        )


Products = Counter[tuple[str, str, str]]


def audited(trainer: Any) -> Products:
    """Kinds of modules, products and precisions of one more forward and backward."""
    from blocktensor import audit_step

    report = audit_step(nn.ModuleList(trainer.model_parts), lambda: one_step(trainer))
    return Counter(
        (x.module.rpartition(".")[2], x.kind, x.reason or x.precision)
        for x in report.entries
        if not (x.attention or x.recomputed)
    )


def assert_close(got: Losses, want: Losses, steps: int) -> None:
    """Losses and norms of gradients that differ, by less than 1%."""
    assert len(got) == len(want) == steps
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)
        assert ours != theirs


def assert_all_in_fp8(products: Products, linears: set[str]) -> None:
    """All three products of each of ``linears`` ran in FP8, and the head's did not."""
    assert {name for name, _, precision in products if precision == "FP8"} == linears
    for name in linears:
        of_it = {(kind, precision): n for (x, kind, precision), n in products.items() if x == name}
        assert of_it.keys() == {(kind, "FP8") for kind in ("fprop", "dgrad", "wgrad")}
        assert len(set(of_it.values())) == 1


def made_up_data() -> tuple[Any, Any]:
    """A data loader and a tokenizer for torchtitan that read no files."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Counting(BaseDataLoader):
        """Sequences that count up by seven, with noise."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **run: Any) -> None:
            self.shape = run["local_batch_size"], run["seq_len"] + 1
            self.rank, self.batches = run["dp_rank"], 0

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            rows, tokens = self.shape
            while True:
                drawn = torch.Generator().manual_seed(1000 * self.batches + self.rank)
                self.batches += 1
                first = torch.randint(0, 64, (rows, 1), generator=drawn)
                noise = torch.randint(0, 3, self.shape, generator=drawn)
                text = (3 * first + 7 * torch.arange(tokens) + noise) % 512
                positions = torch.arange(tokens - 1).repeat(rows, 1)
                yield {"input": text[:, :-1].clone(), "positions": positions}, text[:, 1:].clone()

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **run: Any) -> None:
            super().__init__()

        def get_vocab_size(self) -> int:
            return 2048

        encode = decode = None  # nothing calls them

    return Counting, NoTokenizer
