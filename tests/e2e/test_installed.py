"""What `pip install` leaves on a machine without the checkout: every module, and the demo.

Why it must hold: each node of a cluster installs the package; a module that is left out fails at import there, and
nowhere that the package is installed as editable. Not covered: that the dependencies resolve (make resolve).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL

ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron_bridge", "miles_like", "quant", "rollout", "routing_replay")
IMPORT = """
import importlib, pkgutil, sys
import megatron_bridge.trainer  # prepares the device, before anything imports megatron
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(found.name)
        print(found.name)
"""
IMPORT_ALONE = """
import importlib, os, pkgutil, sys
from megatron_bridge.device.device import init_device
init_device()  # before anything imports megatron
import megatron.core.dist_checkpointing, megatron.core.distributed, megatron.core.models.gpt, megatron.core.optimizer
import matplotlib.pyplot, ray, rich.console, safetensors, torch, transformers, typer  # libraries: once for all children
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        child = os.fork()  # so that no module is there because another one imported it
        if child == 0:
            importlib.import_module(found.name)
            print(found.name, flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{found.name} cannot be imported alone")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"  # a build leaves folders in its source
    for folder in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run([*command, "--wheel-dir", str(out)], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a fresh environment: the wheel, and this environment's other packages on its path."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return python


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


def modules() -> set[str]:
    files = [f.relative_to(ROOT) for package in PACKAGES for f in (ROOT / package).rglob("*.py")]
    return {".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files} - set(PACKAGES)


def test_every_module_of_the_checkout_is_installed_and_imported(python: Path, tmp_path: Path) -> None:
    done = _run([str(python), "-c", IMPORT, *PACKAGES], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert modules() == set(done.stdout.split())


@pytest.mark.long(beside="tests/e2e/test_installed.py")
def test_every_module_is_imported_before_all_others(python: Path, tmp_path: Path) -> None:
    """Each in a process that has libraries and none of our modules but the device's."""
    done = _run([str(python), "-c", IMPORT_ALONE, *PACKAGES], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert modules() == set(done.stdout.split())


def test_the_wheel_has_the_demo_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "miles_like/demo_files/tiny/train.jsonl" in names
    tops = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == set(PACKAGES)


def test_the_demo_runs_without_the_checkout(python: Path, tmp_path: Path) -> None:
    command = [str(python.parent / "miles-like"), "demo", *SMALL, "--set", "train.steps=2"]
    done = _run(command, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2
    assert (tmp_path / "runs/demo/report.html").is_file() and sorted(p.name for p in tmp_path.iterdir()) == ["runs"]
