"""What every test shares: GPU tests are skipped without one, fresh memory holds NaN."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

# cuBLAS refuses deterministic mode (see `poisoned_memory`) without this, read at its first use.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.distributed as dist

from blocktensor import text_table
from blocktensor.autograd import plan
from blocktensor.ops.runtime import build_player, check_recordings
from tests.support import fake_driver
from tests.support.garbage import collect_seldom

REPEATS = os.environ.get("BLOCKTENSOR_TEST_REPEATED", "0") not in ("", "0")
"""Also on a CPU, player.cpp runs linear layers, as on a GPU."""

if REPEATS:
    plan.RECORDED_DEVICES = ("cpu", "cuda")
    build_player.player = fake_driver.player

text_table.terminal_width = lambda: None  # with `pytest -s` too, reports have whole lines

torch.set_num_threads(1)  # test tensors are small: more threads wait for each other

if not torch.cuda.device_count():  # a pool of compilers imports torch once more for few kernels
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# the first GPU of each worker of pytest-xdist is another one; counting initializes none
gpus, worker = [*range(torch.cuda.device_count())], os.environ.get("PYTEST_XDIST_WORKER", "gw0")
if len(gpus) > 1:
    first = int(worker.removeprefix("gw")) % len(gpus)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, gpus[first:] + gpus[:first])))

_GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, help="of each kind of cases, run at most so many, spread evenly"
    )


def sampled(items: list[pytest.Item], most: int) -> Iterator[pytest.Item]:
    """At most ``most`` cases of each kind, the first one among them.

    Cases of a test function are of one kind, or of those that their names have before a number.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[re.sub(r"\[(?:(\w+) \d+|.*)\]$", r"[\1]", item.nodeid)].append(item)
    for found in cases.values():
        count = min(most, len(found))
        yield from (found[i * len(found) // count] for i in range(count))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (most := config.getoption("--sample")) is not None:
        items[:] = sampled(items, most)
    found = torch.cuda.device_count()
    for item in items:
        needed = max(
            (n for mark, n in _GPUS_NEEDED.items() if item.get_closest_marker(mark)), default=0
        )
        if check_recordings.ENABLED and item.get_closest_marker("unchecked"):
            item.add_marker(pytest.mark.skip(reason="counts what the checking mode adds"))
        if REPEATS and item.get_closest_marker("not_repeated"):
            item.add_marker(pytest.mark.skip(reason="watches what Python alone does"))
        if needed > found:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {found}"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile player.cpp while the workers collect: all of them would wait for the first test."""
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and session.config.getoption("numprocesses", None):
        threading.Thread(target=_build_player, daemon=True).start()


def _build_player() -> None:
    with suppress(ImportError, build_player.CannotBuild):  # tests that need it say so
        build_player.built()


def pytest_collection_finish() -> None:
    collect_seldom()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and where there is one the current GPU."""
    return torch.device(request.param)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill memory that an op allocates but does not write with NaN (integers: their maximum).

    Whatever is read before it is written, or never written, then shows. This is torch's own
    deterministic mode: unlike a patched ``torch.empty`` it also covers allocations in C++.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
