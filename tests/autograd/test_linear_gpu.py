"""What only a GPU can show of the differentiable linear: peak memory and streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blocktensor import functional, to_blockwise_fp8_weights
from blocktensor.ops import registry
from blocktensor.ops.gemm.choose_backend import gemm_backend
from blocktensor.ops.op import OPS
from blocktensor.ops.registry import NotCompiled
from blocktensor.ops.runtime.launch import Launch
from tests.support.models import linear, randn
from tests.support.numeric import relative_error

pytestmark = pytest.mark.gpu


def test_peak_memory_is_lower_by_the_bf16_copy_of_x() -> None:
    m, n, k = 4096, 18432, 7168

    def peak(convert: bool) -> int:
        module = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        if convert:
            to_blockwise_fp8_weights(module)
        leaf = torch.ones(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):  # a steady state: kernels loaded, workspaces taken, one cast a step
            module.zero_grad()
            leaf.grad = None
            torch.cuda.reset_peak_memory_stats()
            (module(leaf * 1) * 1).sum().backward()
            reached = torch.cuda.max_memory_allocated()
            with torch.no_grad():
                module.weight.mul_(0.5)
        return reached

    # before torch 2.13 autograd holds the gradient of y during its backward
    held = 0 if hasattr(torch.autograd.Function, "boxed_grads_call") else 2 * m * n
    assert peak(convert=False) - (peak(convert=True) - held) >= 2 * m * k


def test_between_steps_only_the_master_rests() -> None:
    def train(module: nn.Module) -> int:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            module(randn(512, 1024, device="cuda", grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.memory_allocated()

    train(linear(2048, 1024, device="cuda"))  # cuBLAS keeps a workspace for each thread
    module = linear(2048, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    assert train(module) <= before + 2**16


def test_on_a_stream_of_its_own() -> None:
    module, stream = linear(2048, 1024, device="cuda"), torch.cuda.Stream()
    x, grad = randn(512, 1024, device="cuda"), randn(512, 2048, seed=9, device="cuda")

    def run() -> list[Tensor]:
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        return [y.detach(), leaf.grad, module.weight.grad]

    wanted = run()
    module.weight.invalidate()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_training_goes_on_where_a_kernel_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next backend, after one warning; an error of the launch itself is raised."""
    pytest.importorskip("triton")
    gluon = gemm_backend("gluon")
    if gluon.why_not(torch.device("cuda", 0)):
        pytest.skip("no Hopper kernels here")
    launch = Launch.__call__

    def refuse(planned: Launch) -> None:
        if planned.kernel.__name__ == "gemm_kernel":
            raise NotCompiled("Triton does not compile gemm_kernel: no such instruction")
        launch(planned)

    monkeypatch.setattr(Launch, "__call__", refuse)
    x, w, g = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
        for shape, grad in (((272, 400), True), ((336, 400), True), ((272, 336), False))
    )
    try:
        with pytest.warns(UserWarning, match="does not compile gemm_kernel: no such instruction"):
            y = functional.linear(x, w)
        y.backward(g)
        assert gluon.why_not(x.device) is not None
    finally:
        registry._given_up.pop(gluon, None)
        for table in (OPS["gemm"], OPS["gemm_add_"]):
            table.forget()
    assert x.grad is not None
    assert w.grad is not None
    for found, wanted in (
        (y, x.float() @ w.float().t()),
        (x.grad, g.float() @ w.float()),
        (w.grad, g.float().t() @ x.float()),
    ):
        assert relative_error(found, wanted) < 0.06
