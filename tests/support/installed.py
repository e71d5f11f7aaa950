"""The wheel of this checkout, and a fresh environment in which it is installed: what a user without a checkout has.

A plugin of tests/conftest.py, whose fixtures tests of every folder use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron_bridge", "miles_like", "quant", "rollout", "routing_replay")

MadeOnce = Callable[[], AbstractContextManager[Path | None]]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """A context of the cache of the stages before training that is there for all workers, or will be when the one that
    finds it absent has made it, for which the others wait. None: there are no others."""

    @contextlib.contextmanager
    def locked() -> Iterator[Path | None]:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            yield None
            return
        made = tmp_path_factory.getbasetemp().parent / "made"
        made.mkdir(exist_ok=True)
        with (made / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield made / "cache"

    return locked


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"  # a build leaves folders in its source
    for folder in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index"]
    made = without_checkout([*command, "--wheel-dir", str(out)], out)
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, made_once: MadeOnce) -> Path:
    """Of a fresh environment: the wheel, and this environment's other packages on its path. One worker makes it for
    all."""
    with made_once() as cache:
        home = tmp_path_factory.mktemp("alone") if cache is None else cache.with_name("environment")
        if not (home / "made").exists():
            _install(request.getfixturevalue("wheel"), home)
            (home / "made").touch()
    return home / "bin" / "python"


def _install(wheel: Path, home: Path) -> None:
    venv.create(home, with_pip=False, clear=True)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = without_checkout(command, home)  # which may have a description of the package, as if it were installed
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read


def environment_without_checkout() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def without_checkout(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command of the installed wheel, within a quarter of an hour."""
    env = environment_without_checkout()
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
