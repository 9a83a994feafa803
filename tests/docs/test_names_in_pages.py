"""Names in backticks on pages exist: Python names, files, commands, flags and variables.

A page that names what was renamed or removed fails here.
"""

from __future__ import annotations

import ast
import keyword
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import blocktensor
from tests.docs.code_blocks import FENCE, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("blocktensor", "examples", "benchmarks", "tests", "docs/site")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
CALL = re.compile(r"[A-Za-z_][\w.]*(\(.*\))?")
PATH = re.compile(r"[\w.*/-]+(/|\.(py|md|json|toml|yml|cpp|ipynb))")

FOREIGN_MODULES = ("cp.", "deepspeed.", "gl.", "griddepcontrol.", "te.", "torch.", "wandb.")
"""Names with these beginnings are others'."""

FOREIGN = {
    "torch": """AccumulateGrad DataParallel ScheduleDualPipeV ScheduleGPipe ScheduleInterleaved1F1B
        ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBVZeroBubble Library.define
        TransformerEncoder ZeroRedundancyOptimizer _broadcast_coalesced cudaStreamSynchronize
        src_key_padding_mask""",
    "torchao": """Float8ColwiseParallel Float8LinearConverter Float8RowwiseParallel
        Float8TrainingOpConfig PrepareFloat8ModuleInput _auto_filter_for_recipe pad_inner_dim
        precompute_float8_dynamic_scale_for_fsdp quantize_ roofline_utils.py""",
    "torchtitan": """--override --parallelism LoRAConverter dist_gemm full_dtensor
        fused_swiglu init_weights
        benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md
        benchmarks/llama3_h100_202412_torchtitan.md""",
    "TransformerEngine": """Float8BlockScaling FusedAdam GroupedLinear LayerNormMLP fc1_weight
        is_first_microbatch layer_norm_bias layer_norm_weight quantized_model_init
        pytorch/quantization.py pytorch/tensor/float8_blockwise_tensor.py""",
    "Megatron": """--moe-router-padding-for-fp8 batch_invariant_mode main_grad core/fp8_utils.py
        core/transformer/moe/README.md core/transformer/transformer_config.py
        docs/megatron-lm-to-megatron-bridge.md docs/performance-summary-archive.md
        docs/performance-summary.md docs/source/workflows/training.md
        docs/user-guide/features/megatron_fsdp.md training/arguments.py""",
    "transformers, peft": """DistributedConfig ParamWrapper autocast_adapter_dtype
        base_model_ep_plan config.json disable_adapter
        enable_expert_parallel gate_up_proj_scale_inv label_smoothing_factor load_in_4bit
        shared_expert_gate tie_weights weight_scale""",
    "rollout engines": """--update-weight-buffer-size HTTPVLLMWeightSyncClient NCCLTrainerInitInfo
        VLLMClient WeightSource engine_model gemm_fp8_fp8_bf16_nt get_per_tensor_param init_info
        per_token_group_quant_8bit quant_weights quant_weights_by_name scale_ue8m0
        update_named_params update_weights_bucket_megabytes update_weights_from_distributed
        update_weights_from_tensor""",
    "Unsloth, prime-rl": """FastLanguageModel load_in_fp8 save_pretrained_merged
        trainer/models/layers/fp8_linear.py""",
    "XTuner, AutoModel": """components/models/common/utils.py docs/guides/fp8-training.mdx
        docs/performance-summary.mdx pretrain_sft/advanced_tutorial/float8.md""",
    "diffusers": """DiTTransformer2DModel FluxTransformer2DModel SD3Transformer2DModel
        WanTransformer3DModel condition_embedder time_text_embed""",
    "others": "SpectralSphere TRITON_CACHE_DIR on_after_backward on_train_batch_start",
    "made up in an example": "that_linear v0 runs/fsdp2_llama/result.json",
    "tried and removed: docs/experiments": "store_fp8",
}
"""Names, flags and files that are not in this repository, by whom they belong to."""


def spans(text: str) -> list[str]:
    """The texts in single backticks of a page, outside of fenced blocks."""
    return SPAN.findall(FENCE.sub("", text))


@cache
def files() -> frozenset[str]:
    """Paths of the repository's files and folders, with a slash in front."""
    found = {path for name in (*CODE, "docs", ".github") for path in (ROOT / name).rglob("*")}
    found |= set(ROOT.iterdir())
    return frozenset(
        f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}"
        for path in found
        if "__pycache__" not in path.parts
    )


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield from IDENTIFIER.findall(f"{node.name} {node.asname}")
        elif isinstance(node, ast.ImportFrom):
            yield from IDENTIFIER.findall(node.module or "")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\S+", str(node.value)):
            yield str(node.value)  # a name in a string: a column, a flag, a getattr
            yield from IDENTIFIER.findall(str(node.value))


@cache
def known() -> frozenset[str]:
    """Every name that the code defines or uses, without its docstrings and comments."""
    sources = {path for name in CODE for path in (ROOT / name).rglob("*.py")} - {Path(__file__)}
    found = {name for path in sources for name in _names(ast.parse(path.read_text("utf-8")))}
    found |= {Path(file).stem for file in files()}
    for other in ("Makefile", "pyproject.toml", "blocktensor/ops/runtime/player.cpp"):
        found |= set(re.findall(r"[\w-]+", (ROOT / other).read_text("utf-8")))
    return frozenset(found).union(*map(str.split, FOREIGN.values()))


def is_public(path: str) -> bool:
    """Whether a dotted path such as ``blocktensor.integrations.peft`` leads to something."""
    try:
        pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True


def unknown(span: str) -> list[str]:
    """The names in a span that look like names of this project and do not exist."""
    if span.startswith(FOREIGN_MODULES) or span in known():
        return []
    if PATH.fullmatch(span):
        pattern = re.escape(span).replace(r"\*", ".*")
        return [] if any(re.search(f"/{pattern}$", file) for file in files()) else [span]
    if span.startswith("make "):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return [] if span.split()[1] in targets else [span]
    if words := re.findall(r"(?<![\w-])--[a-z][\w-]+|\bBLOCKTENSOR_\w+", span):
        return [word for word in words if word not in known()]
    if not CALL.fullmatch(span) or not re.search(r"[_.(]|[a-z][A-Z]", span):
        return []
    dotted = span.partition("(")[0]
    first = dotted.partition(".")[0]
    if first in blocktensor.__all__:
        dotted = f"blocktensor.{dotted}"
    if dotted.startswith("blocktensor.") and not is_public(dotted):
        return [dotted]
    words = IDENTIFIER.findall(re.sub(r'"[^"]*"', "", span))
    return [word for word in words if word not in known() and not keyword.iskeyword(word)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page: Path) -> None:
    found = {span: names for span in spans(page.read_text("utf-8")) if (names := unknown(span))}
    assert found == {}


def test_invented_names_are_found() -> None:
    invented = """`blocktensor.covnert(model)` `convert(model, skip_smal=False)` `Recipe.exact()`
    `ops/gemm/hoper.py` `--gather-in-fp9` `BLOCKTENSOR_FASTPATH=0` `make demos` `gluon_ahead`"""
    found = [name for span in spans(invented) for name in unknown(span)]
    assert found == [
        "blocktensor.covnert",
        "skip_smal",
        "blocktensor.Recipe.exact",
        "ops/gemm/hoper.py",
        "--gather-in-fp9",
        "BLOCKTENSOR_FASTPATH",
        "make demos",
        "gluon_ahead",
    ]
