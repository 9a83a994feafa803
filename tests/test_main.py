"""``python -m blocktensor``: what it prints, and when it exits with 1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import blocktensor
from blocktensor import __main__ as command
from blocktensor.ops.devices import card
from blocktensor.reports.predict import tokens_to_gain

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine as one without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in command.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_environment(cpu_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "OPTIONAL", ("expecttest", "no-such-package"))
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "reference")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("platform.python_version", lambda: "3.11.7")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(blocktensor, "__version__", "0.1.0")
    monkeypatch.setattr("importlib.metadata.version", _version)
    assert_expected_inline(
        command.environment(),
        """\
blocktensor       0.1.0
python            3.11.7, Linux x86_64
torch             2.13.0+cpu, no CUDA
gpu               none
expecttest        1.2.3
no-such-package   not installed
BLOCKTENSOR_GEMM  reference""",
    )


def _version(package: str) -> str:
    if package == "expecttest":
        return "1.2.3"
    raise metadata.PackageNotFoundError(package)


def test_a_gpu_has_a_line(cpu_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 139 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    lines = [" ".join(line.split()) for line in command.environment().splitlines()]
    assert "cuda:0 NVIDIA H200, sm_90, 139.0 GiB" in lines
    assert not any(line.startswith("gpu") for line in lines)


def test_every_backend_has_its_reason() -> None:
    assert_expected_inline(
        command.backends(CPU),
        """\
ops on cpu     backend    runs  why not
-------------  ---------  ----  ------------------------------
casts          gluon      no    needs a CUDA device, got 'cpu'
casts          triton     no    needs a CUDA device, got 'cpu'
casts          reference  yes
GEMMs          gluon      no    needs a CUDA device, got 'cpu'
GEMMs          cublas     no    needs a CUDA device, got 'cpu'
GEMMs          triton     no    needs a CUDA device, got 'cpu'
GEMMs          reference  yes
grouped GEMMs  gluon      no    needs a CUDA device, got 'cpu'
grouped GEMMs  triton     no    needs a CUDA device, got 'cpu'
grouped GEMMs  reference  yes""",
    )


def test_a_report_ends_with_the_self_check(
    cpu_only: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert_expected_inline(
        re.sub(r"\b0\.03\d", "#", last.removeprefix("self-check on ")),
        """cpu: ok, errors of fprop, dgrad, wgrad: 0, 0, 0 to reference, #, #, # to fp32""",
    )


def test_the_self_check_runs_the_devices_kernels(device: torch.device) -> None:
    errors = command.self_check(device)
    assert command._holds(errors)
    # FP8 it is: bf16 products would be ten times nearer
    assert all(to_fp32 > 0.02 for _, to_fp32 in errors.values())


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_a_wrong_product_fails_and_nan_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], product: str
) -> None:
    linear, wrong = blocktensor.functional.linear, {product: 1.01}

    class Wrong(torch.autograd.Function):
        """A linear of which one product is one in a hundred too large."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return linear(x, w) * wrong.get("fprop", 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                y = linear(*leaves)
            dx, dw = torch.autograd.grad(y, leaves, grad)
            return dx * wrong.get("dgrad", 1), dw * wrong.get("wgrad", 1)

    monkeypatch.setattr(blocktensor.functional, "linear", Wrong.apply)
    assert command.main([]) == 1
    assert "self-check on cpu: FAILED, errors" in capsys.readouterr().out
    assert not command._holds({"fprop": (float("nan"), 0.04)})
    found = [{"holds": holds, "errors": {"fprop": (0.0, 0.0)}} for holds in (False, True)]
    monkeypatch.setattr(command, "_devices", lambda: [torch.device("cpu")] * 2)
    monkeypatch.setattr(command, "checked", lambda device: found.pop(0))
    assert command.main([]) == 1  # of one device of two


def test_the_command_reports_errors_and_goes_on() -> None:
    environment = {**os.environ, "BLOCKTENSOR_GEMM": "no-such-backend", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "blocktensor"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "BLOCKTENSOR_GEMM" in done.stdout
    *_, last = done.stdout.splitlines()
    assert_expected_inline(last, """self-check on cpu: FAILED, ValueError above""")
    assert "no-such-backend" in done.stderr


def test_json(
    cpu_only: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"] == command.environment_of()
    (cpu,) = found["devices"].values()
    assert cpu["backends"][-1] == {"ops": "grouped GEMMs", "backend": "reference", "why_not": None}
    assert cpu["self_check"]["holds"] is True
    assert [*cpu["self_check"]["errors"]] == ["fprop", "dgrad", "wgrad"]

    monkeypatch.setattr(command, "self_check", lambda device: 1 / 0)
    assert command.main(["--json"]) == 1
    (cpu,) = json.loads(capsys.readouterr().out)["devices"].values()
    assert cpu["self_check"] == {"holds": False, "error": "ZeroDivisionError"}


def test_what_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    host = command.host_us(CPU)
    assert host.keys() == {"bf16", "fp8"}
    assert min(host["bf16"], host["fp8"]) > 0  # some CPUs take longer for bf16
    usual = {"bf16": 150.0, "fp8": 170.0}
    assert_expected_inline(
        command.hint(usual, tokens_to_gain(4096, 4096, usual, card(CPU))),
        """\
host time of a linear layer, forward + backward: 170 us in FP8, 150 in bf16
in eager mode layers of 4096 x 4096 gain from 1,280 tokens on; use CUDA graphs for smaller ones""",
    )


def test_unknown_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nurse"], ["--yaml"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
    assert "unrecognized arguments: --yaml" in capsys.readouterr().err


# plan


def test_a_plan_exits_with_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    words = ["plan", "Llama-3.1-8B", "--gpus", "2", "--sequence", "8192", "--compile", "blocks"]
    assert command.main([*words, "--card", "H200"]) == 0
    fits = capsys.readouterr().out
    settings: dict[str, Any] = {"gpus": 2, "sequence": 8192, "compile": "blocks"}
    report = blocktensor.plan("Llama-3.1-8B", card="H200", **settings)
    assert fits == f"{report}\n"
    for before, after in (([], ["--json"]), (["--json"], [])):
        assert command.main([*before, *words, *after, "--card", "H200"]) == 0
        assert json.loads(capsys.readouterr().out) == report.to_dict()
    assert command.main(words) == 1
    assert "does not fit in FP8; what would fit:" in capsys.readouterr().out


def test_a_plan_of_other_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    words = ["LlamaConfig", "--layers", "2", "--set", "hidden_size=1024", "--wgrad-input", "1x128"]
    assert command.main(["plan", *words, "--convert-small", "--no-clip", "--no-reshard"]) == 0
    report = blocktensor.plan(
        "LlamaConfig",
        sizes={"num_hidden_layers": 2, "hidden_size": 1024},
        recipe=blocktensor.Recipe.deepseek(),
        skip_small=False,
        clip=False,
        reshard=False,
    )
    assert capsys.readouterr().out == f"{report}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Llama-3.1-8B", "--gpus", "-2"], "gpus=-2: expected 1 or more"),
        (["no-such-model"], "unknown model 'no-such-model'"),
        (["LlamaConfig", "--set", "hidden_size"], "--set 'hidden_size': expected NAME=VALUE"),
        (["Llama-3.1-8B", "--card", "B200"], "invalid choice: 'B200'"),
        ([], "the following arguments are required: model"),
    ],
)
def test_a_plan_that_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as exit:
        command.main(["plan", *words])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
