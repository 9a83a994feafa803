"""Train a model of torchtitan in bf16 and in FP8, one after the other. See ``--help``."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.needs import needs

with needs("rich", "blocktensor", "torchtitan", install="'.[demo,torchtitan]'"):
    import torchtitan  # noqa: F401
    from rich.console import Console
    from rich.table import Table

    from blocktensor.integrations.torchtitan import with_blockwise_fp8
    from common.text import load_corpus

DESCRIPTION = """\
Train a model of torchtitan 0.3.0 in bf16 and in FP8, from the same seeds, on the Python sources of
the standard library, and compare losses, speed and memory. Weights are random, downloads none.
The ranks of torchrun share every layer (tensor parallel) or, with --cp, every sequence (context
parallel).
"""

EPILOG = """\
examples:
  python examples/torchtitan_fp8.py                                      llama3's debug model
  python examples/torchtitan_fp8.py --model llama3_8b --layers 8 --compile
  python examples/torchtitan_fp8.py --model deepseek_v3_16b --layers 4
  torchrun --nproc-per-node 2 examples/torchtitan_fp8.py --model llama3_8b --layers 8 --compile
  torchrun --nproc-per-node 2 examples/torchtitan_fp8.py --model llama3_8b --layers 8 --cp 2
"""

MODELS = ("llama3_debugmodel", "llama3_8b", "deepseek_v3_debugmodel", "deepseek_v3_16b")
VARIANTS: dict[str, dict[str, Any] | None] = {"bf16": None, "fp8": {}, "fp8, fused": {"fuse": True}}
BYTES = 256

Logged = list[tuple[float, float]]
"""Loss and norm of the gradient of every step."""


def environment() -> None:
    """Set the variables that torchtitan expects from its launcher, unless torchrun has."""
    from torchtitan.tools.utils import device_type

    if device_type == "cuda" and not torch.cuda.is_available():
        sys.exit("torchtitan_fp8.py needs a GPU: torchtitan does not run without one")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan calls it; torch 2.13 lacks it
        set_timeout: Any = torch.distributed.distributed_c10d._set_pg_timeout
        torch.distributed.set_timeout = set_timeout  # type: ignore[attr-defined]


def data() -> tuple[Any, Any]:
    """A data loader and a tokenizer for torchtitan: bytes of the corpus, the same in every run."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    corpus = load_corpus().train.long()

    class Sources(BaseDataLoader):
        """Random pieces of the corpus."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            """No options."""

        def __init__(self, config: Config, **run: Any) -> None:
            self.shape, self.batches = (run["local_batch_size"], run["seq_len"]), 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            rows, tokens = self.shape
            while True:
                drawn = torch.Generator().manual_seed(self.batches)
                self.batches += 1
                first = torch.randint(len(corpus) - tokens, (rows, 1), generator=drawn)
                text = corpus[first + torch.arange(tokens + 1)]
                positions = torch.arange(tokens).repeat(rows, 1)
                yield {"input": text[:, :-1].clone(), "positions": positions}, text[:, 1:].clone()

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    class Bytes(BaseTokenizer):
        """No text is written or read: the data loader gives bytes."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            """No options."""

        def __init__(self, config: Config, **run: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return BYTES

    return Sources, Bytes


def configured(options: argparse.Namespace, fp8: dict[str, Any] | None) -> Any:
    """The run of torchtitan; ``fp8``: the options of its FP8, None for bf16."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    if options.model.startswith("llama3"):
        import torchtitan.models.llama3.config_registry as registry
    else:
        import torchtitan.models.deepseek_v3.config_registry as registry
    config = getattr(registry, options.model)()
    model = config.model_spec.model
    model.layers = model.layers[: options.layers]
    for _, _, parent, attribute in model.traverse(FlexAttention.Config):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    sources, tokenizer = data()
    config.dataloader, config.tokenizer = sources.Config(), tokenizer.Config()
    config.training.steps = options.steps
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len = options.batch, options.seq
    config.lr_scheduler.warmup_steps = min(config.lr_scheduler.warmup_steps, options.steps // 4)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.context_parallel_degree = options.cp
    config.parallelism.tensor_parallel_degree = int(os.environ["WORLD_SIZE"]) // options.cp
    config.parallelism.expert_parallel_degree = 1
    config.compile.enable = options.compile
    config.compile.enable_async_tensor_parallel = options.async_tp
    if options.compile and config.parallelism.tensor_parallel_degree > 1:
        config.activation_checkpoint = None  # torch 2.13 compiles none of it there
    config.checkpoint.enable = False
    config.metrics.enable_tensorboard = False
    config.metrics.log_freq = 1
    config.debug.seed = options.seed
    config.profiler.enable_profiling = False
    if hasattr(config, "validator"):
        config.validator.enable = False
    config.dump_folder = str(options.out)
    if fp8 is None:
        return config
    return with_blockwise_fp8(config, skip_small=not options.model.endswith("debugmodel"), **fp8)


def train(config: Any) -> dict[str, Any]:
    """The result of a run."""
    from torchtitan.components.metrics import MetricsProcessor

    logged: Logged = []
    times: list[float] = []

    class Logging(MetricsProcessor):
        def log(self, step: int, loss: float, *rest: Any, **others: Any) -> None:
            logged.append((loss, rest[1]))
            times.append(time.perf_counter())

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = config.build()
    trainer.metrics_processor.__class__ = Logging
    try:
        trainer.train()
    finally:
        trainer.close()
    timed = times[len(times) // 2 - 1 :]
    tokens = config.training.local_batch_size * config.training.seq_len * (len(timed) - 1)
    return {
        "losses": [loss for loss, _ in logged],
        "gradient_norms": [norm for _, norm in logged],
        "tokens_per_second": tokens / (timed[-1] - timed[0]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """The runs, compared."""
    drawn = Table(
        "", "first loss", "last loss", "largest difference", "tokens/s", "over bf16", "peak, GiB"
    )
    bf16 = results["bf16"]
    for name, found in results.items():
        pairs = zip(found["losses"], bf16["losses"], strict=True)
        apart = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        peak = found["peak_bytes"]
        drawn.add_row(
            name,
            *(f"{found['losses'][i]:.4f}" for i in (0, -1)),
            f"{apart:.2%}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['tokens_per_second'] / bf16['tokens_per_second']:.2f}x",
            "–" if peak is None else f"{peak / 2**30:.1f}",
        )
    return drawn


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="torchtitan_fp8.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default=MODELS[0], help="a config of torchtitan")
    add("--layers", type=int, help="how many of the model's layers (default: all)")
    add("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    add("--batch", type=int, default=1, help="sequences of a step (default: 1)")
    add("--seq", type=int, default=8192, help="tokens of a sequence (default: 8192)")
    add("--compile", action="store_true", help="compile every block")
    add("--cp", type=int, default=1, help="ranks that share every sequence (default: 1)")
    add("--async-tp", action="store_true", help="torchtitan's async tensor parallel")
    add("--seed", type=int, default=0, help="decides weights (default: 0)")
    add("--variants", nargs="+", choices=tuple(VARIANTS), help="what runs (default: all that can)")
    add("--out", type=Path, default=Path("runs/torchtitan"), help="folder of result.json")
    options = parser.parse_args(argv)
    if options.steps < 4:
        parser.error(
            f"--steps {options.steps}: expected at least 4, of which the second half is timed"
        )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.cp < 1 or ranks % options.cp:
        parser.error(f"--cp {options.cp}: expected a divisor of the number of ranks, {ranks}")
    if options.async_tp and not options.compile:
        parser.error("--async-tp needs --compile")
    if options.variants is None:  # fuse needs whole modules
        options.variants = [name for name in VARIANTS if ranks == 1 or "fused" not in name]
    if options.variants[0] != "bf16":
        parser.error("--variants must begin with bf16, which the others are compared with")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report, write down."""
    options = parse(argv)
    environment()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    is_first = os.environ["RANK"] == "0"
    for name in options.variants:
        results[name] = train(configured(options, VARIANTS[name]))
        written = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        content = {
            "options": written,
            "torch": torch.__version__,
            "device": device,
            "ranks": int(os.environ["WORLD_SIZE"]),
            "runs": results,
        }
        if is_first:
            (options.out / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    if is_first:
        Console().print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
