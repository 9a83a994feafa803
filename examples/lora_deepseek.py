"""LoRA on a published FP8 checkpoint with the layers of DeepSeek-V3. See ``--help``.

The script writes random weights as DeepSeek's files have them, unless ``--folder`` names real ones.
Each rank reads its part of them into a frozen FP8 base; adapters on attention and experts train.
It runs in one process, or with torchrun. FSDP2 then cuts all layers; with ``--ep`` it leaves the
experts out, and each rank holds some of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common.host_memory import HostMemory
from common.needs import needs

NEEDED = ("accelerate", "blocktensor", "peft", "safetensors", "transformers")
with needs(*NEEDED, install="'.[checkpoint,frameworks]'"):
    from accelerate import init_empty_weights  # type: ignore[import-untyped,unused-ignore]
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

    import blocktensor
    from common.published_files import INDEX, write_published

ATTENTION = ["q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# peft takes layers of shared experts for experts, and has no adapters for them
TINY: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512},
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 64, "qk_nope_head_dim": 64},
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
}


def shape(options: argparse.Namespace) -> Any:
    """DeepSeek-V3's shape with fewer layers and experts; the first 3 of its 61 layers are dense."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": options.layers,
        "n_routed_experts": options.experts,
        "first_k_dense_replace": min(3, options.layers // 4),
        "num_nextn_predict_layers": 0,
    }
    return DeepseekV3Config(**sizes, **(TINY if options.tiny else {}))


def empty(config: Any, device: torch.device) -> Any:
    """A model whose parameters have no memory; buffers, of RoPE and of routers, have values."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    for x in model.buffers():
        x.data = x.data.to(device)
    return model


def cut_experts(model: Any, mesh: DeviceMesh) -> None:
    """Give each rank some experts of each layer, to which transformers sends tokens."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("all", "alone"))
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh, alone["alone"], plan, ep_implementation="all_to_all")


def give_values(model: nn.Module, device: torch.device) -> None:
    """Give adapters on meta the values that peft gives, equal ones on all ranks."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                weight: Any = part.weight
                values = torch.zeros(weight.shape, device=device)
                if part in layer.lora_A.values():
                    nn.init.kaiming_uniform_(values, a=5**0.5)
                if isinstance(weight, DTensor):  # of experts that are cut
                    place = weight.device_mesh, weight.placements
                    values = distribute_tensor(values, *place, src_data_rank=None)
                part.weight = nn.Parameter(values)


def build(config: Any, folder: Path, options: argparse.Namespace, device: torch.device) -> Any:
    """Return peft's model on a base of which this rank has read its part."""
    base = empty(config, device)
    blocktensor.convert(base, skip_small=False)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh(device.type, (ranks,)) if ranks > 1 else None
    if options.ep and mesh is not None:
        cut_experts(base, mesh)
    lora = LoraConfig(r=options.rank, target_modules=ATTENTION, target_parameters=STACKS)
    model = get_peft_model(base, lora)
    give_values(model, device)
    if mesh is not None:
        of_experts: Any = {x for x in base.parameters() if isinstance(x, DTensor)}
        for x in of_experts:
            if x.requires_grad:  # gradients of the tokens of all ranks; FSDP2 computes means
                x.register_hook(lambda grad: grad / ranks)
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=of_experts)
        fully_shard(base, mesh=mesh, ignored_params=of_experts)
    stored = AutoConfig.from_pretrained(folder).num_hidden_layers
    is_whole = config.num_hidden_layers == stored
    blocktensor.load_fp8(base, folder, device=device, strict=is_whole)
    if options.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def train(model: Any, vocab: int, options: argparse.Namespace, device: torch.device) -> Any:
    """AdamW on random tokens, other ones on each rank; the losses and the seconds of each step."""
    generator = torch.Generator(device).manual_seed(rank())
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=True)
    losses, seconds = [], []
    for step in range(options.steps):
        start = time.perf_counter()
        size = (options.batch, options.seq)
        tokens = torch.randint(vocab, size, device=device, generator=generator)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        say(f"step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s")
    return losses, seconds


