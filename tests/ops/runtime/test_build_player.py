"""``player.cpp`` is compiled once, whoever begins together; without it everything works slowly."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from blocktensor.ops.runtime import build_player
from blocktensor.ops.runtime.build_player import CACHE_VARIABLE, SWITCH, CannotBuild
from tests.support.fake_driver import axpy, draw, fake_driver, op, player

__all__ = ["fake_driver"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the compiled file is kept in."""
    player()  # that of other tests, from its own folder
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A compiler that takes a while and writes its command; returns the commands so far."""
    player()
    script, log = tmp_path / "compiler", tmp_path / "commands"
    steps = [
        "#!/bin/sh",
        f'echo "$@" >> {log}',
        "sleep 0.5",
        'while [ "$1" != -o ]; do shift; done',
        'echo made > "$2"',
    ]
    script.write_text("\n".join(steps))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_a_file_is_compiled_once(
    cache: Path, compiler: Callable[[], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    path = build_player.built()
    assert (path.parent, path.read_text()) == (cache, "made\n")
    assert "compiling player.cpp once for torch" in capfd.readouterr().err
    assert build_player.built() == path
    assert len(compiler()) == 1
    assert capfd.readouterr().err == ""
    assert sorted(each.name for each in cache.iterdir()) == ["lock", path.name]


def test_processes_that_begin_together_compile_once(
    cache: Path, compiler: Callable[[], list[str]]
) -> None:
    code = "from blocktensor.ops.runtime import build_player; print(build_player.built())"
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in started}
    assert [Path(path).parent for path in paths] == [cache]
    assert len(compiler()) == 1


def test_a_file_that_another_host_has_compiled_meanwhile_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be loaded there; locks do not reach the other hosts of every file system."""

    def compile_on_two_hosts(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        made = Path(command[-1])
        made.write_text("this host's")
        (cache / made.name).write_text("the other host's")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", compile_on_two_hosts)
    path = build_player.built()
    assert path.read_text() == "the other host's"
    assert sorted(each.name for each in cache.iterdir()) == ["lock", path.name]


@pytest.mark.usefixtures("compiler")
def test_another_torch_library_or_source_has_a_file_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {build_player.built()}
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.99.0")
        paths.add(build_player.built())
    with monkeypatch.context() as patched:
        patched.setattr("platform.libc_ver", lambda: ("glibc", "2.99"))
        paths.add(build_player.built())
    changed = tmp_path / "player.cpp"
    changed.write_text(build_player.SOURCE.read_text() + "\n")
    monkeypatch.setattr(build_player, "SOURCE", changed)
    paths.add(build_player.built())
    assert len(paths) == 4


@pytest.mark.usefixtures("compiler")
def test_a_folder_that_cannot_be_written_to_is_passed_over(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file where the folder would be")
    assert build_player.built().parent == tmp_path / "home" / "blocktensor"
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("")
    path = build_player.built()
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o077 == 0
    assert build_player.built() == path  # not compiled again by the next process


PLAYER = build_player.player


@pytest.fixture
def not_loaded(fake_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process load the compiled file anew."""
    monkeypatch.setattr(build_player, "player", PLAYER)
    for name in ("_player", "load"):
        function = getattr(build_player, name).__wrapped__
        monkeypatch.setattr(build_player, name, functools.cache(function))


@pytest.mark.usefixtures("cache", "not_loaded")
@pytest.mark.parametrize("how", ["no compiler", "a failing compiler", "a file that cannot load"])
def test_without_the_compiled_file_kernels_are_launched_by_triton(
    how: str, compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "cannot be loaded"
    if how == "no compiler":
        monkeypatch.setenv("CXX", "/no/such/compiler")
        said = r"no C\+\+ compiler was found \(\$CXX\)"
    elif how == "a failing compiler":
        (tmp_path / "compiler").write_text("#!/bin/sh\necho 'x.h: fatal error: none' >&2\nexit 1\n")
        said = "cannot compile .*: x.h: fatal error: none"
    a = op(axpy)
    x, y = draw(2, 8)
    with pytest.warns(UserWarning, match=said) as caught:
        got = a.call(x, y, 3)
    assert torch.equal(got, 3 * x + y)
    assert len(caught) == 1
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert (a.kernel.ordinary, a.kernel.direct) == (4, [])
    assert build_player.why_none() != ""


@pytest.mark.usefixtures("not_loaded")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    a, (x, y) = op(axpy), draw(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(a.call(x, y, 3), 3 * x + y)
    assert (a.kernel.ordinary, a.kernel.direct) == (3, [])
    assert build_player.why_none() == f"switched off by {SWITCH}=0"


def test_an_error_names_the_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CannotBuild, match="false cannot compile"):
        build_player.built()
    assert [each.name for each in cache.iterdir()] == ["lock"]
