"""What a stranger sees first: the distributions, the public names, and versions."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import blocktensor

ROOT = Path(__file__).parents[1]
FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
OTHERS = ("tests/test_a.py", "benchmarks/results/a.json", "docs/a.md", "examples/a.py")
"""Files as those of the repository's other folders, which no distribution has."""

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    """Standard output of a Python process in ``folder``, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution of a copy of the repository, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("distribution")
    source, made = folder / "source", folder / "made"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "blocktensor", source / "blocktensor", ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    for name in OTHERS:
        (source / name).parent.mkdir(parents=True)
        (source / name).touch()
    sdist = made / run(["-c", BUILD, "build_sdist", str(made)], source).splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    wheel = made / run(["-c", BUILD, "build_wheel", str(made)], unpacked).splitlines()[-1]
    return sdist, wheel


def package_files() -> set[str]:
    """All files of the package, by their path in the repository."""
    files = (path for path in (ROOT / "blocktensor").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_the_wheel_is_the_package(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    data = "py.typed", "ops/gemm/hopper/tiles.json", "ops/runtime/player.cpp"
    assert {f"blocktensor/{name}" for name in data} <= names


def test_the_source_distribution_is_the_package_and_what_builds_it(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    others = {name for name in names if not name.startswith("blocktensor.egg-info/")}
    assert others == package_files() | set(FILES) | made


def test_the_wheel_runs_without_the_repository(built: tuple[Path, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(built[1]).extractall(tmp_path / "installed")
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "CUDA_VISIBLE_DEVICES": ""}
    program = "import blocktensor.__main__ as m; print(m.__file__); raise SystemExit(m.main())"
    where, *_, check = run(["-c", program], tmp_path, **environment).splitlines()
    assert Path(where) == tmp_path / "installed" / "blocktensor" / "__main__.py"
    assert check.startswith("self-check on cpu: ok")


def test_all_lists_names_that_exist() -> None:
    assert blocktensor.__all__ == sorted(blocktensor.__all__)
    namespace: dict[str, object] = {}
    exec("from blocktensor import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(blocktensor.__all__)


@pytest.mark.parametrize("name", ["functional", "distributed", "reports"])
def test_dir_shows_the_public_names_alone(name: str) -> None:
    module = getattr(blocktensor, name)
    assert dir(module) == sorted(module.__all__)
    assert set(dir(blocktensor)) == {*blocktensor.__all__, "__version__"}


@pytest.mark.parametrize("name", blocktensor.__all__)
def test_everything_public_is_documented(name: str) -> None:
    value = getattr(blocktensor, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        methods = [m for n, m in vars(value).items() if inspect.isfunction(m) and n[0] != "_"]
        assert [m.__qualname__ for m in methods if not inspect.getdoc(m)] == []


def test_the_version_is_the_one_declared() -> None:
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert blocktensor.__version__ == declared[1]
    assert f"version: {declared[1]}" in (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from a checkout
        assert metadata.version("blocktensor") == declared[1]


def test_importing_needs_neither_triton_nor_extras_and_leaves_torch_as_it_was() -> None:
    extras = "rich matplotlib hypothesis safetensors transformers peft torchtitan"
    state = "(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())"
    program = f"""
import sys
sys.modules["triton"] = None
import torch
before = {state}
import blocktensor
assert before == {state} and not torch.cuda.is_initialized()
assert not sys.modules.keys() & set("{extras}".split()), sorted(sys.modules)
"""
    run(["-W", "error", "-c", program], ROOT)


def test_the_workflows_run_the_supported_versions() -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    pythons = re.findall(r"3\.1\d(?=\")", workflow[workflow.index("python: [") :].split("]")[0])
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    tritons = re.search(r"triton: \[(.*)\]", workflow)
    assert tritons is not None
    assert f"TRITONS ?= {tritons[1].replace(', ', ' ').replace(chr(34), '')}\n" in makefile
    for target in re.findall(r"make (\w+)", workflow):
        assert f"\n{target}:" in makefile