def prefer(model: Any, options: argparse.Namespace) -> list[float]:
    """DPO with trl, whose reference is the base without its adapters; the losses."""
    with needs("datasets", "trl", install="datasets trl"):
        from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from transformers import AutoTokenizer, ByT5Tokenizer
        from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined,import-not-found,unused-ignore]

    tokenizer: Any
    if options.folder:
        tokenizer = AutoTokenizer.from_pretrained(options.folder)
    else:
        tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes: it needs no files
    config = DPOConfig(
        str(options.out / "dpo"), max_steps=options.steps, learning_rate=options.lr,
        lr_scheduler_type="constant", per_device_train_batch_size=options.batch,
        max_length=options.seq, use_cpu=options.device.type == "cpu", bf16=False,
        gradient_checkpointing=options.checkpointing, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    pair = {"prompt": "Blocks of", "chosen": " 128", "rejected": " 127"}
    data = Dataset.from_list([pair] * options.batch)
    trainer = DPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def save(model: Any, folder: Path) -> None:
    """Write the adapters as peft does; a folder of this name is whole."""
    state = {}
    for name, x in model.named_parameters():
        if x.requires_grad:
            state[name] = (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()
    if rank() == 0:
        part = folder.with_name(f"{folder.name}.part")
        model.save_pretrained(part, state_dict=state)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def say(text: str) -> None:
    """Print on the first rank."""
    if rank() == 0:
        print(text, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--folder", type=Path, help="a published checkpoint, in place of random weights")
    add("--tiny", action="store_true", help="a narrow model, for a CPU")
    add("--layers", type=int, help="of the model (default: 4, or all of --folder)")
    add("--experts", type=int, help="of a layer (default: 64, or 8 with --tiny)")
    add("--ep", action="store_true", help="cut the experts between ranks, without FSDP2")
    add("--rank", type=int, default=8, help="of the adapters")
    add("--dpo", action="store_true", help="train by trl's DPO, in one process")
    add("--steps", type=int, default=8)
    add("--batch", type=int, default=1, help="sequences of a rank and step")
    add("--seq", type=int, help="tokens of a sequence (default: 4096, or 32 with --tiny)")
    add("--lr", type=float, default=1e-4)
    add(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute the activations of each layer (default: yes)",
    )
    add("--device", type=torch.device, default=torch.device(device))
    add("--out", type=Path, default=Path("runs/lora_deepseek"))
    options = parser.parse_args(argv)
    options.experts = options.experts or (8 if options.tiny else 64)
    options.seq = options.seq or (32 if options.tiny else 4096)
    if options.layers is None and not options.folder:
        options.layers = 4
    for flag in ("layers", "rank", "steps", "batch"):
        if getattr(options, flag) is not None and getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1, got {getattr(options, flag)}")
    if options.dpo and "RANK" in os.environ:
        parser.error("--dpo runs in one process: start it with python, not with torchrun")
    if "RANK" in os.environ:
        if options.device.type == "cuda":
            options.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(options.device)
        dist.init_process_group("nccl" if options.device.type == "cuda" else "gloo")
    return options


def checkpoint(options: argparse.Namespace) -> tuple[Any, Path]:
    """Return the config and the folder of a checkpoint; write a random one unless it is there."""
    if options.folder:
        config = AutoConfig.from_pretrained(options.folder)
        config.num_hidden_layers = options.layers or config.num_hidden_layers
        return config, options.folder
    width = "tiny" if options.tiny else "full"
    folder = options.out / f"{width}-{options.layers}x{options.experts}"
    if rank() == 0 and not (folder / INDEX).exists():
        start = time.perf_counter()
        write_published(empty(shape(options), options.device), folder, options.device)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        say(f"{size:,.1f} MB of random weights written in {time.perf_counter() - start:.1f} s")
    if dist.is_initialized():
        dist.barrier()
    return shape(options), folder


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint, train adapters, save them; report speed and memory."""
    options = parse(argv)
    if options.ep:  # before anything is written
        with needs("transformers", install="'transformers>=5.23'"):
            importlib.import_module("transformers.distributed.expert_parallel")
    device, is_gpu = options.device, options.device.type == "cuda"
    config, folder = checkpoint(options)
    start = time.perf_counter()
    with HostMemory() as host:
        model = build(config, folder, options, device)
    result: dict[str, Any] = {
        "seconds_to_load": time.perf_counter() - start,
        "host_bytes_to_load": host.peak_bytes,
        "adapter_parameters": sum(x.numel() for x in model.parameters() if x.requires_grad),
    }
    if is_gpu:
        result["bytes_loaded"] = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    say(f"loaded: {result}")
    if options.dpo:
        result["losses"] = prefer(model, options)
    else:
        result["losses"], seconds = train(model, config.vocab_size, options, device)
        result["step_seconds"] = median(seconds[len(seconds) // 2 :])
        result["tokens_per_second"] = options.batch * options.seq / result["step_seconds"]
    if is_gpu:
        result["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    save(model, options.out / "adapters")
    say(f"of each rank: {json.dumps(result, indent=1)}")
    if rank() == 0:
        (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if dist.is_initialized() and "RANK" in os.environ:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
