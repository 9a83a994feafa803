"""The ranks that tests run on: one that fails is named at once, and no call hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests.support import ranks

AT_ONCE = 60.0
"""Seconds, of which imports on busy cores take most; gloo waits for 30 minutes."""


@pytest.fixture
def pair() -> Iterator[Any]:
    group = ranks._Group(2, "cpu")
    yield group
    assert not group.is_open
    assert not any(process.is_alive() for process in group._processes)


def _fail_while_the_other_waits(aborts: bool) -> None:
    if dist.get_rank() == 1:
        os.write(2, b"why it aborts")
        os.abort() if aborts else os.stat("of rank 1 alone")
    dist.barrier()


@pytest.mark.parametrize("aborts", [False, True])
def test_a_rank_that_fails_is_named_while_others_wait_for_it(pair: Any, aborts: bool) -> None:
    start, why = time.monotonic(), "FileNotFoundError: .*'of rank 1 alone'"
    if aborts:
        why = "the process died with exit code -6\nwhy it aborts"
    with pytest.raises(RuntimeError, match=rf"rank 1:\n(?s:.*){why}"):
        pair.call(_fail_while_the_other_waits, aborts)
    assert time.monotonic() - start < AT_ONCE


def _rank_0_sleeps() -> None:
    time.sleep(1000 * (dist.get_rank() == 0))


def test_a_rank_that_does_not_return_is_named(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.call(time.sleep, 0)  # until both have started
    monkeypatch.setattr(ranks, "TIMEOUT", 1.0)
    with pytest.raises(RuntimeError, match=r"^waiting: \[0\]$"):
        pair.call(_rank_0_sleeps)


def test_an_interrupted_call_ends_its_ranks(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would give its answers to the next call."""
    monkeypatch.setattr(ranks, "connection", Mock(wait=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        pair.call(time.sleep, 1000)


def _corrupt(path: str, times: int) -> int:
    """What a corrupted heap does to rank 1 in the first calls."""
    made = Path(path, "calls")
    calls = len(made.read_text()) if made.exists() else 0
    dist.barrier()
    if dist.get_rank() == 1:
        made.write_text("x" * (calls + 1))
        if calls < times:
            os.write(2, b"free(): invalid pointer\n")
            os.abort()
    dist.barrier()
    return calls


def test_a_corrupted_heap_is_another_try(tmp_path: Path, capsys: Any) -> None:
    assert ranks.call_on_ranks(2, "cpu", _corrupt, str(tmp_path), 1) == [1, 1]
    assert "once more, since rank" in capsys.readouterr().err
    (tmp_path / "calls").unlink()
    with pytest.raises(ranks.HeapCorrupted, match=r"free\(\): invalid pointer"):
        ranks.call_on_ranks(2, "cpu", _corrupt, str(tmp_path), 2)
    with pytest.raises(RuntimeError, match="exit code -6") as other:
        ranks.call_on_ranks(1, "cpu", os.abort)
    assert not isinstance(other.value, ranks.HeapCorrupted)


def _corrupt_once(calls: str, folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    (folder / f"by {dist.get_rank()}").touch()
    if dist.get_rank() == 1 and not Path(calls).exists():
        Path(calls).touch()
        os.write(2, b"free(): invalid pointer\n")
        os.abort()
    dist.barrier()
    return names


def test_another_try_of_a_test_finds_its_folder_empty(tmp_path: Path) -> None:
    (tmp_path / "of the test").mkdir()
    calls, folder = str(tmp_path / "calls"), tmp_path / "of the test"
    assert ranks.call_on_ranks(2, "cpu", _corrupt_once, calls, folder=folder) == [[], []]


def _die_in_a_folder_that_is_used(rank: int, world: int, folder: str) -> list[str]:
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    Path(folder, f"by {rank}").touch()
    calls = Path(folder).with_name("calls")
    if rank == 1 and not calls.exists():
        calls.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return names


@pytest.mark.parametrize("start", [None, "start"])
def test_another_try_begins_with_the_first_ones_folder(tmp_path: Path, start: str | None) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "a checkpoint").touch()
    given = start and tmp_path / start
    names = ranks.run(_die_in_a_folder_that_is_used, 2, tmp_path / "runs", given)
    assert names == [["a checkpoint"] if start else []] * 2


def test_a_rank_that_does_not_start_says_why() -> None:
    group = ranks._Group(1, "no such device")
    with pytest.raises(RuntimeError, match=r"rank 0:\n(?s:.*)KeyError: 'no such device'"):
        group.call(time.sleep, 0)
    assert not group.is_open
